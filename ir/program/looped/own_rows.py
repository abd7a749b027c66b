"""Which rows are a turn's own: of an input that a rank holds for all turns, and of an output that it gives for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate

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
    others = tuple((name, at) for name, at in coords.items() if name != axis)
    ends = _ends(spec, tuple(shape), mesh, others, axis, dim, tuple(inner))
    start = ends[coords[axis] - 1] if coords[axis] else 0
    return start, ends[coords[axis]] - start


@lru_cache(maxsize=4096)
def _ends(
    spec: Spec,
    shape: tuple[int, ...],
    mesh: Mesh,
    others: tuple[tuple[str, int], ...],
    axis: str,
    dim: int,
    inner: tuple[str, ...],
) -> tuple[int, ...]:
    """Where the rows of each turn end, one behind the other, at some coordinates along the ``others``. It is asked for
    each of many turns."""
    return tuple(
        accumulate(
            sum(spec.local_shape(shape, mesh, at)[dim] for at in mesh.along(turn, inner))
            for turn in mesh.along(dict(others), [axis])
        )
    )


def own_place(spec: Spec, shape: Sequence[int], mesh: Mesh, coords: Mapping[str, int]) -> dict[int, tuple[int, int]]:
    """By dim that turns cut: start and length of a turn's part in what the rank gives for all turns."""
    found = {}
    for dim, cut in enumerate(spec.dims):
        over = [axis for axis in time_axes(mesh) if axis in cut.axes]
        if over:
            start = sum(own_rows(spec, shape, mesh, coords, axis, dim)[0] for axis in over)
            found[dim] = start, spec.local_shape(shape, mesh, coords)[dim]
    return found
