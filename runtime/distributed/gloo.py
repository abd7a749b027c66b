"""How CPU ranks do collectives: on gloo, or through shared memory where a group's ranks are all on one machine.

Gloo's own reduce-scatter takes two to three times as long as an exchange and a sum (``python -m
benchmarks.collectives``). Counted at run time, a large reduce-scatter on gloo is therefore an all-to-all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardfx.ir.ops import memory_ops
from shardfx.runtime.same_host.neighbourhood import Neighbours, apart, heard, met

c10d = torch.ops._c10d_functional
Tensor = torch.Tensor
LARGE = 1 << 20
"""A reduce-scatter of at least so many bytes is done as an exchange and a sum."""


class Exchange:
    """A reduce-scatter under way as an exchange."""

    def __init__(self, sent: Tensor, op: str, ranks: int) -> None:
        self.sent, self.op, self.ranks = sent, op, ranks

    def wait(self) -> Tensor:
        """This rank's piece of the sum."""
        received: Tensor = c10d.wait_tensor(self.sent)
        pieces = received.view(self.ranks, received.shape[0] // self.ranks, *received.shape[1:])
        return pieces.sum(0) if self.op == "sum" else pieces.mean(0)


def all_reduce_(x: Tensor, op: str, group: str) -> Any:
    """Start to reduce ``x`` where it lies; :func:`wait` ends it, and what is started below."""
    near = _near("all_reduce", x, group, op)
    return near.all_reduce_(x, op) if near is not None else c10d.all_reduce_(x, op, group)


def all_reduce(x: Tensor, op: str, group: str) -> Any:
    """Start to reduce ``x``, which stays as it is."""
    near = _near("all_reduce", x, group, op)
    if near is None:
        return c10d.all_reduce(x, op, group)
    return near.all_reduce_(x.clone(memory_format=torch.contiguous_format), op)


def all_gather(x: Tensor, ranks: int, group: str) -> Any:
    """Start to join all ranks' ``x``."""
    near = _near("all_gather_into_tensor", x, group)
    return near.all_gather(x) if near is not None else c10d.all_gather_into_tensor(x, ranks, group)


def all_gather_into(x: Tensor, ranks: int, group: str, *, out: Tensor) -> Any:
    """Start to join all ranks' ``x`` in ``out``."""
    near = _near("all_gather_into_tensor", x, group)
    return near.all_gather(x, out) if near is not None else memory_ops.all_gather_into(x, ranks, group, out=out)


def reduce_scatter(x: Tensor, op: str, ranks: int, group: str) -> Any:
    """Start a reduce-scatter."""
    near = _near("reduce_scatter_tensor", x, group, op)
    if near is not None:
        return near.reduce_scatter(x, op)
    if x.nbytes < LARGE or op not in ("sum", "avg"):
        return c10d.reduce_scatter_tensor(x, op, ranks, group)
    each = [x.shape[0] // ranks] * ranks
    return Exchange(c10d.all_to_all_single(x, each, each, group), op, ranks)


def all_to_all(x: Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> Any:
    """Start an exchange of rows."""
    near = _near("all_to_all_single", x, group, sent=sent)
    return near.all_to_all(x, sent, received) if near is not None else c10d.all_to_all_single(x, received, sent, group)


def is_used() -> bool:
    """Whether some groups of ranks have no memory in common, as far as that is known yet."""
    return not met or bool(apart)


def wait(started: Any) -> Tensor:
    """The result of what was started: a collective, an exchange in its place, a message to this rank."""
    done: Tensor = c10d.wait_tensor(started) if isinstance(started, Tensor) else started.wait()
    return done


FORMS: dict[Any, Callable[..., Any]] = {
    memory_ops.all_reduce_: all_reduce_,
    memory_ops.all_gather_into: all_gather_into,
    c10d.all_reduce.default: all_reduce,
    c10d.all_gather_into_tensor.default: all_gather,
    c10d.reduce_scatter_tensor.default: reduce_scatter,
    c10d.all_to_all_single.default: all_to_all,
    c10d.wait_tensor.default: wait,
}
"""What is called in the place of a program's collectives."""


def _near(
    kind: str, x: Tensor, group: str, op: str | None = None, sent: Sequence[int] | None = None
) -> Neighbours | None:
    """The neighbours who do a collective among them; None where it is done on gloo."""
    near = met.get(group)
    if near is None or (op is not None and not near.reduces(x, op)):
        return None
    for hears in heard:
        hears(kind, group, x, sent)
    return near
