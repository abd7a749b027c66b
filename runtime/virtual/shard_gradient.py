"""Gradients of shards that know what they were computed from.

On virtual ranks ``p.grad`` is a shard's gradient, a plain tensor. Its norm is the shard's: a script that divides each
gradient by its norm does something else there than on one device. Whether it does is followed through the ops on these
gradients (torch's own tag says which are pointwise):

    norm = p.grad.norm()               depends on this shard alone
    p.grad.mul_(2.0)                   pointwise: an element goes by itself
    p.grad.div_(norm)                  depends on this shard alone: an Error when it is used
    total = stack(all norms).norm()    depends on all shards of each parameter: one device's norm
    p.grad.div_(total)                 right

A number that was read (``norm.item()``) counts for what is done next to gradients of the same parameter, until that of
each shard was read.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map_only

from shardfx.ir.errors import Error

Tensor = torch.Tensor
aten = torch.ops.aten
MOVES = frozenset(
    "copy_ _to_copy zero_ fill_ masked_fill masked_fill_ detach_ cat stack set_ lift_fresh _unsafe_view".split()
)
"""Ops that are not tagged as pointwise, and compute nothing of several elements."""
RENEWS = frozenset("copy_ zero_ fill_".split())
"""What these write stands in the place of what was there."""


@dataclass(eq=False)
class Sharded:
    """A parameter in several shards; ``read`` are those of which a number was read."""

    name: str
    count: int
    shards: Sequence[weakref.ref[Tensor]]
    read: set[int] = field(default_factory=set)


Shard = tuple[Sharded, int]


@dataclass(eq=False)
class Facts:
    """Whose elements a tensor has, and on which shards it depends as a whole. Views share them."""

    own: frozenset[Shard] = frozenset()
    depends: frozenset[Shard] = frozenset()

    def read(self) -> None:
        """Note that somebody knows numbers of it."""
        for sharded, number in self.depends | self.own:
            sharded.read.add(number)
            if len(sharded.read) == sharded.count:
                sharded.read.clear()


class ShardGradient(Tensor):
    """A gradient of a shard, or what was computed of one."""

    facts: Facts

    @staticmethod
    def of(tensor: Tensor, facts: Facts) -> ShardGradient:
        """A tensor with its facts, in the same memory."""
        made = tensor.as_subclass(ShardGradient)
        made.facts = facts
        return made

    @property
    def plain(self) -> Tensor:
        """A plain tensor in the same memory."""
        with no_dispatch():
            return self.as_subclass(Tensor)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.plain)

    def __format__(self, spec: str) -> str:
        return format(self.plain, spec)

    def numpy(self, *, force: bool = False) -> Any:
        """The elements as an array."""
        self.facts.read()
        return self.plain.numpy(force=force)

    def tolist(self) -> Any:
        """The elements as a list."""
        self.facts.read()
        return self.plain.tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = made = self.clone()
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)

    def check(self, where: str) -> None:
        """Raise if this depends on some shards of a parameter alone.

        Raises:
            Error: it does.
        """
        for sharded, number in self.facts.depends:
            raise Error(
                f"the gradient of {sharded.name!r} was changed shard by shard",
                where=where,
                expected="changes of each element alone, or by all shards of a parameter",
                got=f"a value computed of shard {number} of {sharded.count} alone (a norm, a mean)",
                remedy="pm.clip_grad_norm_(max_norm) or torch.nn.utils.clip_grad_norm_(pm.parameters(), max_norm) for "
                "the norm of all; Hints(optimizer=...) or torchrun, where gradients are DTensors, for what looks at "
                "global tensors; or leave these parameters unsharded",
            )

    def check_others(self, where: str) -> None:
        """Raise if another shard of the parameter has no gradient; numbers that were read so far are forgotten.

        Raises:
            Error: one has none.
        """
        for sharded, number in self.facts.own:
            sharded.read.clear()
            for other, shard in enumerate(each() for each in sharded.shards):
                if shard is not None and shard.numel() and shard.grad is None:
                    raise Error(
                        f"only some shards of {sharded.name!r} have a gradient",
                        where=where,
                        expected="a gradient of each shard of a parameter, or of none",
                        got=f"one of shard {number}, and none of shard {other} of {sharded.count}",
                        remedy="drop the gradients of all shards of a parameter together; or run under torchrun, where "
                        "gradients are DTensors",
                    )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with no_dispatch():
            made = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if name.startswith("_foreach_"):
            return _each(func, name, args, made)
        return _follow(func, name, args, kwargs, made)


def _follow(func: Any, name: str, args: Any, kwargs: Any, made: Any) -> Any:
    """What an op gave, with its facts."""
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    known = [leaf.facts for leaf in given if isinstance(leaf, ShardGradient)]
    if name.endswith("_like") or name.startswith("new_"):
        return made
    if func.is_view:
        return tree_map_only(Tensor, lambda each: ShardGradient.of(each, known[0]), made)
    if name == "_local_scalar_dense":
        known[0].read()
        return made
    pointwise = torch.Tag.pointwise in func.tags or name in MOVES
    facts = _facts(known, pointwise)
    written = [
        value
        for argument, value in zip(func._schema.arguments, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    for value in tree_leaves((written, kwargs.get("out"))):
        if isinstance(value, Tensor):
            _write(value, facts if name not in RENEWS else _facts([_of(v) for v in given[1:]], True), name in RENEWS)
    return made if written else _wrapped(made, facts)


def _each(func: Any, name: str, args: Any, made: Any) -> Any:
    """What an op on lists gave: the results at one place are those of the arguments there."""
    single = name.removeprefix("_foreach_")
    op = getattr(aten, single, None)
    pointwise = single in MOVES or (
        op is not None and any(torch.Tag.pointwise in getattr(op, each).tags for each in op.overloads())
    )
    lists = [each for each in args if isinstance(each, (list, tuple)) and any(isinstance(v, Tensor) for v in each)]
    others = [each for each in args if isinstance(each, Tensor)]
    results = []
    for number, target in enumerate(lists[0]):
        inside = [each[number] for each in lists] + others
        facts = _facts([_of(v) for v in (inside[1:] if single in RENEWS else inside)], pointwise)
        if name.endswith("_"):
            _write(target, facts, single in RENEWS)
        else:
            results.append(_wrapped(made[number], facts))
    return made if name.endswith("_") else results


def _of(value: object) -> Facts:
    return value.facts if isinstance(value, ShardGradient) else Facts()


def _facts(known: Iterable[Facts], pointwise: bool) -> Facts:
    """Those of what is computed of tensors."""
    own = frozenset(shard for each in known for shard in each.own)
    depends = frozenset(shard for each in known for shard in each.depends)
    if not pointwise:
        return Facts(depends=_incomplete(depends | own))
    read = {(sharded, number) for sharded, _ in own for number in sharded.read}
    return Facts(own, _incomplete(depends | read))


def _incomplete(shards: frozenset[Shard]) -> frozenset[Shard]:
    """Without those of parameters of which there are all."""
    numbers: dict[Sharded, set[int]] = {}
    for sharded, number in shards:
        numbers.setdefault(sharded, set()).add(number)
    for sharded in [each for each, found in numbers.items() if len(found) == each.count]:
        sharded.read.clear()
        del numbers[sharded]
    return frozenset((sharded, number) for sharded, found in numbers.items() for number in found)


def _write(target: Tensor, facts: Facts, renews: bool) -> None:
    """Note what was written into a tensor.

    Raises:
        Error: it is a shard, and depends on itself alone.
    """
    if isinstance(target, ShardGradient):
        facts = _facts([facts, Facts(own=target.facts.own)], True)
        before = frozenset() if renews else target.facts.depends
        target.facts.depends = _incomplete(before | facts.depends)
        return
    shards = [sharded.shards[number]() for sharded, number in facts.depends]
    if any(p is not None and p.numel() and _memory(p) == _memory(target) for p in shards):
        ShardGradient.of(target, facts).check("a parameter written in place")


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _wrapped(made: Any, facts: Facts) -> Any:
    if not facts.own and not facts.depends:
        return made
    return tree_map_only(Tensor, lambda each: ShardGradient.of(each, Facts(facts.own, facts.depends)), made)


def plain(tensor: Tensor) -> Tensor:
    """A tensor without facts, in the same memory."""
    return tensor.plain if isinstance(tensor, ShardGradient) else tensor
