"""Op rules, and the rule book.

A rule is an einsum over *factors*, in the spirit of Shardy's::

    rule(aten.mm.default, "m k, k n -> m n", linear="0|1")

A factor that is missing from *one* result makes *that* result partial over the axes that shard the factor.
``linear`` says which operands may be partial sums: ``"0|1"`` one of them at a time, ``"0&1"`` both together,
``"&"`` all; ``"0>1"``: of the results only number 1 is then partial; ``"0>"``: no result is, as the op does not read
the values. A missing optional operand is left out of the template. A function of the node may return the template,
or a full :class:`ShardingRule`. From a rule follow all strategies of an op, for any
number of mesh axes: see :func:`shardfx.ir.rules.strategy.strategy`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch

from shardfx.ir.builder import makes_of_nothing
from shardfx.ir.errors import Error
from shardfx.ir.graph import Node, Strategy, Value
from shardfx.ir.mesh import Mesh

from .local import TARGETS, Emit, is_sharded, may_lack, results_of_empty_shard
from .sharding_rule import Dim, ShardingRule
from .strategy import as_placed
from .template import ALL, Template, Tensor, parse_linear, parse_tensor, template


def perform(entry: RuleEntry | None, emit: Emit) -> Any:
    """Lower a node to one rank: by its rule's ``local`` function, or as the op itself with the local shape."""
    sharding = is_sharded(emit.node)
    if sharding and entry is not None and may_lack(emit.node, emit.mesh):
        nothing = results_of_empty_shard(entry.make(emit.node), emit)
        if nothing is not None:
            return nothing
    if entry is not None and entry.local is not None and sharding:
        return entry.local(emit)
    args = emit.args
    if entry is not None and entry.shape_arg is not None:
        args = (*args[: entry.shape_arg], list(emit.result_shape(0)), *args[entry.shape_arg + 1 :])
    if entry is not None and entry.sized and sharding:
        args = sized_args(entry, emit, args)
    if entry is not None and entry.rows is not None and (leaders := sharding_leaders(entry, emit.node)):
        return entry.rows(emit, args, leaders)
    return emit.call(TARGETS.get(emit.node.op, emit.node.op), *args, **emit.kwargs)


def sharding_leaders(entry: RuleEntry, node: Node) -> frozenset[str]:
    """The sharded factors that lead windows, or may be sharded by themselves among windowed ones."""
    rule = entry.make(node)
    assert rule is not None and node.strategy is not None
    return (rule.leaders | rule.alone) & {factor for factor, axes in node.strategy.shardings if axes}


