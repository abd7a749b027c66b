"""Shards: cutting a whole tensor by a spec, and joining the pieces again.

>>> shards = Shards.of(spec, (8, 4), mesh)          # which ranks hold which distinct piece
>>> pieces = [shards.cut(whole, i) for i in range(shards.count)]
>>> shards.join(pieces)                             # the whole again
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from .cut import Coords
from .mesh import Mesh
from .spec import Spec

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Shards:
    """The distinct pieces of a value: their boxes in the sub-dims of its shape, and which rank holds which."""

    shape: tuple[int, ...]
    view: tuple[int, ...]
    boxes: tuple[Box, ...]
    by_rank: tuple[int, ...]
    local_shapes: tuple[tuple[int, ...], ...]

    @property
    def count(self) -> int:
        """How many distinct pieces there are: replicas count once."""
        return len(self.boxes)

    @staticmethod
    def of(spec: Spec, shape: Sequence[int], mesh: Mesh) -> Shards:
        """The pieces of a tensor of a global shape under a spec, numbered in the order of the first rank that holds
        each."""
        return _shards(spec, tuple(shape), mesh)

    def first_rank(self, piece: int) -> int:
        """The lowest rank that holds a piece."""
        return self.by_rank.index(piece)

    def cut(self, whole: torch.Tensor, piece: int) -> torch.Tensor:
        """A piece of a whole tensor: a view where that is possible."""
        return cut_box(whole, self.view, self.boxes[piece], self.local_shapes[piece])

    def join(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole from all distinct pieces, in order."""
        if self.count == 1:
            return pieces[0].reshape(self.shape)
        whole = pieces[0].new_empty(self.view)
        for box, piece in zip(self.boxes, pieces, strict=True):
            region = tuple(slice(start, start + length) for start, length in box)
            whole[region] = piece.reshape([length for _, length in box])
        return whole.reshape(self.shape)


@lru_cache(maxsize=4096)
def _shards(spec: Spec, shape: tuple[int, ...], mesh: Mesh) -> Shards:
    boxes: dict[Box, int] = {}
    by_rank, shapes = [], []
    for rank in range(mesh.size):
        coords = mesh.coords(rank)
        box = spec.box(shape, mesh, coords)
        if box not in boxes:
            boxes[box] = len(boxes)
            shapes.append(spec.local_shape(shape, mesh, coords))
        by_rank.append(boxes[box])
    return Shards(shape, spec.sub_shape(shape), tuple(boxes), tuple(by_rank), tuple(shapes))


def cut_box(whole: torch.Tensor, view: Sequence[int], box: Box, shape: Sequence[int]) -> torch.Tensor:
    """The elements of ``whole``, seen in the shape ``view``, that lie in a box of it; in the local shape. A view
    where that is possible."""
    x = whole.reshape(view)
    for dim, (start, length) in enumerate(box):
        if length != x.shape[dim]:
            x = x.narrow(dim, start, length)
    return x.reshape(shape)


def cut_local(whole: torch.Tensor, spec: Spec, mesh: Mesh, rank: int) -> torch.Tensor:
    """What one rank holds of a whole tensor."""
    coords = mesh.coords(rank)
    shape = tuple(whole.shape)
    return cut_box(whole, spec.sub_shape(shape), spec.box(shape, mesh, coords), spec.local_shape(shape, mesh, coords))


def overlap(a: Box, b: Box) -> Box | None:
    """What two boxes have in common; None if nothing."""
    found = []
    for (start, length), (other, count) in zip(a, b, strict=True):
        first, end = max(start, other), min(start + length, other + count)
        if end <= first:
            return None
        found.append((first, end - first))
    return tuple(found)


@dataclass(frozen=True)
class RowExchange:
    """Who sends which rows to whom, where tiles of some dims become others over the same axes.

    Args:
        coords: where one rank of the group stands.
        dims: the dims whose rows move; every rank holds one stretch of each, before and after.
    """

    source: Spec
    target: Spec
    shape: tuple[int, ...]
    mesh: Mesh
    coords: Coords
    dims: tuple[int, ...]

    @cached_property
    def members(self) -> list[dict[str, int]]:
        """Where the ranks of the group stand."""
        return self.mesh.along(self.coords, (axis for dim in self.dims for axis in self.source.dims[dim].axes))

    def box(self, spec: Spec, coords: Coords) -> Box:
        """What a rank holds of the dims."""
        return tuple(spec.dims[dim].span(self.shape[dim], self.mesh, coords) for dim in self.dims)

    @cached_property
    def held(self) -> list[Box]:
        """What each member has."""
        return [self.box(self.source, coords) for coords in self.members]

    @cached_property
    def needed(self) -> list[Box]:
        """What each member is to have."""
        return [self.box(self.target, coords) for coords in self.members]

    def sends(self, member: int) -> list[Box | None]:
        """The rows that a member sends to each: nothing to itself."""
        return [None if k == member else overlap(self.held[member], box) for k, box in enumerate(self.needed)]

    @property
    def is_silent(self) -> bool:
        """Whether every member has what it needs."""
        return not any(any(self.sends(member)) for member in range(len(self.members)))

    @property
    def most(self) -> int:
        """The elements that the member which sends most sends."""
        local = self.source.local_shape(self.shape, self.mesh, self.coords)
        rest = [n for d, n in enumerate(local) if d not in self.dims]
        sent = (sum(math.prod(n for _, n in box) for box in self.sends(m) if box) for m in range(len(self.members)))
        return max(sent) * math.prod(rest)

    def tiles(self, member: int) -> tuple[list[tuple[int, Box]], list[int]]:
        """What a member needs: boxes in row-major order, and who has each; and how many there are along each dim."""
        parts = [(k, box) for k, held in enumerate(self.held) if (box := overlap(held, self.needed[member]))]
        edges = [sorted({box[d] for _, box in parts}) for d in range(len(self.dims))]
        by_box = {box: k for k, box in parts}
        grid = [(by_box[cell], cell) for cell in itertools.product(*edges)]
        return grid, [len(each) for each in edges]
