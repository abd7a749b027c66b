"""Pools over tiles of an image that is sharded over ranks: a rank's windows, on the rows that they reach.

    y[n c p q]          = shardfx.avg_pool_tile(x[n c h w], windows.., places, counted, divisor)
    gx[n c h w]         = shardfx.avg_pool_tile_backward(gy[n c p q], x, windows.., counted, divisor)
    y[n c p q], indices = shardfx.max_pool_tile(x[n c h w], kernel, stride, dilation, at, size, first, places)
    gx[n c h w]         = shardfx.max_pool_tile_backward(gy[n c p q], x, indices, at, size, inside)

``at`` says where in the image, of ``size``, the rows begin that a rank holds (or makes), in every dim; ``first`` where
its first window begins, ``begin`` which of all windows that is, and ``places`` how many windows it has. What a window
reaches beyond the held rows is padding: of an image these rows are there, as far as it has them. Indices count through
the whole image; ``inside`` says that all lie in the rows that are made. Needs torch alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_library = torch.library.Library("shardfx", "FRAGMENT")
_library.define(
    "max_pool_tile(Tensor x, int[] kernel, int[] stride, int[] dilation, int[] at, int[] size, int[] first,"
    " int[] places) -> (Tensor, Tensor)"
)
_library.define(
    "max_pool_tile_backward(Tensor grad, Tensor x, Tensor indices, int[] at, int[] size, bool inside) -> Tensor"
)
_WINDOWS = "int[] kernel, int[] stride, int[] padding, int[] at, int[] size, int[] begin"
_library.define(f"avg_pool_tile(Tensor x, {_WINDOWS}, int[] places, bool counted, int? divisor) -> Tensor")
_library.define(f"avg_pool_tile_backward(Tensor grad, Tensor x, {_WINDOWS}, bool counted, int? divisor) -> Tensor")

aten = torch.ops.aten
AVG_POOL = {2: aten.avg_pool2d.default, 3: aten.avg_pool3d.default}
AVG_POOL_BACKWARD = {2: aten.avg_pool2d_backward.default, 3: aten.avg_pool3d_backward.default}
MAX_POOL = {2: aten.max_pool2d_with_indices.default, 3: aten.max_pool3d_with_indices.default}


def in_rows(x: Tensor, at: Sequence[int], first: Sequence[int], lengths: Sequence[int], value: float) -> Tensor:
    """``x``, whose rows begin ``at``, in rows that begin at ``first``: cropped, and padded with a value."""
    held = x.shape[-len(at) :]
    pads = [n for a, f, n, h in zip(at, first, lengths, held, strict=True) for n in (a - f, f + n - a - h)]
    if not any(pads):
        return x
    for dim, (before, behind) in enumerate(zip(pads[::2], pads[1::2], strict=True), -len(at)):
        begin, end = min(max(-before, 0), x.shape[dim]), max(x.shape[dim] - max(-behind, 0), 0)
        x = x.narrow(dim, begin, max(end - begin, 0))
    left = [
        (max(a - f, 0), n - max(a - f, 0) - kept) if kept else (n, 0)
        for a, f, n, kept in zip(at, first, lengths, x.shape[-len(at) :], strict=True)
    ]
    return F.pad(x, [n for pair in reversed(left) for n in pair], value=value)


def spans(kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], places: Sequence[int]) -> list[int]:
    """How many rows some windows reach over."""
    return [(n - 1) * s + d * (k - 1) + 1 for k, s, d, n in zip(kernel, stride, dilation, places, strict=True)]


def by_dim(indices: Tensor, size: Sequence[int]) -> list[Tensor]:
    """The place in each dim of an element that is numbered through all of them."""
    found = []
    for n in reversed(size[1:]):
        above = torch.div(indices, n, rounding_mode="floor")
        found.append(indices - above * n)
        indices = above
    return [indices, *found[::-1]]


def number(places: Sequence[Tensor], size: Sequence[int]) -> Tensor:
    """The inverse of :func:`by_dim`."""
    found = places[0]
    for place, n in zip(places[1:], size[1:], strict=True):
        found = found * n + place
    return found


def renumbered(indices: Tensor, size: Sequence[int], other: Sequence[int], further: Sequence[int]) -> Tensor:
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


def _max_pool(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    at: Sequence[int],
    size: Sequence[int],
    first: Sequence[int],
    places: Sequence[int],
) -> tuple[Tensor, Tensor]:
    lengths = spans(kernel, stride, dilation, places)
    x = in_rows(x, at, first, lengths, lowest(x.dtype))
    y, indices = MAX_POOL[len(size)](x, kernel, stride, [0] * len(size), dilation, False)
    if all(f >= 0 and f + length <= n for f, length, n in zip(first, lengths, size, strict=True)):
        return y, renumbered(indices, lengths, size, first)
    pairs = zip(by_dim(indices, lengths), first, size, strict=True)  # of what is lowest, padding may be the first
    return y, number([(place + f).clamp(0, n - 1) for place, f, n in pairs], size)


def _max_pool_meta(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    at: Sequence[int],
    size: Sequence[int],
    first: Sequence[int],
    places: Sequence[int],
) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[: -len(size)], *places)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


def _max_pool_backward(
    grad: Tensor, x: Tensor, indices: Tensor, at: Sequence[int], size: Sequence[int], inside: bool
) -> Tensor:
    lead, shape = x.shape[: -len(size)], x.shape[-len(size) :]
    if inside:
        flat = renumbered(indices, size, shape, [-a for a in at]).reshape(math.prod(lead), -1)
        made = grad.new_zeros((math.prod(lead), math.prod(shape)))
        return made.scatter_add_(1, flat, grad.reshape(math.prod(lead), -1)).reshape(x.shape)
    places = [place - a for place, a in zip(by_dim(indices, size), at, strict=True)]
    beside = torch.zeros_like(indices, dtype=torch.bool)
    for place, n in zip(places, shape, strict=True):
        beside |= (place < 0) | (place >= n)
    rest = math.prod(shape)
    flat = number(places, shape).masked_fill(beside, rest)  # what other ranks have goes into one element more
    made = grad.new_zeros((math.prod(lead), rest + 1))
    made.scatter_add_(1, flat.reshape(math.prod(lead), -1), grad.reshape(math.prod(lead), -1))
    return made[:, :rest].reshape(*lead, *shape).contiguous()


def _max_pool_backward_meta(
    grad: Tensor, x: Tensor, indices: Tensor, at: Sequence[int], size: Sequence[int], inside: bool
) -> Tensor:
    return grad.new_empty(x.shape)


def divisors(
    like: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    size: Sequence[int],
    begin: Sequence[int],
    places: Sequence[int],
    counted: bool,
) -> Tensor:
    """By how much the sum over each window is divided: how many rows it has, padding among them if that is counted."""
    found = like.new_ones(())
    for k, s, p, n, first, count in zip(kernel, stride, padding, size, begin, places, strict=True):
        start = torch.arange(first, first + count, device=like.device) * s - p
        end = (start + k).clamp(max=n + p)
        rows = end - start if counted else end.clamp(max=n) - start.clamp(min=0)
        found = found.unsqueeze(-1) * rows.to(like.dtype)
    return found


def _avg_pool(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    at: Sequence[int],
    size: Sequence[int],
    begin: Sequence[int],
    places: Sequence[int],
    counted: bool,
    divisor: int | None,
) -> Tensor:
    first = [b * s - p for b, s, p in zip(begin, stride, padding, strict=True)]
    x = in_rows(x, at, first, spans(kernel, stride, [1] * len(size), places), 0.0)
    if divisor is not None:
        whole: Tensor = AVG_POOL[len(size)](x, kernel, stride, [0] * len(size), False, True, divisor)
        return whole
    total: Tensor = AVG_POOL[len(size)](x, kernel, stride, [0] * len(size), False, True, 1)
    return total / divisors(x, kernel, stride, padding, size, begin, places, counted)


def _avg_pool_meta(x: Tensor, *given: object) -> Tensor:
    places = given[6]
    assert isinstance(places, (list, tuple))
    return x.new_empty((*x.shape[: -len(places)], *places))


def _avg_pool_backward(
    grad: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    at: Sequence[int],
    size: Sequence[int],
    begin: Sequence[int],
    counted: bool,
    divisor: int | None,
) -> Tensor:
    space = len(size)
    places = grad.shape[-space:]
    if divisor is None:
        grad = grad / divisors(grad, kernel, stride, padding, size, begin, places, counted)
    lengths = spans(kernel, stride, [1] * space, places)
    like = grad.new_empty((*x.shape[:-space], *lengths))
    none = [0] * space
    made = AVG_POOL_BACKWARD[space](grad.contiguous(), like, kernel, stride, none, False, True, divisor or 1)
    first = [b * s - p for b, s, p in zip(begin, stride, padding, strict=True)]
    return in_rows(made, first, at, x.shape[-space:], 0.0).contiguous()


def _avg_pool_backward_meta(grad: Tensor, x: Tensor, *given: object) -> Tensor:
    return grad.new_empty(x.shape)


for _key in ("CPU", "CUDA"):
    _library.impl("avg_pool_tile", _avg_pool, _key)
    _library.impl("avg_pool_tile_backward", _avg_pool_backward, _key)
    _library.impl("max_pool_tile", _max_pool, _key)
    _library.impl("max_pool_tile_backward", _max_pool_backward, _key)
_library.impl("avg_pool_tile", _avg_pool_meta, "Meta")
_library.impl("avg_pool_tile_backward", _avg_pool_backward_meta, "Meta")
_library.impl("max_pool_tile", _max_pool_meta, "Meta")
_library.impl("max_pool_tile_backward", _max_pool_backward_meta, "Meta")

max_pool_tile = torch.ops.shardfx.max_pool_tile.default
max_pool_tile_backward = torch.ops.shardfx.max_pool_tile_backward.default
avg_pool_tile = torch.ops.shardfx.avg_pool_tile.default
avg_pool_tile_backward = torch.ops.shardfx.avg_pool_tile_backward.default
