"""A tensor subclass for gradients of shards, which tracks the shards that a value depends on.

On virtual ranks ``p.grad`` is a shard's gradient, a plain tensor. Its norm is the shard's: a script that divides each
gradient by its norm computes something else than on one device. Such dependences are tracked through the ops on these
gradients (torch's own tag says which are pointwise):

    norm = p.grad.norm()               depends on this shard alone
    p.grad.mul_(2.0)                   pointwise: an element goes by itself
    p.grad.div_(norm)                  depends on this shard alone: an Error when it is used
    total = stack(all norms).norm()    depends on all shards of each parameter: one device's norm
    p.grad.div_(total)                 right

A number that Python reads (``norm.item()``) is taken as an operand of later ops on gradients of the same parameter,
until one of each shard was read.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map_only

from shardfx.ir.errors import Error

Tensor = torch.Tensor
aten = torch.ops.aten
MOVES = frozenset(
    "copy_ zero_ fill_ _to_copy masked_fill masked_fill_ detach_ cat stack set_ lift_fresh _unsafe_view".split()
)
"""Ops that are not tagged as pointwise, yet combine no elements."""


@dataclass(eq=False)
class Sharded:
    """A parameter in several shards; ``read`` are those of which a number was read (``.item()``)."""

    name: str
    count: int
    shards: Sequence[weakref.ref[Tensor]]
    read: set[int] = field(default_factory=set)


Shard = tuple[Sharded, int]


@dataclass(eq=False)
class Facts:
    """The provenance of a tensor: the shards whose elements it has, and those it depends on. Views share it."""

    own: frozenset[Shard] = frozenset()
    depends: frozenset[Shard] = frozenset()

    def read(self) -> None:
        """Note that a number of it was read by Python."""
        for sharded, number in self.depends | self.own:
            sharded.read.add(number)
            if len(sharded.read) == sharded.count:
                sharded.read.clear()


class ShardGradient(Tensor):
    """A gradient of a shard, or a tensor computed from one."""

    facts: Facts

    @staticmethod
    def of(tensor: Tensor, facts: Facts) -> ShardGradient:
        """A tensor with its facts, in the same memory."""
        made = tensor.as_subclass(ShardGradient)
        made.facts = facts
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(plain(self))

    def __format__(self, spec: str) -> str:
        return format(plain(self), spec)

    def numpy(self, *, force: bool = False) -> Any:
        """The elements as an array."""
        self.facts.read()
        return plain(self).numpy(force=force)

    def tolist(self) -> Any:
        """The elements as a list."""
        self.facts.read()
        return plain(self).tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = made = self.clone()
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, func._schema.name.removeprefix("aten::")
        if name.startswith("_foreach_"):
            single = getattr(aten, name.removeprefix("_foreach_"))
            results = [single(*each, **kwargs) for each in _places(args)]
            return None if name.endswith("_") else results
        with no_dispatch():
            made = func(*args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        facts = next(leaf.facts for leaf in given if isinstance(leaf, ShardGradient))
        if name.endswith("_like") or name.startswith("new_"):
            return made
        if func.is_view:
            return tree_map_only(Tensor, lambda each: ShardGradient.of(each, facts), made)
        if name == "_local_scalar_dense":
            facts.read()
            return made
        written = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        targets = [each for each in tree_leaves((written, kwargs.get("out"))) if isinstance(each, Tensor)]
        return _follow(name, torch.Tag.pointwise in func.tags, given, targets, made)


def _places(args: Any) -> Iterator[list[Any]]:
    """The arguments of a foreach op at each index of its lists."""
    lists = [isinstance(each, (list, tuple)) for each in args]
    for i in range(len(args[lists.index(True)])):
        yield [each[i] if is_list else each for each, is_list in zip(args, lists, strict=True)]


def _follow(name: str, pointwise: bool, tensors: list[Tensor], targets: list[Tensor], made: Any) -> Any:
    """An op's result, with its facts; those of tensors that it writes to are updated.

    Raises:
        Error: a parameter was written into that depends on some of its shards alone.
    """
    facts = combined(tensors, pointwise or name in MOVES)
    for target in targets:
        if isinstance(target, ShardGradient):
            known = combined([target], True, facts)
            target.facts.depends = known.depends
        elif isinstance(target, nn.Parameter):
            check(facts, "a parameter written in place")
    if targets or not (facts.own or facts.depends):
        return made
    return tree_map_only(Tensor, lambda each: ShardGradient.of(each, Facts(facts.own, facts.depends)), made)


def combined(tensors: Iterable[Tensor], pointwise: bool, *more: Facts) -> Facts:
    """The facts of a value that is computed from tensors."""
    known = [*more, *(each.facts for each in tensors if isinstance(each, ShardGradient))]
    own = frozenset(shard for each in known for shard in each.own)
    depends = frozenset(shard for each in known for shard in each.depends)
    if not pointwise:
        return Facts(depends=_incomplete(depends | own))
    read = {(sharded, number) for sharded, _ in own for number in sharded.read}
    return Facts(own, _incomplete(depends | read))


def _incomplete(shards: frozenset[Shard]) -> frozenset[Shard]:
    """The shards without those of parameters all of whose shards are among them."""
    numbers: dict[Sharded, set[int]] = {}
    for sharded, number in shards:
        numbers.setdefault(sharded, set()).add(number)
    complete = [each for each, found in numbers.items() if len(found) == each.count]
    for sharded in complete:
        sharded.read.clear()
    return frozenset(shard for shard in shards if shard[0] not in complete)


def check(facts: Facts, where: str) -> None:
    """Raise if a value depends on some shards of a parameter, but not on all.

    Raises:
        Error: it does.
    """
    for sharded, number in facts.depends:
        raise Error(
            f"the gradient of {sharded.name!r} was changed shard by shard",
            where=where,
            expected="changes of each element alone, or by all shards of a parameter",
            got=f"a value computed of shard {number} of {sharded.count} alone (a norm, a mean)",
            remedy="pm.clip_grad_norm_(max_norm) or torch.nn.utils.clip_grad_norm_(pm.parameters(), max_norm) for the "
            "norm of all; Hints(optimizer=...) or torchrun, where gradients are DTensors, for what looks at global "
            "tensors; or leave these parameters unsharded",
        )


def check_all_shards(gradients: Iterable[Facts], where: str) -> None:
    """Raise if only some shards of a parameter have a gradient; numbers that were read so far are forgotten.

    Raises:
        Error: a shard has none.
    """
    found = {sharded for facts in gradients for sharded, _ in facts.own}
    for sharded in found:
        sharded.read.clear()
        for number, shard in enumerate(each() for each in sharded.shards):
            if shard is not None and shard.numel() and shard.grad is None:
                raise Error(
                    f"only some shards of {sharded.name!r} have a gradient",
                    where=where,
                    expected="a gradient of each shard of a parameter, or of none",
                    got=f"none of shard {number} of {sharded.count}",
                    remedy="drop the gradients of all shards of a parameter together; or run under torchrun, where "
                    "gradients are DTensors",
                )


def plain(tensor: Tensor) -> Tensor:
    """A tensor without facts, in the same memory."""
    if not isinstance(tensor, ShardGradient):
        return tensor
    with no_dispatch():
        return tensor.as_subclass(Tensor)