def sized_args(entry: RuleEntry, emit: Emit, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, with local sizes for those named in ``sized``."""
    rule = entry.make(emit.node)
    assert rule is not None
    changed = list(args)
    for name, tensor in entry.sized:
        place = next(i for i, each in enumerate(emit.node.op._schema.arguments) if each.name == name)
        if place < len(args) and args[place] is not None:
            local = [local_size(rule, emit, dim) for dim in tensor.factors(rule.sizes)]
            changed[place] = local if isinstance(args[place], (list, tuple)) else local[0]
    return tuple(changed)


def local_size(rule: ShardingRule, emit: Emit, dim: Dim) -> int:
    """The local size of a dim of these factors, from a tensor dim made of them and of replicated ones."""
    if not dim:
        return 1
    made = [dims for dims in rule.results if dims is not None]
    for i, dims in enumerate((*rule.operands, *made)):
        for d, each in enumerate(dims):
            rest = [f for f in each if f not in dim]
            if len(each) == len(dim) + len(rest) and rule.replicated.issuperset(rest):
                operands = len(rule.operands)
                shape = emit.operand_shape(i) if i < operands else emit.result_shape(i - operands)
                return shape[d] // math.prod(rule.sizes[f] for f in rest)
    raise Error("no tensor of the node has a dim of these factors", expected=" ".join(dim), got=str(emit.node.op))


class Contiguous(Enum):
    """A kernel's requirement on the memory layout of its operands: some compute wrong numbers for others, silently."""

    ANY = "any"
    LAST_DIM = "last dim"
    ALL = "all dims"
    ALIGNED = "all dims, where a number of any dtype may lie"

    def takes(self, shape: Sequence[int], stride: Sequence[int]) -> bool:
        """Whether the kernel accepts an operand of this layout."""
        if self is Contiguous.ANY or (self is Contiguous.LAST_DIM and (not shape or stride[-1] == 1)):
            return True
        return torch.empty_strided(tuple(shape), tuple(stride), device="meta").is_contiguous()


MakeRule = Callable[[Node], "ShardingRule | None"]
MakeLocal = Callable[[Emit], Any]
MakeRows = Callable[[Emit, tuple[Any, ...], frozenset[str]], Any]
"""Writes a rank's call with a halo, from the node, its arguments with local sizes, and the sharded leaders."""


@dataclass(frozen=True)
class RuleEntry:
    """A rule in a rule book: its ops, and how one rank's version of a node is written.

    ``shape_arg`` is the index of an argument that is the result's shape, replaced by the local one; ``sized`` names
    arguments that are sizes of dims; ``local`` writes any other version; ``free`` marks an op of negligible cost, which
    may be repeated for each placement that its result is needed in; ``contiguous`` is the memory layout that its
    kernel requires; ``expand`` allows its decomposition if a factor that it replicates is to be sharded
    (True: torch's own); ``rows`` writes one rank's version if a leader of windows is sharded, from
    arguments with local sizes; ``discovered`` marks a rule that was found by running the op.
    """

    ops: tuple[Any, ...]
    make: MakeRule
    text: str = ""
    shape_arg: int | None = None
    sized: tuple[tuple[str, Tensor], ...] = ()
    local: MakeLocal | None = None
    expand: bool | Callable[..., Any] = False
    free: bool = False
    contiguous: Contiguous = Contiguous.ANY
    discovered: bool = False
    rows: MakeRows | None = None


def rule(
    ops: Any,
    form: str | Callable[[Node], str | Template | ShardingRule | None],
    *,
    linear: str = "",
    reduce: str = "sum",
    moves_only: bool = False,
    transparent: bool = False,
    identity: str = "",
    shape_arg: int | None = None,
    sized: Mapping[str, str] | None = None,
    local: MakeLocal | None = None,
    expand: bool | Callable[..., Any] = False,
    free: bool = False,
    contiguous: Contiguous = Contiguous.ANY,
    rows: MakeRows | None = None,
) -> RuleEntry:
    """A :class:`RuleEntry` from a template such as ``"m k, k n -> m n"``, or from a function of the node that returns
    one (or a full :class:`ShardingRule`; None if this node has no rule).

    Args:
        ops: an ``OpOverload``, an ``OpOverloadPacket`` (all its overloads), or a tuple of them.
        identity: a factor; if it has size one, the op returns its first operand.
        sized: arguments that are sizes, by the factors of their dims: ``{"group": "g"}``.

    Raises:
        Error: the template cannot be read.

    Example::

        rule(torch.ops.mylib.scale_rows.default, "n d, n -> n d", linear="0|1")
    """

    def read(text: str) -> Template:
        return template(text, linear, reduce, moves_only, transparent, identity)

    def make(node: Node) -> ShardingRule | None:
        assert not isinstance(form, str)
        made = form(node)
        if isinstance(made, str):
            made = read(made)
        return made(node) if isinstance(made, Template) else made

    targets = ops if isinstance(ops, tuple) else (ops,)
    text = form if isinstance(form, str) else _name(form)
    follow = tuple((name, parse_tensor(dims)) for name, dims in (sized or {}).items())
    made = read(form) if isinstance(form, str) else make
    return RuleEntry(targets, made, text, shape_arg, follow, local, expand, free, contiguous, rows=rows)


def _name(form: Any) -> str:
    """The name of a function of nodes, or the template that a partial one binds first."""
    return str(form.args[0] if isinstance(form, functools.partial) else form.__name__)


Fallback = Callable[[Any], "RuleEntry | None"]


@dataclass(frozen=True, eq=False)
class RuleBook:
    """The rules by op: for an overload, for all overloads of a name, for pointwise ops (by torch's tag), or for ops
    that create tensors (by torch's schema).

    For any other op the fallback is asked, if the book has one.
    """

    by_op: Mapping[Any, RuleEntry]
    pointwise: RuleEntry
    made: RuleEntry
    fallback: Fallback | None = None

    def extended(self, entries: Iterable[RuleEntry]) -> RuleBook:
        """A new book with ``entries`` added, which take precedence."""
        return replace(self, by_op={**self.by_op, **{op: entry for entry in entries for op in entry.ops}})

    def with_fallback(self, fallback: Fallback) -> RuleBook:
        """A new book that asks ``fallback`` for missing rules."""
        return replace(self, fallback=fallback)

    def entry(self, op: Any) -> RuleEntry | None:
        """The entry of an op, or None without a rule."""
        found = self.by_op.get(op)
        if found is None and isinstance(op, torch._ops.OpOverload):
            found = self.by_op.get(op.overloadpacket)
            if found is None and torch.Tag.pointwise in op.tags:
                found = self.pointwise
            elif found is None and makes_of_nothing(op):
                found = self.made
        if found is None and self.fallback is not None:
            found = self.fallback(op)
        return found

    def rule(self, node: Node) -> ShardingRule:
        """The rule of a node; a replicated one, where there is none."""
        entry = self.entry(node.op)
        return (entry.make(node) if entry is not None else None) or replicated(node)

    def as_placed(self, node: Node, mesh: Mesh) -> Strategy:
        """The strategy of a node that keeps its operands' placements, as far as its rule allows."""
        return as_placed(self.rule(node), node, mesh)


def replicated(node: Node, linear: str = "") -> ShardingRule:
    """The rule of an op that is replicated: nothing may be sharded, but partial sums of some operands may pass."""
    sizes: dict[str, int] = {}

    def dims(prefix: str, value: Value) -> tuple[Dim, ...]:
        names = [f"{prefix}{d}" for d in range(value.type.ndim)]
        sizes.update(zip(names, value.shape, strict=True))
        return tuple((name,) for name in names)

    operands = tuple(dims(f"a{i}_", v) for i, v in enumerate(node.operands))
    results = tuple(None if v is None else dims(f"r{i}_", v) for i, v in enumerate(node.results))
    every = frozenset(range(len(operands)))
    groups = tuple(g._replace(operands=every) if g.operands is ALL else g for g in parse_linear(linear))
    return ShardingRule(operands, results, sizes, frozenset(sizes), groups)
