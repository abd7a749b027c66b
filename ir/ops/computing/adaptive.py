"""The largest element of each adaptive window, on the rows that a rank has of an image.

    y[n.. p q], indices = shardfx.adaptive_max_tile(x[n.. h w], at, size, begin, places, lengths)

Window o of ``places`` reaches over rows o * size // places to the end of that of the next one, rounded up. ``at`` says
where in the image, of ``size``, the rows begin that are held; ``begin`` which window is the first, and ``lengths`` how
many there are. Indices count through the whole image, and name the first of equal elements. A single window over the
whole image, of which each rank has a part, is taken apart into a maximum and where that stands. Needs torch alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_library = torch.library.Library("shardfx", "FRAGMENT")
_library.define(
    "adaptive_max_tile(Tensor x, int[] at, int[] size, int[] begin, int[] places, int[] lengths) -> (Tensor, Tensor)"
)


def rows_of(size: int, places: int, begin: int, count: int, device: torch.device) -> Tensor:
    """The rows of each of some windows, ``[count, most]``: of smaller windows the last row again."""
    window = torch.arange(begin, begin + count, device=device)
    start = torch.div(window * size, places, rounding_mode="floor")
    end = torch.div((window + 1) * size + places - 1, places, rounding_mode="floor")
    most = -(-size // places) + (size % places != 0)
    return torch.minimum(start.unsqueeze(1) + torch.arange(most, device=device), end.unsqueeze(1) - 1)


def _max(
    x: Tensor,
    at: Sequence[int],
    size: Sequence[int],
    begin: Sequence[int],
    places: Sequence[int],
    lengths: Sequence[int],
) -> tuple[Tensor, Tensor]:
    found, number = x.unsqueeze(-1), torch.zeros(1, dtype=torch.int64, device=x.device)
    pairs = zip(at, size, begin, places, lengths, strict=True)
    for dim, (a, n, first, of, count) in enumerate(pairs, x.dim() - len(size)):
        rows = rows_of(n, of, first, count, x.device)  # the elements of a window stand in the last dim
        found = found.index_select(dim, (rows - a).reshape(-1)).unflatten(dim, rows.shape)
        found = found.movedim(dim + 1, -1).flatten(-2)
        number = (number.unsqueeze(-2).unsqueeze(-1) * n + rows.unsqueeze(1)).flatten(-2)
    y = found.amax(-1)
    beside = torch.iinfo(torch.int64).max
    indices = torch.where(found == y.unsqueeze(-1), number, beside).amin(-1)
    if x.dtype.is_floating_point:  # of NaN the last, as kernels do
        last = torch.where(found.isnan(), number, -1).amax(-1)
        indices = torch.where(y.isnan(), last, indices)
    return y, indices


def _max_meta(
    x: Tensor,
    at: Sequence[int],
    size: Sequence[int],
    begin: Sequence[int],
    places: Sequence[int],
    lengths: Sequence[int],
) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[: -len(size)], *lengths)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


def _numbers(x: Tensor, space: int) -> Tensor:
    """The places of an image, counted through all dims of space."""
    sizes = x.shape[-space:]
    return torch.arange(math.prod(sizes), device=x.device).view(sizes)


def largest_of_all(x: Tensor, output_size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """An adaptive max-pool, of a single window: its maximum, and where the first such stands (of NaN the last), each of
    which may be found of parts. With more windows it is the op."""
    space = len(output_size)
    if any(n != 1 for n in output_size):
        op = torch.ops.aten.adaptive_max_pool2d if space == 2 else torch.ops.aten.adaptive_max_pool3d
        made: tuple[Tensor, Tensor] = op.default(x, output_size)
        return made
    dims, number = list(range(-space, 0)), _numbers(x, space)
    y = x.amax(dims, keepdim=True)
    place = torch.where(x == y, number, torch.iinfo(torch.int64).max)
    found = torch.where(x.isnan(), -1 - number, place).amin(dims, keepdim=True)
    return y, torch.where(found < 0, -1 - found, found)


def largest_of_all_backward(grad: Tensor, x: Tensor, indices: Tensor, *, space: int) -> Tensor:
    """Its gradient: of a single window it stands where the maximum does."""
    if any(n != 1 for n in grad.shape[-space:]):
        aten = torch.ops.aten
        op = aten.adaptive_max_pool2d_backward if space == 2 else aten.adaptive_max_pool3d_backward
        made: Tensor = op.default(grad, x, indices)
        return made
    return torch.where(_numbers(x, space) == indices, grad, 0.0)


for _key in ("CPU", "CUDA"):
    _library.impl("adaptive_max_tile", _max, _key)
_library.impl("adaptive_max_tile", _max_meta, "Meta")

adaptive_max_tile = torch.ops.shardfx.adaptive_max_tile.default
