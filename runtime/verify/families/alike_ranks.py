"""Which ranks hold as much of every value: boxes of the mesh, in each of which places are lines.

    12 rows over mb=5, and each turn's over dp=2          boxes
    mb  0  1  2  3  4                                     turns 0, 1, each dp
    dp=0  2  2  1  1  1  (a row more than dp=1 where      turns 2 to 4, dp=0
    dp=1  1  1  1  1  1   that does not divide)           ...

Chunks stand one behind the other, so where they are equally long, up to each of the axes that cut a dim, the place of
one is a linear function of its number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from shardfx.ir.cut import Cut, Part, bounds
from shardfx.ir.graph import Graph
from shardfx.ir.mesh import Mesh
from shardfx.ir.spec import Spec


@dataclass(frozen=True)
class AlikeRanks:
    """Boxes of ranks; one of all where every cut is even."""

    mesh: Mesh
    boxes: tuple[tuple[int, ...], ...]

    @cached_property
    def box_of(self) -> dict[int, int]:
        """The number of the box of each rank."""
        return {rank: number for number, box in enumerate(self.boxes) for rank in box}

    def starts(self, but: Iterable[str] = ()) -> list[int]:
        """Of each box the first rank, and the next along each axis that is none of ``but``: what is linear, and right
        at these, is right in all of the box along these axes."""
        axes = [axis.name for axis in self.mesh.space if axis.name not in set(but)]
        found = []
        for number, box in enumerate(self.boxes):
            first = self.mesh.coords(box[0])
            found.append(box[0])
            for axis in axes:
                if first[axis] + 1 < self.mesh[axis].size:
                    beside = self.mesh.rank({**first, axis: first[axis] + 1})
                    found += [beside] * (self.box_of[beside] == number)
        return found


def alike_ranks(graph: Graph) -> AlikeRanks | None:
    """The boxes of a planned graph's ranks; None where that is not said: tiles whose rows overlap."""
    mesh = graph.mesh
    cuts = set(_cuts(graph))
    if any(cut.rows is not None and not cut.is_even(size, mesh) for size, cut in cuts):
        return None
    parts = {part for size, cut in cuts for part in cut.sub(size) if part.size % mesh.extent(part.axes)}
    axes = mesh.sort({axis for part in parts for axis in part.axes})
    found: dict[tuple[int, ...], list[int]] = {}
    known: dict[tuple[int, ...], tuple[int, ...]] = {}
    for rank in range(mesh.size):
        coords = mesh.coords(rank)
        at = tuple(coords[axis] for axis in axes)
        if at not in known:
            known[at] = tuple(length for part in parts for length in _lengths(part, mesh, coords))
        found.setdefault(known[at], []).append(rank)
    boxes = tuple(tuple(ranks) for ranks in found.values())
    return AlikeRanks(mesh, boxes) if all(_is_box(box, mesh) for box in boxes) else None


def _cuts(graph: Graph) -> Iterator[tuple[int, Cut]]:
    """Everything that is cut, and how."""
    seen: set[tuple[tuple[int, ...], Spec]] = {(v.shape, v.spec) for v in graph.values() if v.spec is not None}
    for node in graph.nodes:
        if node.strategy is not None:
            seen.update(zip((v.shape for v in node.operands), node.strategy.operands, strict=False))
            seen.update(zip((v.shape for v in node.outs), node.strategy.results, strict=False))
    for shape, spec in seen:
        yield from ((size, cut) for size, cut in zip(shape, spec.dims, strict=True) if cut)


def _lengths(part: Part, mesh: Mesh, coords: dict[str, int]) -> Iterator[int]:
    for end in range(1, len(part.axes) + 1):
        yield bounds(part.size, part.axes[:end], mesh, coords)[1]


def _is_box(ranks: tuple[int, ...], mesh: Mesh) -> bool:
    """Whether ranks are all those between a first and a last one along each axis."""
    first, last = mesh.coords(ranks[0]), mesh.coords(ranks[-1])
    return len(ranks) == math.prod(last[axis] - first[axis] + 1 for axis in first) and all(
        first[axis] <= at <= last[axis] for rank in ranks for axis, at in mesh.coords(rank).items()
    )
