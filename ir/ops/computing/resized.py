"""Images in other sizes, tile by tile: each row of a rank's tile is a sum of a few rows of the image.

    y[n c p q]  = shardfx.resize_tile(x[n c h w], at, size, first, places, steps, kind)
    gx[n c h w] = shardfx.resize_tile_backward(gy[n c p q], at, size, shape, first, steps, kind, x)

``at`` says where in the image, of ``size``, the rows begin that a rank has (or makes), in every dim, ``first`` where
those of the result do, and ``places`` how many these are. Of kind ``linear`` and ``cubic`` row o lies at
``(o + 0.5) * step - 0.5`` of the image; of ``aligned linear`` and ``aligned cubic`` (``align_corners=True``) at
``o * step``. Of kinds ``mirrored`` and ``repeated`` the image is padded, by so many rows in front as ``step`` says: by
its own rows, backwards, or by the one at the border. Of the image itself, which torch's ops may be given beside a
gradient, nothing is read. Needs torch alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .library import Ints, define

SHARP = -0.75
"""The one number of torch's cubic interpolation."""


def taps(
    first: int, count: int, size: int, step: float, kind: str, like: Tensor
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The rows of an image of ``size`` of which ``count`` rows of the result are made, and the weight of each; none
    where it is one."""
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
    """Rows before the first, and behind the last, seen in a mirror that stands on it."""
    return (size - 1 - (size - 1 - row.abs()).abs()).clamp(0, size - 1)


def repeated(row: Tensor, size: int) -> Tensor:
    """The first row for all before it, the last for all behind."""
    return row.clamp(0, size - 1)


PADDED = {"mirrored": mirrored, "repeated": repeated}


def cubic_weights(part: Tensor) -> list[Tensor]:
    """The weights of the four rows around a place that lies ``part`` behind the second of them."""

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
    """A rank's rows of an image in another size."""
    for dim, (start, n, begin, count, step) in enumerate(zip(at, size, first, places, steps, strict=True), -len(at)):
        parts = [
            weighted(x.index_select(dim, (rows - start).clamp(0, x.shape[dim] - 1)), weight, dim)
            for rows, weight in taps(begin, count, n, step, kind, x)
        ]
        x = sum(parts[1:], parts[0])
    return x


def weighted(x: Tensor, weight: Tensor | None, dim: int) -> Tensor:
    """``x``, each row of a dim times its weight."""
    return x if weight is None else x * weight.reshape([-1, *[1] * (-dim - 1)])


@define(
    "resize_tile_backward(Tensor grad, int[] at, int[] size, int[] shape, int[] first, float[] steps, str kind,"
    " Tensor? like=None) -> Tensor",
    shapes=lambda grad, at, size, shape, *_: grad.new_empty((*grad.shape[: -len(at)], *shape)),
)
def resize_tile_backward(
    grad: Tensor, at: Ints, size: Ints, shape: Ints, first: Ints, steps: Sequence[float], kind: str, *like: Tensor
) -> Tensor:
    """A rank's rows of the gradient of an image."""
    for dim, (start, n, length, begin, step) in enumerate(zip(at, size, shape, first, steps, strict=True), -len(at)):
        made = grad.new_zeros([*grad.shape[:dim], length + 1, *grad.shape[grad.dim() + dim + 1 :]])
        for rows, weight in taps(begin, grad.shape[dim], n, step, kind, grad):
            beside = (rows < start) | (rows >= start + length)  # what other ranks have goes into one row more
            made.index_add_(dim, (rows - start).masked_fill(beside, length), weighted(grad, weight, dim))
        grad = made.narrow(dim, 0, length)
    return grad.contiguous()
