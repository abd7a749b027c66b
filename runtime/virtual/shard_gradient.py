"""A tensor subclass for gradients of shards, which refuses what is not elementwise.

On virtual ranks ``p.grad`` is a shard's gradient. Its norm is the shard's: a script that divides each gradient by its
norm would compute something else than on one device. So only elementwise ops take these gradients (torch's own tag says
which are), views, and the norm of all gradients:

    p.grad.mul_(2.0)                                    an element goes by itself
    torch.nn.utils.clip_grad_norm_(pm.parameters(), 1)  by the norm on one device (see :mod:`shardfx.module`)
    p.grad.norm(), p.grad.numpy()                       an Error
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map_only

from shardfx.ir.errors import Error

Tensor = torch.Tensor
aten = torch.ops.aten
MOVES = frozenset("copy_ zero_ fill_ _to_copy detach_ set_ lift_fresh _unsafe_view".split())
"""Ops that are not tagged as pointwise, yet combine no elements."""
UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"


@dataclass(eq=False)
class Sharded:
    """A parameter in several shards."""

    name: str
    shards: Sequence[weakref.ref[Tensor]]

    def refuse(self, where: str, got: str = "a norm, a mean or a number of one shard") -> NoReturn:
        """Refuse a computation of a shard's gradient.

        Raises:
            Error: always.
        """
        raise Error(
            f"the gradient of {self.name!r} is used shard by shard",
            where=where,
            expected="elementwise changes, or changes by all shards of a parameter",
            got=f"{got}, of {len(self.shards)}",
            remedy="pm.clip_grad_norm_(max_norm) or torch.nn.utils.clip_grad_norm_(pm.parameters(), max_norm) for the "
            "norm of all; pm.full_grads() to look at gradients; Hints(optimizer=...) or torchrun, where gradients are "
            "DTensors, for what needs global tensors; or leave these parameters unsharded",
        )


class ShardGradient(Tensor):
    """A gradient of a shard, or a tensor computed from one."""

    sharded: Sharded

    @staticmethod
    def of(tensor: Tensor, sharded: Sharded) -> ShardGradient:
        """A gradient of a shard, in the same memory."""
        made = tensor.as_subclass(ShardGradient)
        made.sharded = sharded
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(plain(self))

    def numpy(self, *, force: bool = False) -> Any:
        """Refused, as scripts compute with arrays."""
        self.sharded.refuse("p.grad.numpy()")

    def tolist(self) -> Any:
        """Refused, as scripts compute with numbers."""
        self.sharded.refuse("p.grad.tolist()")

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
        sharded = next(each.sharded for each in tree_leaves((args, kwargs)) if isinstance(each, ShardGradient))
        single = name.removeprefix("_foreach_")
        ops = getattr(aten, single, None) if single != name else None
        tags = func.tags if ops is None else getattr(ops, ops.overloads()[0]).tags
        makes = name.endswith("_like") or name.startswith("new_")
        if not (torch.Tag.pointwise in tags or func.is_view or makes or single in MOVES or name == UNSCALE):
            sharded.refuse(str(func))
        with no_dispatch():
            made = func(*args, **kwargs)
        if makes or func._schema.is_mutable:
            return made
        return tree_map_only(Tensor, lambda each: ShardGradient.of(each, sharded), made)


def check_all_shards(gradients: Iterable[ShardGradient], where: str) -> None:
    """Raise if only some shards of a parameter have a gradient.

    Raises:
        Error: a shard has none.
    """
    for sharded in {gradient.sharded for gradient in gradients}:
        for shard in (each() for each in sharded.shards):
            if shard is not None and shard.numel() and shard.grad is None:
                sharded.refuse(where, "a gradient of some of its shards alone")


def plain(tensor: Tensor) -> Tensor:
    """The tensor itself, in the same memory."""
    if not isinstance(tensor, ShardGradient):
        return tensor
    with no_dispatch():
        return tensor.as_subclass(Tensor)
