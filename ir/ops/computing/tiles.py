"""Tiles of images: ops on the rows of an image that a rank stores.

    y[n c p q], indices = shardfx.max_pool_tile(x[n c h w], kernel, stride, dilation, first, size)
    gx[n c h w]         = shardfx.max_pool_tile_backward(gy[n c p q], x, indices, at, size)

The rows of ``x`` begin at ``first`` of an image of ``size``, in every dim; what is not of the image is padding. ``at``
says where the rows begin that are made of a gradient. Indices count through the global image and name the first of
equal elements.

    y[n c p q]  = shardfx.resize_tile(x[n c h w], at, size, first, places, steps, kind)
    gx[n c h w] = shardfx.resize_tile_backward(gy[n c p q], at, size, shape, first, steps, kind, x)

Each row of the tile is a sum of a few rows of the image. ``at`` says where in it the rows begin that a rank has (or
makes), ``first`` where those of the result do, and ``places`` how many these are. Of kind ``linear`` and ``cubic`` row
o lies at ``(o + 0.5) * step - 0.5`` of the image; of ``aligned linear`` and ``aligned cubic`` (``align_corners=True``)
at ``o * step``. Of kinds ``mirrored`` and ``repeated`` the image is padded, by so many rows in front as ``step`` says:
by its own rows, backwards, or by the one at the border. Of the image itself, which torch's ops may be given beside a
gradient, nothing is read. Needs torch alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .library import Ints, define

aten = torch.ops.aten
Given = Tensor | None
MAX_POOL = {2: aten.max_pool2d_with_indices.default, 3: aten.max_pool3d_with_indices.default}


def by_dim(indices: Tensor, size: Ints) -> list[Tensor]:
    """The index in each dim of a flat index."""
    found = []
    for n in reversed(size[1:]):
        above = torch.div(indices, n, rounding_mode="floor")
        found.append(indices - above * n)
        indices = above
    return [indices, *found[::-1]]


def number(places: Sequence[Tensor], size: Ints) -> Tensor:
    """The flat index, inverse of :func:`by_dim`."""
    found = places[0]
    for place, n in zip(places[1:], size[1:], strict=True):
        found = found * n + place
    return found


def _like_maxima(x: Tensor, kernel: Ints, stride: Ints, dilation: Ints, *_: Ints) -> tuple[Tensor, Tensor]:
    options = zip(x.shape[-len(kernel) :], kernel, stride, dilation, strict=True)
    shape = (*x.shape[: -len(kernel)], *((n - d * (k - 1) - 1) // s + 1 for n, k, s, d in options))
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


@define(
    "max_pool_tile(Tensor x, int[] kernel, int[] stride, int[] dilation, int[] first, int[] size) -> (Tensor, Tensor)",
    shapes=_like_maxima,
)
def max_pool_tile(
    x: Tensor, kernel: Ints, stride: Ints, dilation: Ints, first: Ints, size: Ints
) -> tuple[Tensor, Tensor]:
    """The maximum of each window, and its flat index in the global image."""
    y, indices = MAX_POOL[len(size)](x, kernel, stride, [0] * len(size), dilation, False)
    places = zip(by_dim(indices, x.shape[-len(size) :]), first, size, strict=True)
    inside = [(place + f).clamp(0, n - 1) for place, f, n in places]  # of what is lowest, padding may be the first
    return y, number(inside, size)


@define(
    "max_pool_tile_backward(Tensor grad, Tensor x, Tensor indices, int[] at, int[] size) -> Tensor",
    shapes=lambda grad, x, *_: grad.new_empty(x.shape),
)
def max_pool_tile_backward(grad: Tensor, x: Tensor, indices: Tensor, at: Ints, size: Ints) -> Tensor:
    """The gradients, each added at the index of its maximum."""
    shape = x.shape[-len(size) :]
    batch, rest = math.prod(x.shape[: -len(size)]), math.prod(shape)
    places = [place - a for place, a in zip(by_dim(indices, size), at, strict=True)]
    beside = torch.zeros_like(indices, dtype=torch.bool)
    for place, n in zip(places, shape, strict=True):
        beside |= (place < 0) | (place >= n)
    flat = number(places, shape).masked_fill(beside, rest)  # what other ranks have goes into one element more
    made = grad.new_zeros((batch, rest + 1))
    made.scatter_add_(1, flat.reshape(batch, -1), grad.reshape(batch, -1))
    return made[:, :rest].reshape(x.shape).contiguous()


# ---- in other sizes --------------------------------------------------------------------------------------------------


SHARP = -0.75
"""The coefficient of torch's cubic interpolation."""


