"""Ranks with equal shards of every value: boxes of the mesh, in each of which offsets are linear functions.

    12 rows over mb=5, and each iteration's over dp=2     boxes
    mb  0  1  2  3  4                                     iterations 0, 1, each dp
    dp=0  2  2  1  1  1  (a row more than dp=1 where      iterations 2 to 4, dp=0
    dp=1  1  1  1  1  1   that does not divide)           ...

Shards are stored one behind the other, so where they are equally long, up to each of the axes that shard a dim, the
offset of one is a linear function of its number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from shardfx.ir.dim_sharding import DimSharding, bounds
from shardfx.ir.graph import Graph
from shardfx.ir.mesh import Mesh
from shardfx.ir.spec import Spec


@dataclass(frozen=True)
class EqualShards:
    """The partition of ranks into boxes with equal shards; one box where every sharding is even."""

    mesh: Mesh
    boxes: tuple[tuple[int, ...], ...]

    @cached_property
    def box_of(self) -> dict[int, int]:
        """The number of the box of each rank."""
        return {rank: number for number, box in enumerate(self.boxes) for rank in box}

    def starts(self, but: Iterable[str] = ()) -> list[int]:
        """The sample ranks of each box: its first, and the next along each axis that is none of ``but``: what is
        linear, and right at these, is right in all of the box along these axes."""
        skipped, found = set(but), []
        for number, box in enumerate(self.boxes):
            first = self.mesh.coords(box[0])
            found.append(box[0])
            for axis in self.mesh.space:
                if axis.name not in skipped and first[axis.name] + 1 < axis.size:
                    neighbour = self.mesh.rank({**first, axis.name: first[axis.name] + 1})
                    found += [neighbour] * (self.box_of[neighbour] == number)
        return found


def equal_shards(graph: Graph) -> EqualShards | None:
    """The boxes of a planned graph's ranks; None where that is not known: tiles with overlapping rows."""
    mesh = graph.mesh
    shardings = set(_shardings(graph))
    if any(sharding.rows is not None and not sharding.is_even(size, mesh) for size, sharding in shardings):
        return None
    parts = {part for size, sharding in shardings for part in sharding.sub(size) if part.size % mesh.extent(part.axes)}
    axes = mesh.sort({axis for part in parts for axis in part.axes})
    found: dict[tuple[int, ...], list[int]] = {}
    known: dict[tuple[int, ...], tuple[int, ...]] = {}
    for rank in range(mesh.size):
        coords = mesh.coords(rank)
        at = tuple(coords[axis] for axis in axes)
        if at not in known:
            ends = ((part, end) for part in parts for end in range(1, len(part.axes) + 1))
            known[at] = tuple(bounds(part.size, part.axes[:end], mesh, coords)[1] for part, end in ends)
        found.setdefault(known[at], []).append(rank)
    return EqualShards(mesh, tuple(map(tuple, found.values())))  # boxes, since lengths fall along each axis


def _shardings(graph: Graph) -> Iterator[tuple[int, DimSharding]]:
    """The size and sharding of each sharded dim."""
    seen: set[tuple[tuple[int, ...], Spec]] = {(v.shape, v.spec) for v in graph.values() if v.spec is not None}
    for node in graph.nodes:
        if node.strategy is not None:
            seen.update(zip((v.shape for v in node.operands), node.strategy.operands, strict=False))
            seen.update(zip((v.shape for v in node.outs), node.strategy.results, strict=False))
    for shape, spec in seen:
        yield from ((size, sharding) for size, sharding in zip(shape, spec.dims, strict=True) if sharding)
