"""Products by group, as a mixture of experts does them: a row is multiplied by the matrix of the group it is in.

    out[s n]   = shardfx.grouped_mm(x[s k], w[g k n], ends[g])
    out[g k n] = shardfx.grouped_outer(x[s k], y[s n], ends[g])      for each group the sum of x' y over its rows

The rows of group ``e`` begin where those of ``e - 1`` end, at ``ends[e - 1]``, and end before ``ends[e]``. A row of no
group gives zeros, and costs nothing. A rank may have a part of the rows and of the groups: ``ends`` is always that of
the whole, and ``rows`` and ``groups`` say what is held of it: of each sub-dim of the whole, major first, its size, and
the start and length of what is held; nothing where all is held. Needs torch alone.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_library = torch.library.Library("shardfx", "FRAGMENT")
_library.define("grouped_mm(Tensor x, Tensor w, Tensor ends, int[] rows=[], int[] groups=[]) -> Tensor")
_library.define("grouped_outer(Tensor x, Tensor y, Tensor ends, int[] rows=[], int[] groups=[]) -> Tensor")


def places(held: Sequence[int], size: int) -> Sequence[int]:
    """Where in the whole what is held stands, in order; of ``size`` elements if all are held."""
    found: Sequence[int] = range(size) if not held else range(1)
    for whole, start, length in zip(*[iter(held)] * 3, strict=True):
        if len(found) == 1:
            found = range(found[0] * whole + start, found[0] * whole + start + length)
        else:
            found = [place * whole + i for place in found for i in range(start, start + length)]
    return found


def stretches(ends: Tensor, count: int, rows: Sequence[int], groups: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """The held groups, by their number among those, that have some of the ``count`` rows that are held: which rows."""
    here = places(rows, count)
    local = [bisect.bisect_left(here, end) for end in ends.tolist()]
    begins = [0, *local]
    for number, group in enumerate(places(groups, len(local))):
        if begins[group] < local[group]:
            yield number, slice(begins[group], local[group])


def _mm(x: Tensor, w: Tensor, ends: Tensor, rows: Sequence[int] = (), groups: Sequence[int] = ()) -> Tensor:
    out = x.new_zeros((x.shape[0], w.shape[2]))
    for group, some in stretches(ends, x.shape[0], rows, groups):
        out[some].addmm_(x[some], w[group])
    return out


def _outer(x: Tensor, y: Tensor, ends: Tensor, rows: Sequence[int] = (), groups: Sequence[int] = ()) -> Tensor:
    out = x.new_zeros((len(places(groups, ends.shape[0])), x.shape[1], y.shape[1]))
    for group, some in stretches(ends, x.shape[0], rows, groups):
        torch.mm(x[some].t(), y[some], out=out[group])
    return out


def _mm_meta(x: Tensor, w: Tensor, ends: Tensor, rows: Sequence[int] = (), groups: Sequence[int] = ()) -> Tensor:
    return x.new_empty((x.shape[0], w.shape[2]))


def _outer_meta(x: Tensor, y: Tensor, ends: Tensor, rows: Sequence[int] = (), groups: Sequence[int] = ()) -> Tensor:
    return x.new_empty((len(places(groups, ends.shape[0])), x.shape[1], y.shape[1]))


for _key in ("CPU", "CUDA"):
    _library.impl("grouped_mm", _mm, _key)
    _library.impl("grouped_outer", _outer, _key)
_library.impl("grouped_mm", _mm_meta, "Meta")
_library.impl("grouped_outer", _outer_meta, "Meta")

grouped_mm = torch.ops.shardfx.grouped_mm.default
grouped_outer = torch.ops.shardfx.grouped_outer.default
