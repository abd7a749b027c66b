"""Pools over tiles of a sharded image: a rank's windows, on the rows that they reach.

    y[n c p q]          = shardfx.avg_pool_tile(x[n c h w], windows.., places, counted, divisor)
    gx[n c h w]         = shardfx.avg_pool_tile_backward(gy[n c p q], x, windows.., counted, divisor)
    y[n c p q], indices = shardfx.max_pool_tile(x[n c h w], kernel, stride, dilation, at, size, first, places)
    y[n.. p q], indices = shardfx.adaptive_max_tile(x[n.. h w], at, size, begin, places, lengths)
    gx[n c h w]         = shardfx.max_pool_tile_backward(gy[n c p q], x, indices, at, size, inside)

``at`` says where in the image, of ``size``, the rows begin that a rank has (or makes), in every dim; ``first`` where
its first window begins, ``begin`` which of all windows that is, and ``places`` how many windows it has. What a window
reaches beyond these rows is padding: of an image they are there, as far as it has them. Indices count through the
global image and name the first of equal elements; ``inside`` says that all lie in the rows that are made. Adaptive
window o of ``places`` reaches over rows ``o * size // places`` to the end of that of the next one, rounded up;
``lengths`` of them are the rank's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .library import Ints, define

aten = torch.ops.aten
AVG_POOL = {2: aten.avg_pool2d.default, 3: aten.avg_pool3d.default}
AVG_POOL_BACKWARD = {2: aten.avg_pool2d_backward.default, 3: aten.avg_pool3d_backward.default}
MAX_POOL = {2: aten.max_pool2d_with_indices.default, 3: aten.max_pool3d_with_indices.default}
WINDOWS = "int[] kernel, int[] stride, int[] padding, int[] at, int[] size, int[] begin"


def in_rows(x: Tensor, at: Ints, first: Ints, lengths: Ints, value: float) -> Tensor:
    """``x``, whose rows begin ``at``, in rows that begin at ``first``: cropped, and padded with a value."""
    pads: list[int] = []
    for dim, (a, f, n) in enumerate(zip(at, first, lengths, strict=True), -len(at)):
        size = x.shape[dim]
        begin, end = min(max(f - a, 0), size), max(min(f + n - a, size), 0)
        kept = max(end - begin, 0)
        x = x.narrow(dim, begin, kept) if kept != size else x
        before = max(a - f, 0) if kept else n
        pads = [before, n - before - kept, *pads]
    return F.pad(x, pads, value=value) if any(pads) else x


def spans(kernel: Ints, stride: Ints, dilation: Ints, places: Ints) -> list[int]:
    """How many rows some windows reach over."""
    return [(n - 1) * s + d * (k - 1) + 1 for k, s, d, n in zip(kernel, stride, dilation, places, strict=True)]


def by_dim(indices: Tensor, size: Ints) -> list[Tensor]:
    """The place in each dim of an element that is numbered through all of them."""
    found = []
    for n in reversed(size[1:]):
        above = torch.div(indices, n, rounding_mode="floor")
        found.append(indices - above * n)
        indices = above
    return [indices, *found[::-1]]


def number(places: Sequence[Tensor], size: Ints) -> Tensor:
    """The inverse of :func:`by_dim`."""
    found = places[0]
    for place, n in zip(places[1:], size[1:], strict=True):
        found = found * n + place
    return found


def renumbered(indices: Tensor, size: Ints, other: Ints, further: Ints) -> Tensor:
    """Elements of a box of a ``size`` as they are numbered in one of an ``other``, where they lie ``further`` on."""
    start, rows = 0, [indices]
    for n, more in zip(other, further, strict=True):
        start = start * n + more
    if list(size[1:]) == list(other[1:]):
        return indices + start
    for n in reversed(size[1:]):
        rows.append(torch.div(rows[-1], n, rounding_mode="floor"))
    found = above = rows.pop()
    for n, m in zip(size[1:], other[1:], strict=True):  # each number is that of its row, times n, and its place there
        row = rows.pop()
        found = row.add(above, alpha=m - n) if found is above else row.add(found, alpha=m).sub_(above, alpha=n)
        above = row
    return found.add_(start)


def lowest(dtype: torch.dtype) -> float:
    """What a maximum does not see."""
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _like_maxima(x: Tensor, places: Ints) -> tuple[Tensor, Tensor]:
    """Empty maxima and indices, of so many windows."""
    shape = (*x.shape[: -len(places)], *places)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


@define(
    "max_pool_tile(Tensor x, int[] kernel, int[] stride, int[] dilation, int[] at, int[] size, int[] first,"
    " int[] places) -> (Tensor, Tensor)",
    shapes=lambda x, *options: _like_maxima(x, options[-1]),
)
def max_pool_tile(
    x: Tensor, kernel: Ints, stride: Ints, dilation: Ints, at: Ints, size: Ints, first: Ints, places: Ints
) -> tuple[Tensor, Tensor]:
    """The largest element of each window, and where it is."""
    lengths = spans(kernel, stride, dilation, places)
    x = in_rows(x, at, first, lengths, lowest(x.dtype))
    y, indices = MAX_POOL[len(size)](x, kernel, stride, [0] * len(size), dilation, False)
    if all(f >= 0 and f + length <= n for f, length, n in zip(first, lengths, size, strict=True)):
        return y, renumbered(indices, lengths, size, first)
    pairs = zip(by_dim(indices, lengths), first, size, strict=True)  # of what is lowest, padding may be the first
    return y, number([(place + f).clamp(0, n - 1) for place, f, n in pairs], size)


@define(
    "max_pool_tile_backward(Tensor grad, Tensor x, Tensor indices, int[] at, int[] size, bool inside) -> Tensor",
    shapes=lambda grad, x, *_: grad.new_empty(x.shape),
)
def max_pool_tile_backward(grad: Tensor, x: Tensor, indices: Tensor, at: Ints, size: Ints, inside: bool) -> Tensor:
    """Each gradient added where its maximum is."""
    shape = x.shape[-len(size) :]
    batch, rest = math.prod(x.shape[: -len(size)]), math.prod(shape)
    if inside:
        flat = renumbered(indices, size, shape, [-a for a in at])
    else:
        places = [place - a for place, a in zip(by_dim(indices, size), at, strict=True)]
        beside = torch.zeros_like(indices, dtype=torch.bool)
        for place, n in zip(places, shape, strict=True):
            beside |= (place < 0) | (place >= n)
        flat = number(places, shape).masked_fill(beside, rest)  # what other ranks have goes into one element more
    made = grad.new_zeros((batch, rest + (not inside)))
    made.scatter_add_(1, flat.reshape(batch, -1), grad.reshape(batch, -1))
    return made[:, :rest].reshape(x.shape).contiguous()


def adaptive_windows(size: int, places: int, window: Tensor) -> tuple[Tensor, Tensor]:
    """Where some adaptive windows begin and end, by their numbers."""
    start = torch.div(window * size, places, rounding_mode="floor")
    return start, torch.div((window + 1) * size + places - 1, places, rounding_mode="floor")


@define(
    "adaptive_max_tile(Tensor x, int[] at, int[] size, int[] begin, int[] places, int[] lengths) -> (Tensor, Tensor)",
    shapes=lambda x, *options: _like_maxima(x, options[-1]),
)
def adaptive_max_tile(
    x: Tensor, at: Ints, size: Ints, begin: Ints, places: Ints, lengths: Ints
) -> tuple[Tensor, Tensor]:
    """The largest element of each adaptive window, and where it is."""
    found, numbers = x.unsqueeze(-1), torch.zeros(1, dtype=torch.int64, device=x.device)
    pairs = zip(at, size, begin, places, lengths, strict=True)
    for dim, (a, n, first, of, count) in enumerate(pairs, x.dim() - len(size)):
        start, end = adaptive_windows(n, of, torch.arange(first, first + count, device=x.device))
        reach = torch.arange(-(-n // of) + (n % of != 0), device=x.device)  # of smaller windows the last row again
        rows = torch.minimum(start.unsqueeze(1) + reach, end.unsqueeze(1) - 1)
        found = found.index_select(dim, (rows - a).reshape(-1)).unflatten(dim, rows.shape)
        found = found.movedim(dim + 1, -1).flatten(-2)  # the elements of a window stand in the last dim
        numbers = (numbers.unsqueeze(-2).unsqueeze(-1) * n + rows.unsqueeze(1)).flatten(-2)
    y = found.amax(-1)
    indices = torch.where(found == y.unsqueeze(-1), numbers, torch.iinfo(torch.int64).max).amin(-1)
    if x.dtype.is_floating_point:  # of NaN the last, as kernels do
        last = torch.where(found.isnan(), numbers, -1).amax(-1)
        indices = torch.where(y.isnan(), last, indices)
    return y, indices


def divisors(
    like: Tensor, kernel: Ints, stride: Ints, padding: Ints, size: Ints, begin: Ints, places: Ints, counted: bool
) -> Tensor:
    """By how much the sum over each window is divided: how many rows it has, padding among them if that is counted."""
    found = like.new_ones(())
    for k, s, p, n, first, count in zip(kernel, stride, padding, size, begin, places, strict=True):
        start = torch.arange(first, first + count, device=like.device) * s - p
        end = (start + k).clamp(max=n + p)
        rows = end - start if counted else end.clamp(max=n) - start.clamp(min=0)
        found = found.unsqueeze(-1) * rows.to(like.dtype)
    return found


@define(
    f"avg_pool_tile(Tensor x, {WINDOWS}, int[] places, bool counted, int? divisor) -> Tensor",
    shapes=lambda x, *options: x.new_empty((*x.shape[: -len(options[6])], *options[6])),
)
def avg_pool_tile(
    x: Tensor, kernel: Ints, stride: Ints, padding: Ints, at: Ints, size: Ints, begin: Ints, places: Ints, *how: Any
) -> Tensor:
    """The mean of each window."""
    counted, divisor = how
    first = [b * s - p for b, s, p in zip(begin, stride, padding, strict=True)]
    x = in_rows(x, at, first, spans(kernel, stride, [1] * len(size), places), 0.0)
    total: Tensor = AVG_POOL[len(size)](x, kernel, stride, [0] * len(size), False, True, divisor or 1)
    if divisor is not None:
        return total
    return total / divisors(x, kernel, stride, padding, size, begin, places, counted)


@define(
    f"avg_pool_tile_backward(Tensor grad, Tensor x, {WINDOWS}, bool counted, int? divisor) -> Tensor",
    shapes=lambda grad, x, *_: grad.new_empty(x.shape),
)
def avg_pool_tile_backward(
    grad: Tensor, x: Tensor, kernel: Ints, stride: Ints, padding: Ints, at: Ints, size: Ints, begin: Ints, *how: Any
) -> Tensor:
    """Its gradient."""
    (counted, divisor), space = how, len(size)
    places = grad.shape[-space:]
    if divisor is None:
        grad = grad / divisors(grad, kernel, stride, padding, size, begin, places, counted)
    like = grad.new_empty((*x.shape[:-space], *spans(kernel, stride, [1] * space, places)))
    none = [0] * space
    made = AVG_POOL_BACKWARD[space](grad.contiguous(), like, kernel, stride, none, False, True, divisor or 1)
    first = [b * s - p for b, s, p in zip(begin, stride, padding, strict=True)]
    return in_rows(made, first, at, x.shape[-space:], 0.0).contiguous()
