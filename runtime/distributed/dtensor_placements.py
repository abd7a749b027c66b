"""A placement as DTensor says it, where it can: which ``Shard`` and ``_StridedShard`` give exactly our pieces.

    dp tp, -            on Mesh(dp, tp)     (Shard(0), Shard(0))
    tp dp, -            on Mesh(dp, tp)     (_StridedShard(0, split_factor=2), Shard(0))
    (3 64{tp}), -       on Mesh(tp)         (_StridedShard(0, split_factor=3),)

DTensor cuts a dim over several mesh axes in the order of the *mesh*, each within what the one before left. An axis
that has something more major than itself uncut when its turn comes is strided: it cuts each of ``split_factor``
equal pieces, and joins what it takes of each. Where sizes do not divide, that need not be the same, so every answer is
tried out on row numbers, by torch's own splitting, and compared with the boxes of the spec. And torch 2.13 gathers a
dim that is cut by several axes, of which one but the last is strided, rightly only where the cut is plain (it gives
wrong tensors for ``(3 64{tp,dp})``, without a word): the others count as what DTensor cannot say.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardfx.ir.cut import Coords, Cut, bounds
from shardfx.ir.mesh import Mesh
from shardfx.ir.spec import Spec

Span = tuple[int, int]
"""Start and length of consecutive rows."""


def placements(spec: Spec, shape: Sequence[int], mesh: Mesh) -> tuple[Placement, ...] | None:
    """One placement per axis of ranks; None if DTensor has none that give the same pieces."""
    found: dict[str, Placement] = {}
    for dim, (cut, size) in enumerate(zip(spec.dims, shape, strict=True)):
        chosen = _of_dim(cut, size, dim, mesh)
        if chosen is None:
            return None
        found |= chosen
    return tuple(found.get(axis.name, Replicate()) for axis in mesh.space)


def runs(cut: Cut, size: int, mesh: Mesh, coords: Coords) -> list[Span]:
    """The consecutive rows of a dim that a rank holds, in the order in which it holds them."""
    result = [(0, 1)]
    for part in cut.sub(size):
        start, length = bounds(part.size, part.axes, mesh, coords)
        whole = length == part.size
        grown = []
        for at, count in result:
            if whole:
                grown.append((at * part.size, count * part.size))
            else:
                grown += [((at + i) * part.size + start, length) for i in range(count)]
        result = grown
    return [(start, length) for start, length in result if length]


def _of_dim(cut: Cut, size: int, dim: int, mesh: Mesh) -> dict[str, Placement] | None:
    axes = mesh.sort(cut.axes)
    if not cut.parts and axes == cut.axes and size % mesh.extent(axes) == 0:
        return {axis: Shard(dim) for axis in axes}
    made: dict[str, Any] = {}
    done: set[str] = set()
    for axis in axes:
        factor = _split_factor(cut, size, axis, done, mesh)
        made[axis] = Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)
        done.add(axis)
    if cut.parts and any(type(made[axis]) is not Shard for axis in axes[:-1]):
        return None
    first = {
        axis: Shard(0) if type(p) is Shard else _StridedShard(0, split_factor=p.split_factor)
        for axis, p in made.items()
    }
    rows = torch.arange(size)
    for places in itertools.product(*(range(mesh[axis].size) for axis in axes)):
        coords = dict(zip(axes, places, strict=True))
        held = rows
        for axis in axes:
            held = first[axis]._split_tensor(held, mesh[axis].size, with_padding=False)[0][coords[axis]]
        wanted = [torch.arange(start, start + length) for start, length in runs(cut, size, mesh, coords)]
        if not torch.equal(held, torch.cat(wanted) if wanted else rows[:0]):
            return None
    return made


def _split_factor(cut: Cut, size: int, axis: str, done: set[str], mesh: Mesh) -> int:
    """How many pieces stand side by side when ``axis`` is cut: what is more major, and not cut by ``done`` already."""
    factor = 1
    for part in cut.sub(size):
        if axis in part.axes:
            before = part.axes[: part.axes.index(axis)]
            return factor * mesh.extent(a for a in before if a not in done)
        factor *= math.ceil(part.size / mesh.extent(a for a in part.axes if a in done))
    raise AssertionError(f"{axis} does not cut {cut}")
