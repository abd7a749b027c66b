"""``sx.strategies``: the strategies of an op on a mesh by its rule, as data that can be run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shardfx.ir.errors import DOES_NOT_RUN, Error
from shardfx.ir.graph import Node, factors_text, op_name
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.traits import storage_offset
from shardfx.ir.oracle.instance import instance
from shardfx.ir.oracle.soundness import run
from shardfx.ir.rules.book import RuleEntry
from shardfx.ir.rules.strategy import strategies as enumerate_strategies
from shardfx.ir.spec import Spec

from .plugins import all_rules


@dataclass(frozen=True)
class OpStrategy:
    """One way to compute an op on a mesh: the placements of its tensors, and the call of each rank.

    ``operands`` and ``results`` are :class:`shardfx.Spec` objects, in the order of the tensors among the arguments
    and the results; ``sharding`` says which factor of the rule each axis shards, as ``m{dp} k{tp}``.
    """

    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]
    sharding: str
    mesh: Mesh = field(repr=False)
    _node: Node = field(repr=False, compare=False)
    _entry: RuleEntry = field(repr=False, compare=False)

    def call(self, *shards: torch.Tensor, rank: int = 0) -> Any:
        """The local call of a rank: from shards of the tensor operands to its shard of the result; a tuple of several.

        Args:
            shards: of the local shapes that ``operands`` say; a term of the sum where one is partial.
            rank: its number in the mesh, whose last axis varies fastest.

        Raises:
            Error: other shards, or no such rank.
        """
        where, node = f"strategies({op_name(self._node.op)})[...].call(...)", self._node
        if not 0 <= rank < self.mesh.size:
            raise Error("no such rank", where=where, expected=f"0 to {self.mesh.size - 1}", got=rank)
        coords = self.mesh.coords(rank)
        pairs = zip(node.operands, self.operands, strict=True)
        expected = [spec.local_shape(value.shape, self.mesh, coords) for value, spec in pairs]
        if not all(isinstance(shard, torch.Tensor) and not shard.is_meta for shard in shards):
            raise Error("the shards are no tensors with content", where=where, expected=_shapes(expected), got=shards)
        got = [tuple(shard.shape) for shard in shards]
        if got != expected:
            what = f"rank {rank} has other shards of the operands"
            raise Error(what, where=where, expected=_shapes(expected), got=_shapes(got) or "none")
        made = run(self._entry, node, self.mesh, rank, shards)
        tensors = tuple(r for r, value in zip(made, node.results, strict=False) if value is not None)
        returns = node.op._schema.returns
        return tensors[0] if [str(each.type) for each in returns] == ["Tensor"] else tensors

    def __str__(self) -> str:
        """``[4, 6{a}], [6{a}, 5] -> [4, 5] +{a}``."""
        sides = ((self._node.operands, self.operands), (self._node.outs, self.results))
        return " -> ".join(", ".join(s.text(v.shape) for v, s in zip(*side, strict=True)) for side in sides)


def strategies(
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    mesh: Mesh = Mesh(a=2),  # noqa: B008  (immutable)
    discover: bool = True,
) -> list[OpStrategy]:
    """The strategies that the rule of an op offers for one call: placements with which no rank communicates.

    The first one shards nothing. The others shard factors of the rule and find operands partial, on each axis one of
    both, or both where the rule says so. Operands are partial by sums. A factor is sharded plainly; a dim that is a
    product of factors may then be a compound, as ``(2 3{a})``.

    Args:
        op: an ``OpOverload``, such as ``torch.ops.aten.mm.default``.
        args, kwargs: those of the call, with global tensors, of which those on ``meta`` do.
        mesh: its axes of more than one rank are used.
        discover: search the rule of an op that has none, as planning does.

    Raises:
        Error: the op has no rule for this call, it does not take the arguments, or it is no op.

    Example::

        x, w = torch.empty(4, 6, device="meta"), torch.empty(6, 5, device="meta")
        for each in sx.strategies(torch.ops.aten.mm.default, (x, w)):
            print(each)                                # ..., [4, 6{a}], [6{a}, 5] -> [4, 5] +{a}, ...
    """
    where = "strategies(...)"
    if not isinstance(op, torch._ops.OpOverload):
        expected = "an OpOverload, such as torch.ops.aten.mm.default"
        remedy = "name the overload" if isinstance(op, torch._ops.OpOverloadPacket) else None
        raise Error("this is no op", where=where, expected=expected, got=repr(op), remedy=remedy)
    name = op_name(op)
    where = f"strategies({name})"
    if not isinstance(mesh, Mesh) or not isinstance(args, (tuple, list)):
        expected, got = "a tuple of arguments, and an sx.Mesh", f"{type(args).__name__}, {type(mesh).__name__}"
        raise Error("the arguments are no call on a mesh", where=where, expected=expected, got=got)
    entry = all_rules(discover=discover).entry(op)
    if entry is None:
        raise _without_a_rule(name, where, discover)
    try:
        node = instance(op, tuple(args), kwargs).node
    except DOES_NOT_RUN as error:
        raise Error(f"{name} does not take these arguments", where=where, got=error) from error
    offset = storage_offset(node.op, node.args, node.kwargs)
    if offset is not None:
        raise Error(
            f"{name} reads the storage of its operand at an offset",
            where=where,
            expected="storage_offset=None: from the first element of the operand",
            got=f"storage_offset={offset}",
            remedy="slice the operand first, as planning does",
        )
    rule = entry.make(node)
    if rule is None:
        raise _without_a_rule(name, where, discover)
    return [
        OpStrategy(made.operands, made.results, factors_text(made.shardings), mesh, replace(node, strategy=made), entry)
        for made in enumerate_strategies(rule, node, mesh)
    ]


def _without_a_rule(name: str, where: str, discover: bool) -> Error:
    searched = "written, of a plugin or discovered" if discover else "written, or of a plugin"
    return Error(
        f"{name} has no rule for this call",
        where=where,
        expected=f"an op with a rule that is {searched}",
        got=name,
        remedy="write one: see docs/writing_rules.md; planning replicates such an op on every rank, or puts others "
        "in its place (dropout, attention)" + ("" if discover else "; or say discover=True"),
    )


def _shapes(shapes: Sequence[tuple[int, ...]]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)
