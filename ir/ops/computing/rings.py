"""Images whose edges meet: rows before the first are the last ones, and rows behind the last are the first ones.

    y[.. o ..]  = shardfx.ring(x[.. h ..], x, x, dim, front, back)             y[o] = x[(o - front) mod h]
    gx[.. h ..] = shardfx.ring_sum(gy[.. o ..], gy, gy, dim, front, back)      what each row of x became, added up

    y = shardfx.ring_tile(x, before, behind, dim, starts, lengths, at, size)   a rank's rows of either

So many rows are put in ``front`` and behind (``back``); fewer than none are cropped, by ``ring`` alone. The image is
given once for the rows that stay, once for those in front and once for those behind (None where there are none), for of
an image that is sharded over ranks these are three exchanges: the last rows go to the first rank. Of each of the three
a tile takes so many rows (``lengths``), from ``starts`` on, which are rows ``at`` of its own ``size``. Needs torch
alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .library import Ints, define

Given = Tensor | None


def _grown(x: Tensor, dim: int, more: int) -> Tensor:
    """An empty tensor of more rows."""
    return x.new_empty([n + more * (d == dim % x.dim()) for d, n in enumerate(x.shape)])


@define(
    "ring(Tensor x, Tensor? before, Tensor? behind, int dim, int front, int back) -> Tensor",
    shapes=lambda x, before, behind, dim, front, back: _grown(x, dim, front + back),
)
def ring(x: Tensor, before: Given, behind: Given, dim: int, front: int, back: int) -> Tensor:
    """``x`` with rows of its other end around it."""
    size = x.shape[dim]
    rows = [x.narrow(dim, max(-front, 0), size + min(front, 0) + min(back, 0))]
    if before is not None:
        rows.insert(0, before.narrow(dim, size - front, front))
    if behind is not None:
        rows.append(behind.narrow(dim, 0, back))
    return torch.cat(rows, dim)


@define(
    "ring_sum(Tensor x, Tensor? before, Tensor? behind, int dim, int front, int back) -> Tensor",
    shapes=lambda x, before, behind, dim, front, back: _grown(x, dim, -front - back),
)
def ring_sum(x: Tensor, before: Given, behind: Given, dim: int, front: int, back: int) -> Tensor:
    """The gradient of :func:`ring`."""
    size = x.shape[dim] - front - back
    made = x.narrow(dim, front, size).clone(memory_format=torch.contiguous_format)
    if before is not None:
        made.narrow(dim, size - front, front).add_(before.narrow(dim, 0, front))
    if behind is not None:
        made.narrow(dim, 0, back).add_(behind.narrow(dim, front + size, back))
    return made


@define(
    "ring_tile(Tensor x, Tensor? before, Tensor? behind, int dim, int[] starts, int[] lengths, int[] at, int size)"
    " -> Tensor",
    shapes=lambda x, before, behind, dim, starts, lengths, at, size: _grown(x, dim, size - x.shape[dim]),
)
def ring_tile(
    x: Tensor, before: Given, behind: Given, dim: int, starts: Ints, lengths: Ints, at: Ints, size: int
) -> Tensor:
    """A rank's rows of either."""
    made = _grown(x, dim, size - x.shape[dim]).zero_()
    for each, start, length, first in zip((x, before, behind), starts, lengths, at, strict=True):
        if each is not None and length:
            made.narrow(dim, first, length).add_(each.narrow(dim, start, length))
    return made


class Ring(torch.autograd.Function):
    """A dim padded by the rows of its other end, and its gradient, each as one op."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, front: int, back: int) -> Tensor:
        """The padded image."""
        ctx.of = dim, front, back
        with torch._C._AutoDispatchBelowAutograd():
            made: Tensor = ring(x, x if front > 0 else None, x if back > 0 else None, dim, front, back)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """The gradient of the image."""
        dim, front, back = ctx.of
        with torch._C._AutoDispatchBelowAutograd():
            made = ring_sum(grad, grad if front > 0 else None, grad if back > 0 else None, dim, front, back)
        return made, None, None, None