def taps(
    first: int, count: int, size: int, step: float, kind: str, like: Tensor
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The rows of an image of ``size`` that ``count`` rows of the result depend on, with their weights (None for a
    weight of one)."""
    if kind in PADDED:
        yield PADDED[kind](torch.arange(first, first + count, device=like.device) - round(step), size), None
        return
    rows = torch.arange(first, first + count, dtype=torch.float64, device=like.device)
    place = rows * step if kind.startswith("aligned") else (rows + 0.5) * step - 0.5
    cubic = kind.endswith("cubic")
    if not cubic:
        place = place.clamp(min=0)
    before = place.floor().clamp(max=size - 1)
    part, row = (place - before).to(like.dtype), before.to(torch.int64)
    weights = cubic_weights(part) if cubic else [1 - part, part]
    apart = int(cubic or step != 1)  # of the next row nothing is read where all stay as they are, were it inf
    for offset, weight in enumerate(weights, -1 if cubic else 0):
        yield (row + apart * offset).clamp(0, size - 1), weight


def mirrored(row: Tensor, size: int) -> Tensor:
    """Row indices beyond the ends, reflected at the first or last row."""
    return (size - 1 - (size - 1 - row.abs()).abs()).clamp(0, size - 1)


def repeated(row: Tensor, size: int) -> Tensor:
    """Row indices clamped to the first and last row."""
    return row.clamp(0, size - 1)


PADDED = {"mirrored": mirrored, "repeated": repeated}


def cubic_weights(part: Tensor) -> list[Tensor]:
    """The weights of the four rows around a position, ``part`` behind the second."""

    def near(x: Tensor) -> Tensor:
        return ((SHARP + 2) * x - (SHARP + 3)) * x * x + 1

    def far(x: Tensor) -> Tensor:
        return ((SHARP * x - 5 * SHARP) * x + 8 * SHARP) * x - 4 * SHARP

    return [far(part + 1), near(part), near(1 - part), far(2 - part)]


@define(
    "resize_tile(Tensor x, int[] at, int[] size, int[] first, int[] places, float[] steps, str kind) -> Tensor",
    shapes=lambda x, at, size, first, places, steps, kind: x.new_empty((*x.shape[: -len(at)], *places)),
)
def resize_tile(
    x: Tensor, at: Ints, size: Ints, first: Ints, places: Ints, steps: Sequence[float], kind: str
) -> Tensor:
    """A rank's rows of a resized image."""
    for dim, (start, n, begin, count, step) in enumerate(zip(at, size, first, places, steps, strict=True), -len(at)):
        parts = [
            weighted(x.index_select(dim, (rows - start).clamp(0, x.shape[dim] - 1)), weight, dim)
            for rows, weight in taps(begin, count, n, step, kind, x)
        ]
        x = sum(parts[1:], parts[0])
    return x


def weighted(x: Tensor, weight: Tensor | None, dim: int) -> Tensor:
    """``x`` with each row of a dim scaled by its weight."""
    return x if weight is None else x * weight.reshape([-1, *[1] * (-dim - 1)])


@define(
    "resize_tile_backward(Tensor grad, int[] at, int[] size, int[] shape, int[] first, float[] steps, str kind,"
    " Tensor? like=None) -> Tensor",
    shapes=lambda grad, at, size, shape, *_: grad.new_empty((*grad.shape[: -len(at)], *shape)),
)
def resize_tile_backward(
    grad: Tensor, at: Ints, size: Ints, shape: Ints, first: Ints, steps: Sequence[float], kind: str, *like: Tensor
) -> Tensor:
    """A rank's rows of the gradient of a resized image."""
    for dim, (start, n, length, begin, step) in enumerate(zip(at, size, shape, first, steps, strict=True), -len(at)):
        made = grad.new_zeros([*grad.shape[:dim], length + 1, *grad.shape[grad.dim() + dim + 1 :]])
        for rows, weight in taps(begin, grad.shape[dim], n, step, kind, grad):
            beside = (rows < start) | (rows >= start + length)  # what other ranks have goes into one row more
            made.index_add_(dim, (rows - start).masked_fill(beside, length), weighted(grad, weight, dim))
        grad = made.narrow(dim, 0, length)
    return grad.contiguous()


# ---- whose edges meet ------------------------------------------------------------------------------------------------


def circular(x: Tensor, dim: int, front: int, back: int) -> Tensor:
    """``x`` with rows of its opposite end in ``front`` and behind (``back``); negative numbers crop.

    It is a sum of copies of ``x`` side by side, each cropped and padded with zeros: for an image sharded over ranks,
    each copy is a halo exchange.
    """
    size = x.shape[dim]
    pads = [0, 0] * (x.dim() - 1 - dim % x.dim())
    copies = [[at, front + back - at] for at in (front, front - size, front + size) if -size < at < size + front + back]
    parts: list[Tensor] = [aten.constant_pad_nd.default(x, pads + each) for each in copies]
    return sum(parts[1:], parts[0])
