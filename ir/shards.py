"""Shards of a tensor: slicing it by a spec, and joining them again.

>>> shards = Shards.of(spec, (8, 4), mesh)          # which ranks hold which distinct shard
>>> shards = [shards.sharded(full, i) for i in range(shards.count)]
>>> shards.join(shards)                             # the full tensor again
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from .dim_sharding import REPLICATED, Coords, DimSharding, Part, Window, compound, is_strided
from .mesh import Mesh
from .spec import Spec

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Shards:
    """The distinct shards of a value: their boxes in the sub-dims of its shape, and which rank has which.

    Where a dim is sharded over a loop axis, a rank has its boxes of all iterations, one behind the other along that
    dim: ``over`` are these dims and the numbers of iterations.
    """

    shape: tuple[int, ...]
    view: tuple[int, ...]
    boxes: tuple[tuple[Box, ...], ...]
    by_rank: tuple[int, ...]
    local_shapes: tuple[tuple[int, ...], ...]
    iteration_shapes: tuple[tuple[tuple[int, ...], ...], ...]
    over: tuple[tuple[int, int], ...] = ()

    @property
    def count(self) -> int:
        """How many distinct shards there are: replicas count once."""
        return len(self.boxes)

    @staticmethod
    def of(spec: Spec, shape: Sequence[int], mesh: Mesh) -> Shards:
        """The shards of a tensor of a global shape under a spec, numbered in the order of the first rank that has
        each."""
        return _shards(spec, tuple(shape), mesh)

    def sharding(self, full: torch.Tensor, shard: int) -> torch.Tensor:
        """A shard of a full tensor: a view where that is possible."""
        boxes = zip(self.boxes[shard], self.iteration_shapes[shard], strict=True)
        parts = [slice_box(full, self.view, box, shape) for box, shape in boxes]
        for dim, count in reversed(self.over):
            parts = [torch.cat(parts[at : at + count], dim) for at in range(0, len(parts), count)]
        return parts[0]

    def join(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """The full tensor from all distinct shards, in order."""
        if self.count == 1 and not self.over:
            return shards[0].reshape(self.shape)
        full = shards[0].new_empty(self.view)
        for number, shard in enumerate(shards):
            for box, part in zip(self.boxes[number], self._by_iteration(number, shard), strict=True):
                region = tuple(slice(start, start + length) for start, length in box)
                full[region] = part.reshape([length for _, length in box])
        return full.reshape(self.shape)

    def _by_iteration(self, number: int, shard: torch.Tensor) -> list[torch.Tensor]:
        """What a shard has of each iteration."""
        parts, shapes = [shard], [self.iteration_shapes[number]]
        for place, (dim, count) in enumerate(self.over):
            inner = len(shapes[0]) // count
            iterations = [[each[at : at + inner] for at in range(0, len(each), inner)] for each in shapes]
            sizes = [[_together(iteration, self.over[place + 1 :])[dim] for iteration in each] for each in iterations]
            parts = [shard for part, each in zip(parts, sizes, strict=True) for shard in part.split(each, dim)]
            shapes = [iteration for each in iterations for iteration in each]
        return parts


def _together(shapes: Sequence[tuple[int, ...]], over: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """The shape of the shards of all iterations, concatenated."""
    for dim, count in reversed(over):
        groups = [shapes[at : at + count] for at in range(0, len(shapes), count)]
        shapes = [(*each[0][:dim], sum(shape[dim] for shape in each), *each[0][dim + 1 :]) for each in groups]
    return shapes[0]


@lru_cache(maxsize=4096)
def _shards(spec: Spec, shape: tuple[int, ...], mesh: Mesh) -> Shards:
    boxes: dict[tuple[Box, ...], int] = {}
    by_rank, shapes = [], []
    axes, over = _over(spec, mesh)
    for rank in range(mesh.size):
        iterations = mesh.along(mesh.coords(rank), axes)
        found = tuple(spec.box(shape, mesh, at) for at in iterations)
        if found not in boxes:
            boxes[found] = len(boxes)
            shapes.append(tuple(spec.local_shape(shape, mesh, at) for at in iterations))
        by_rank.append(boxes[found])
    local = tuple(_together(each, over) for each in shapes)
    return Shards(shape, spec.sub_shape(shape), tuple(boxes), tuple(by_rank), local, tuple(shapes), over)


def _over(spec: Spec, mesh: Mesh) -> tuple[list[str], tuple[tuple[int, int], ...]]:
    """The loop axes that shard some dim, outermost first; with the dim, and the number of iterations, of each."""
    found = [(dim, a) for a in mesh.axes if a.loop for dim, sharding in enumerate(spec.dims) if a.name in sharding.axes]
    return [axis.name for _, axis in found], tuple((dim, axis.size) for dim, axis in found)


def held_shape(spec: Spec, shape: Sequence[int], mesh: Mesh, rank: int) -> tuple[int, ...]:
    """The shape that a rank stores of an input or an output: the shards of all iterations are concatenated."""
    axes, over = _over(spec, mesh)
    return _together([spec.local_shape(shape, mesh, at) for at in mesh.along(mesh.coords(rank), axes)], over)


def slice_box(full: torch.Tensor, view: Sequence[int], box: Box, shape: Sequence[int]) -> torch.Tensor:
    """A box of ``full``, seen in the shape ``view``, in the local shape. A view where that is possible."""
    x = full.reshape(view)
    for dim, (start, length) in enumerate(box):
        if length != x.shape[dim]:
            x = x.narrow(dim, start, length)
    return x.reshape(shape)


def local_shard(full: torch.Tensor, spec: Spec, mesh: Mesh, rank: int) -> torch.Tensor:
    """One rank's shard of a full tensor."""
    shards = Shards.of(spec, full.shape, mesh)
    return shards.sharding(full, shards.by_rank[rank])


