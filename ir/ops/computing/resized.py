"""Images in other sizes, tile by tile: each row of a rank's tile is a sum of a few rows of the image.

    y[n c p q]  = shardfx.resize_tile(x[n c h w], at, size, first, places, steps, kind)
    gx[n c h w] = shardfx.resize_tile_backward(gy[n c p q], at, size, shape, first, steps, kind, x)

``at`` says where in the image, of ``size``, the rows begin that a rank has (or makes), in every dim, ``first`` where
those of the result do, and ``places`` how many these are. Row o lies at ``o * step`` of the image, or, of kind
``linear`` and ``cubic``, at ``(o + 0.5) * step - 0.5``; kinds ``aligned linear`` and ``aligned cubic`` are those of
``align_corners=True``. Of kind ``nearest`` and ``exact nearest`` it is one row of the image, of kind ``mean`` the
mean of those from ``o * step`` to ``(o + 1) * step``. Of kinds ``mirrored`` and ``repeated`` the image is padded, by so
many rows in front as ``step`` says: by its own rows, backwards, or by the one at the border. Of the image itself, which
torch's ops may be given beside a gradient, nothing is read. Needs torch alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .library import Ints, define

aten = torch.ops.aten
NEAREST = {
    "nearest": [getattr(aten, f"upsample_nearest{n}d").default for n in (1, 2, 3)],
    "exact nearest": [getattr(aten, f"_upsample_nearest_exact{n}d").default for n in (1, 2, 3)],
}
SHARP = -0.75
"""The one number of torch's cubic interpolation."""


def taps(
    first: int, count: int, size: int, step: float, kind: str, dim: int, space: int, like: Tensor
) -> Iterator[tuple[Tensor, Tensor | None, Tensor | None]]:
    """The rows of an image of ``size`` of which ``count`` rows of the result are made, in one dim of several, the
    weight of each, none where it is one, and whether it is there: what is not is no zero, for a row may be inf."""
    if kind in NEAREST:
        yield nearest(size, step, kind, dim, space, like)[first : first + count], None, None
        return
    if kind in PADDED:
        yield PADDED[kind](torch.arange(first, first + count, device=like.device) - round(step), size), None, None
        return
    if kind == "mean":
        yield from averaged(first, count, size, step, like)
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
        yield (row + apart * offset).clamp(0, size - 1), weight, None


def nearest(size: int, step: float, kind: str, dim: int, space: int, like: Tensor) -> Tensor:
    """The one row of which each row of the whole result is made: asked of torch's own kernel, for kernels round where a
    place lies between two rows, each in its way."""
    rows = torch.arange(size, dtype=torch.float64 if like.dtype is torch.float64 else torch.float32, device=like.device)
    shape, sizes = [1] * (space + 2), [1] * space
    shape[dim], sizes[dim] = size, round(size / step)
    found: Tensor = NEAREST[kind][space - 1](rows.view(shape), sizes)
    return found.flatten().to(torch.int64)


def mirrored(row: Tensor, size: int) -> Tensor:
    """Rows before the first, and behind the last, seen in a mirror that stands on it."""
    return (size - 1 - (size - 1 - row.abs()).abs()).clamp(0, size - 1)


def repeated(row: Tensor, size: int) -> Tensor:
    """The first row for all before it, the last for all behind."""
    return row.clamp(0, size - 1)


PADDED = {"mirrored": mirrored, "repeated": repeated}


def adaptive_windows(size: int, places: int, window: Tensor) -> tuple[Tensor, Tensor]:
    """Where some adaptive windows begin and end, by their numbers."""
    start = torch.div(window * size, places, rounding_mode="floor")
    return start, torch.div((window + 1) * size + places - 1, places, rounding_mode="floor")


def averaged(first: int, count: int, size: int, step: float, like: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The rows of adaptive windows, the first of each, the second, ..., and one divided by how many there are."""
    places = round(size / step)
    start, end = adaptive_windows(size, places, torch.arange(first, first + count, device=like.device))
    length = end - start
    for offset in range((size + places - 1) // places + 1):
        yield (start + offset).clamp(max=size - 1), length.to(like.dtype).reciprocal(), offset < length


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
        found: Tensor | None = None
        for rows, weight, there in taps(begin, count, n, step, kind, dim, len(at), x):
            held = (rows - start).clamp(0, x.shape[dim] - 1)
            part = weighted(x.index_select(dim, held), weight, there, dim)
            found = part if found is None else found + part
        assert found is not None
        x = found
    return x


def weighted(x: Tensor, weight: Tensor | None, there: Tensor | None, dim: int) -> Tensor:
    """``x``, each row of a dim times its weight, and zero where it is not there."""
    wide = [-1, *[1] * (-dim - 1)]
    made = x if weight is None else x * weight.reshape(wide)
    return made if there is None else made.where(there.reshape(wide), 0)


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
        for rows, weight, there in taps(begin, grad.shape[dim], n, step, kind, dim, len(at), grad):
            beside = (rows < start) | (rows >= start + length)  # what other ranks have goes into one row more
            made.index_add_(dim, (rows - start).masked_fill(beside, length), weighted(grad, weight, there, dim))
        grad = made.narrow(dim, 0, length)
    return grad.contiguous()
