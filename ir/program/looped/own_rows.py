"""Which rows are a turn's own: of an input that a rank holds for all turns, and of an output that it gives for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

from shardfx.ir.cut import bounds, chunk
from shardfx.ir.mesh import Mesh
from shardfx.ir.spec import Spec

from .in_turns import time_axes


def own_rows(
    spec: Spec, shape: Sequence[int], mesh: Mesh, coords: Mapping[str, int], axis: str, dim: int
) -> tuple[int, int]:
    """Start and length of a turn's rows among those of all turns of an axis, along a dim that it cuts.

    ``coords`` says which turn, and which of the axes around; what a turn has is that of all turns of the axes within.
    """
    cut = spec.dims[dim]
    inner = [a for a in time_axes(mesh) if a in cut.axes and mesh.order(a) > mesh.order(axis)]
    if cut.is_even(shape[dim], mesh):
        length = spec.local_shape(shape, mesh, coords)[dim] * mesh.extent(inner)
        return coords[axis] * length, length
    (part,) = (each for each in cut.sub(shape[dim]) if axis in each.axes)
    start, turn = 0, coords[axis]
    for run in _alike(bounds(part.size, part.axes[: part.axes.index(axis)], mesh, coords)[1], mesh[axis].size):
        of_run = mesh.along({**coords, axis: run[0]}, inner)
        length = sum(spec.local_shape(shape, mesh, at)[dim] for at in of_run)
        if turn <= run[-1]:
            break
        start += len(run) * length
    return start + (turn - run[0]) * length, length


@lru_cache(maxsize=4096)
def _alike(size: int, parts: int) -> tuple[range, ...]:
    """Runs of chunks that are equally long: few, however many chunks there are."""
    ends = [i for i in range(1, parts) if chunk(size, parts, i)[1] != chunk(size, parts, i - 1)[1]]
    return tuple(range(a, b) for a, b in pairwise([0, *ends, parts]))


def own_place(spec: Spec, shape: Sequence[int], mesh: Mesh, coords: Mapping[str, int]) -> dict[int, tuple[int, int]]:
    """By dim that turns cut: start and length of a turn's part in what the rank gives for all turns."""
    found = {}
    for dim, cut in enumerate(spec.dims):
        over = [axis for axis in time_axes(mesh) if axis in cut.axes]
        if over:
            start = sum(own_rows(spec, shape, mesh, coords, axis, dim)[0] for axis in over)
            found[dim] = start, spec.local_shape(shape, mesh, coords)[dim]
    return found
