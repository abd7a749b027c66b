"""Images in other sizes, tile by tile: each row of a rank's tile is a sum of a few rows of the image.

    y[n c p q]  = shardfx.resize_tile(x[n c h w], at, size, first, places, steps, kind)
    gx[n c h w] = shardfx.resize_tile_backward(gy[n c p q], at, size, shape, first, steps, kind)

``at`` says where in the image, of ``size``, the rows begin that a rank holds (or makes), in every dim, ``first`` where
those of the result do, and ``places`` how many these are. Row o lies at ``o * step`` of the image, or, of kind
``linear`` and ``cubic``, at ``(o + 0.5) * step - 0.5``; kinds ``aligned linear`` and ``aligned cubic`` are those of
``align_corners=True``. Needs torch alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_library = torch.library.Library("shardfx", "FRAGMENT")
_library.define(
    "resize_tile(Tensor x, int[] at, int[] size, int[] first, int[] places, float[] steps, str kind) -> Tensor"
)
_library.define(
    "resize_tile_backward(Tensor grad, int[] at, int[] size, int[] shape, int[] first, float[] steps, str kind)"
    " -> Tensor"
)
SHARP = -0.75
"""The one number of torch's cubic interpolation."""


def taps(first: int, count: int, size: int, step: float, kind: str, like: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows of an image of ``size`` of which ``count`` rows of the result are made, and the weight of each."""
    rows = torch.arange(first, first + count, dtype=torch.float64, device=like.device)
    place = rows * step if kind.startswith("aligned") else (rows + 0.5) * step - 0.5
    cubic = kind.endswith("cubic")
    if not cubic:
        place = place.clamp(min=0)
    before = place.floor().clamp(max=size - 1)
    part, row = (place - before).to(like.dtype), before.to(torch.int64)
    weights = cubic_weights(part) if cubic else [1 - part, part]
    for offset, weight in enumerate(weights, -1 if cubic else 0):
        yield (row + offset).clamp(0, size - 1), weight


def cubic_weights(part: Tensor) -> list[Tensor]:
    """The weights of the four rows around a place that lies ``part`` behind the second of them."""

    def near(x: Tensor) -> Tensor:
        return ((SHARP + 2) * x - (SHARP + 3)) * x * x + 1

    def far(x: Tensor) -> Tensor:
        return ((SHARP * x - 5 * SHARP) * x + 8 * SHARP) * x - 4 * SHARP

    return [far(part + 1), near(part), near(1 - part), far(2 - part)]


def _resize(
    x: Tensor,
    at: Sequence[int],
    size: Sequence[int],
    first: Sequence[int],
    places: Sequence[int],
    steps: Sequence[float],
    kind: str,
) -> Tensor:
    for dim, (start, n, begin, count, step) in enumerate(zip(at, size, first, places, steps, strict=True), -len(at)):
        column = [1] * (-dim - 1)
        found = x.new_zeros(())
        for rows, weight in taps(begin, count, n, step, kind, x):
            held = (rows - start).clamp(0, x.shape[dim] - 1)
            found = found + x.index_select(dim, held) * weight.reshape(-1, *column)
        x = found
    return x


def _resize_meta(
    x: Tensor,
    at: Sequence[int],
    size: Sequence[int],
    first: Sequence[int],
    places: Sequence[int],
    steps: Sequence[float],
    kind: str,
) -> Tensor:
    return x.new_empty((*x.shape[: -len(at)], *places))


def _backward(
    grad: Tensor,
    at: Sequence[int],
    size: Sequence[int],
    shape: Sequence[int],
    first: Sequence[int],
    steps: Sequence[float],
    kind: str,
) -> Tensor:
    for dim, (start, n, length, begin, step) in enumerate(zip(at, size, shape, first, steps, strict=True), -len(at)):
        column, wide = [1] * (-dim - 1), list(grad.shape)
        wide[dim] = length + 1  # what other ranks have goes into one row more
        made = grad.new_zeros(wide)
        for rows, weight in taps(begin, grad.shape[dim], n, step, kind, grad):
            beside = (rows < start) | (rows >= start + length)
            made.index_add_(dim, (rows - start).masked_fill(beside, length), grad * weight.reshape(-1, *column))
        grad = made.narrow(dim, 0, length)
    return grad.contiguous()


def _backward_meta(
    grad: Tensor,
    at: Sequence[int],
    size: Sequence[int],
    shape: Sequence[int],
    first: Sequence[int],
    steps: Sequence[float],
    kind: str,
) -> Tensor:
    return grad.new_empty((*grad.shape[: -len(at)], *shape))


for _key in ("CPU", "CUDA"):
    _library.impl("resize_tile", _resize, _key)
    _library.impl("resize_tile_backward", _backward, _key)
_library.impl("resize_tile", _resize_meta, "Meta")
_library.impl("resize_tile_backward", _backward_meta, "Meta")

resize_tile = torch.ops.shardfx.resize_tile.default
resize_tile_backward = torch.ops.shardfx.resize_tile_backward.default
