"""Images whose edges meet: rows before the first are the last ones, and rows behind the last are the first ones.

    y[.. o ..]  = shardfx.ring(x[.. h ..], x, x, dim, starts, lengths, at, size)         y[o] = x[(o - front) mod h]
    gx[.. h ..] = shardfx.ring_sum(gy[.. o ..], gy, gy, dim, at, lengths, starts, h)     what rows of x became, added up

The image is given once for the rows that stay, once for those in front and once for those behind (None where there are
none), for of an image that is sharded over ranks these are three exchanges: the last rows go to the first rank. Of each
of the three so many rows are taken (``lengths``), from ``starts`` on, which are rows ``at`` of a result of ``size``.
Needs torch alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .library import Ints, define

Given = Tensor | None
PARTS = "Tensor x, Tensor? before, Tensor? behind, int dim, int[] starts, int[] lengths, int[] at, int size"


def _made(x: Tensor, before: Given, behind: Given, dim: int, *rows: Any) -> Tensor:
    return x.new_empty([rows[-1] if d == dim % x.dim() else n for d, n in enumerate(x.shape)])


def _put(put: Callable[..., Any], made: Tensor, parts: tuple[Given, ...], dim: int, *rows: Ints) -> Tensor:
    for each, start, length, first in zip(parts, *rows, strict=True):
        if each is not None and length:
            put(made.narrow(dim, first, length), each.narrow(dim, start, length))
    return made


@define(f"ring({PARTS}) -> Tensor", shapes=_made)
def ring(x: Tensor, before: Given, behind: Given, dim: int, starts: Ints, lengths: Ints, at: Ints, size: int) -> Tensor:
    """``x`` with rows of its other end around it."""
    made = _made(x, before, behind, dim, size)
    return _put(Tensor.copy_, made, (x, before, behind), dim, starts, lengths, at)


@define(f"ring_sum({PARTS}) -> Tensor", shapes=_made)
def ring_sum(
    x: Tensor, before: Given, behind: Given, dim: int, starts: Ints, lengths: Ints, at: Ints, size: int
) -> Tensor:
    """The gradient of :func:`ring`."""
    made = _made(x, before, behind, dim, size).zero_()
    return _put(Tensor.add_, made, (x, before, behind), dim, starts, lengths, at)


def around(x: Tensor, dim: int, front: int, back: int) -> tuple[Any, ...]:
    """The arguments of a ring with so many rows more in ``front`` and behind (``back``); negative ones are cropped."""
    size, first, begin = x.shape[dim], max(-front, 0), max(front, 0)
    stays = size + min(back, 0) - first
    rows = [first, size - begin, 0], [stays, begin, max(back, 0)], [begin, 0, begin + stays]
    return x, x if front > 0 else None, x if back > 0 else None, dim, *rows, size + front + back


class Ring(torch.autograd.Function):
    """A dim padded by the rows of its other end, and its gradient, each as one op."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, front: int, back: int) -> Tensor:
        """The padded image."""
        args = around(x, dim, front, back)
        ctx.of = [each is not None for each in args[:3]], *args[3:7], x.shape[dim]
        with torch._C._AutoDispatchBelowAutograd():
            made: Tensor = ring(*args)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """The gradient of the image."""
        there, dim, starts, lengths, at, size = ctx.of
        with torch._C._AutoDispatchBelowAutograd():
            made = ring_sum(*(grad if each else None for each in there), dim, at, lengths, starts, size)
        return made, None, None, None