def overlap(a: Box, b: Box) -> Box | None:
    """The intersection of two boxes; None if it is empty."""
    found = []
    for (start, length), (other, count) in zip(a, b, strict=True):
        first, end = max(start, other), min(start + length, other + count)
        if end <= first:
            return None
        found.append((first, end - first))
    return tuple(found)


@lru_cache(maxsize=4096)
def rows_for(axes: tuple[str, ...], window: Window, size: int, mesh: Mesh) -> DimSharding:
    """The sharding of a dim of ``size`` that has what the chunks of another dim need: a plain one, or one of blocks,
    where that is the same for every rank."""
    if not axes:
        return REPLICATED
    made = DimSharding(axes, rows=window)
    same = [DimSharding(axes)]
    if window.size and size % window.size == 0:
        same.append(compound([Part(window.size, axes), Part(size // window.size)], mesh))
    ranks = mesh.along(dict.fromkeys(mesh.names, 0), axes)
    segments = [_segment(made, size, mesh, coords) for coords in ranks]
    for sharding in same:
        if not is_strided(sharding) and [_segment(sharding, size, mesh, coords) for coords in ranks] == segments:
            return sharding
    return made


def _segment(sharding: DimSharding, size: int, mesh: Mesh, coords: Coords) -> tuple[int, int]:
    """A rank's range of a dim, normalized if empty."""
    start, length = sharding.span(size, mesh, coords)
    return (start, length) if length else (0, 0)


@lru_cache(maxsize=4096)
def has_rows(source: Spec, target: Spec, shape: tuple[int, ...], mesh: Mesh) -> bool:
    """Whether every rank has, of what is placed as ``source``, all that it is to have by ``target``: dims that differ
    are sharded over the same axes, into one contiguous range for each rank."""
    if source.partial != target.partial:
        return False
    dims = []
    for dim, (a, b) in enumerate(zip(source.dims, target.dims, strict=True)):
        if a != b:
            if a.axes != b.axes or is_strided(a) or is_strided(b) or any(mesh[axis].loop for axis in a.axes):
                return False
            dims.append(dim)
    return RowExchange(source, target, shape, mesh, dict.fromkeys(mesh.names, 0), tuple(dims)).is_silent


@dataclass(frozen=True)
class RowExchange:
    """A halo exchange: who sends which rows to whom, where tiles of some dims become others over the same axes. From
    rows that overlap only those can be made that every rank has.

    Args:
        coords: where one rank of the group stands.
        dims: the dims whose rows move; every rank has one contiguous range of each, before and after.
    """

    source: Spec
    target: Spec
    shape: tuple[int, ...]
    mesh: Mesh
    coords: Coords
    dims: tuple[int, ...]

    @cached_property
    def members(self) -> list[dict[str, int]]:
        """The coordinates of the group's ranks."""
        return self.mesh.along(self.coords, (axis for dim in self.dims for axis in self.source.dims[dim].axes))

    def box(self, spec: Spec, coords: Coords) -> Box:
        """A rank's box of the dims."""
        return tuple(spec.dims[dim].span(self.shape[dim], self.mesh, coords) for dim in self.dims)

    @cached_property
    def stored(self) -> list[Box]:
        """The box that each member has."""
        return [self.box(self.source, coords) for coords in self.members]

    @cached_property
    def needed(self) -> list[Box]:
        """The box that each member needs."""
        return [self.box(self.target, coords) for coords in self.members]

    def sends(self, member: int) -> list[Box | None]:
        """The rows that a member sends to each: nothing to itself, and nothing where all have what they need."""
        if self.is_silent:
            return [None] * len(self.members)
        return [None if k == member else overlap(self.stored[member], box) for k, box in enumerate(self.needed)]

    @cached_property
    def is_silent(self) -> bool:
        """Whether every member has what it needs."""
        return all(
            first <= start and start + length <= first + count
            for stored, needed in zip(self.stored, self.needed, strict=True)
            if all(length for _, length in needed)
            for (first, count), (start, length) in zip(stored, needed, strict=True)
        )

    @property
    def most(self) -> int:
        """The elements sent by the member that sends most."""
        local = self.source.local_shape(self.shape, self.mesh, self.coords)
        rest = [n for d, n in enumerate(local) if d not in self.dims]
        sent = (sum(math.prod(n for _, n in box) for box in self.sends(m) if box) for m in range(len(self.members)))
        return max(sent) * math.prod(rest)

    def tiles(self, member: int) -> tuple[list[tuple[int, Box]], list[int]]:
        """What a member needs: boxes in row-major order, and who has each; and how many there are along each dim."""
        parts = [(k, box) for k, stored in enumerate(self.stored) if (box := overlap(stored, self.needed[member]))]
        edges = [sorted({box[d] for _, box in parts}) for d in range(len(self.dims))]
        by_box = {box: k for k, box in parts}
        grid = [(by_box[cell], cell) for cell in itertools.product(*edges)]
        return grid, [len(each) for each in edges]


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor to be compared, in float64; a complex one in complex128, for in float64 it would be its real part."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
