"""Numbered elements, in the size of their pattern: what :mod:`.numbering` executes communication and packing on.

A tensor of numbers is its shape and, in row-major order, the *runs* that its elements are: nests of loops

    [[0, 1, 2], [8, 9, 10]]  ->  StridedRun(0, ((2, 8), (3, 1)))  from 0, twice in steps of 8, three times in steps of 1

so that a box of a value of a billion elements is one run, reshaping does nothing, and sharding, joining and transposing
are done on loops. :class:`Elements` has the methods of a tensor that the functions of :mod:`shardfx.ir.ops.pack` use,
and these run on it as they are. Small patterns that are no loops are written out, element by element; large ones are
refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from .strided_runs import BITS, Irregular, StridedRun, by_dim, dealt, joined, make_run, sharding_run, sharding_runs

WRITTEN_OUT = 1 << 22
"""Irregular patterns of up to so many elements are written out."""
ROWS = 1 << 12
"""Up to so many rows are joined one by one."""


@dataclass(frozen=True, eq=False)
class Elements:
    """A tensor of numbers."""

    shape: tuple[int, ...]
    runs: tuple[StridedRun, ...]

    @staticmethod
    def of(shape: Sequence[int], base: int, loops: Iterable[tuple[int, int]]) -> Elements:
        """A tensor that is one run."""
        empty = math.prod(shape) == 0
        return Elements(tuple(shape), () if empty else (make_run(base, loops),))

    def dim(self) -> int:
        """How many dims, as a method: what moves tensors asks so."""
        return len(self.shape)

    def numel(self) -> int:
        """How many numbers, as a method."""
        return math.prod(self.shape)

    def equals(self, other: Elements) -> bool:
        """Whether both hold the same numbers in the same shape."""
        return self.met(other, lambda a, b: a if a == b else None) is not None

    def met(self, other: Elements, meet: Callable[[int, int], int | None]) -> Elements | None:
        """What both hold: equal places in one shape, of the source that ``meet`` makes of the two sources.

        None where places differ, or where ``meet`` gives no source.
        """
        if self is other or (self.shape == other.shape and self.runs == other.runs):
            return self
        if self.shape != other.shape:
            return None
        mine, theirs, found = list(reversed(self.runs)), list(reversed(other.runs)), list[StridedRun]()
        while mine and theirs:
            a, b = mine.pop(), theirs.pop()
            source, size = meet(a.source, b.source), min(a.numel, b.numel)
            if source is None:
                return None
            heads = [[head.of(source) for head in sharding_run(run, 0, size)] for run in (a, b)]
            if joined(heads[0]) != joined(heads[1]) and not _written_equal(*heads):
                return None
            found += heads[0]
            mine += reversed(sharding_run(a, size, a.numel))
            theirs += reversed(sharding_run(b, size, b.numel))
        return None if mine or theirs else Elements(self.shape, joined(found))

    # ---- what a tensor can do ---------------------------------------------------------------------------------

    def contiguous(self) -> Elements:
        """Itself: numbers have no memory."""
        return self

    def reshape(self, *shape: Any) -> Elements:
        """The same numbers, row by row, in another shape; one size may be -1."""
        wanted = list(shape[0] if len(shape) == 1 and isinstance(shape[0], (list, tuple)) else shape)
        if wanted.count(-1) == 1:
            known = -math.prod(wanted)
            if known == 0 or self.numel() % known:
                raise RuntimeError(f"shape {wanted} is invalid for {self.numel()} elements")
            wanted[wanted.index(-1)] = self.numel() // known
        if any(size < 0 for size in wanted) or math.prod(wanted) != self.numel():
            raise RuntimeError(f"shape {wanted} is invalid for {self.numel()} elements")
        return Elements(tuple(wanted), self.runs)

    view = reshape

    def new_zeros(self, shape: Sequence[int]) -> Elements:
        """Padding of this shape: 0 is the number of no element."""
        return Elements.of(shape, 0, ((math.prod(shape), 0),))

    def permute(self, dims: Sequence[int]) -> Elements:
        """The dims in another order."""
        order = [self._dim(d) for d in dims]
        if sorted(order) != list(range(self.dim())):
            raise RuntimeError(f"permute({list(dims)}) of {self.dim()} dims")
        shape = tuple(self.shape[d] for d in order)
        if not self.runs or [d for d in order if self.shape[d] > 1] == [d for d, n in enumerate(self.shape) if n > 1]:
            return Elements(shape, self.runs)
        if len(self.runs) == 1:
            loops = by_dim(self.runs[0], self.shape)
            if loops is not None:
                return Elements.of(shape, self.runs[0].base, (loop for d in order for loop in loops[d]))
        row = self.numel() // self.shape[0]
        if len(self.runs) > 1 and all(run.numel % row == 0 for run in self.runs):
            blocks = [Elements((run.numel // row, *self.shape[1:]), (run,)) for run in self.runs]
            return cat([block.permute(order) for block in blocks], order.index(0))
        return self._written(lambda t: t.permute(order))

    def movedim(self, source: int, target: int) -> Elements:
        """One dim at another place, the others in their order."""
        source, target = self._dim(source), self._dim(target)
        order = [d for d in range(self.dim()) if d != source]
        order.insert(target, source)
        return self.permute(order)

    def narrow(self, dim: int, start: int, length: int) -> Elements:
        """``length`` rows of a dim, from ``start``. Past the end is a RuntimeError, as with tensors."""
        dim = self._dim(dim)
        if not 0 <= start <= start + length <= self.shape[dim]:
            raise RuntimeError(f"{start} + {length} is outside of a dim of {self.shape[dim]}")
        if length == self.shape[dim]:
            return self
        return self.split((start, length, self.shape[dim] - start - length), dim)[1]

    def split(self, sizes: int | Sequence[int], dim: int = 0) -> list[Elements]:
        """Pieces of a dim: of the sizes given, or of one size, the last then smaller."""
        dim = self._dim(dim)
        whole = self.shape[dim]
        if isinstance(sizes, int):
            sizes = [min(sizes, whole - at) for at in range(0, whole, sizes)] or [0]
        if sum(sizes) != whole:
            raise RuntimeError(f"{list(sizes)} does not split a dim of {whole}")
        outer = math.prod(self.shape[:dim])
        if dim and outer * len(sizes) > ROWS:
            return [piece.movedim(0, dim) for piece in self.movedim(dim, 0).split(sizes)]
        inner = math.prod(self.shape[dim + 1 :])
        pieces = dealt(self.runs, [size * inner for _ in range(outer) for size in sizes])
        return [
            Elements((*self.shape[:dim], size, *self.shape[dim + 1 :]), joined(chain(*pieces[i :: len(sizes)])))
            for i, size in enumerate(sizes)
        ]

    def chunk(self, pieces: int) -> list[Elements]:
        """At most so many pieces of dim 0, as ``torch.chunk`` shards it."""
        return self.split(-(-self.shape[0] // pieces))

    def __getitem__(self, rows: slice) -> Elements:
        start, stop, step = rows.indices(self.shape[0])
        if step != 1:
            raise RuntimeError(f"{rows} has a step")
        return self.narrow(0, start, max(stop - start, 0))

    def _dim(self, dim: int) -> int:
        if not -self.dim() <= dim < self.dim():
            raise IndexError(f"no dim {dim} of {self.dim()}")
        return dim % self.dim()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not torch.cat:
            raise TypeError(f"{func} is not known to move elements only")
        return cat(*args, **(kwargs or {}))

    def slice(self, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Elements:
        """Rows of a dim, as ``aten.slice`` takes them."""
        return self.movedim(dim, 0)[slice(start, end, step)].movedim(0, dim)

    def transpose(self, a: int, b: int) -> Elements:
        """Two dims exchanged."""
        order = list(range(self.dim()))
        order[a], order[b] = order[b], order[a]
        return self.permute(order)

    def t(self) -> Elements:
        """A matrix transposed; a vector as it is."""
        return self.permute(list(range(self.dim()))[::-1])

    def select(self, dim: int, index: int) -> Elements:
        """One row of a dim, without the dim. Past the end is an IndexError, as with tensors."""
        dim = self._dim(dim)
        if not -self.shape[dim] <= index < self.shape[dim]:
            raise IndexError(f"no row {index} of a dim of {self.shape[dim]}")
        return self.narrow(dim, index % self.shape[dim], 1).squeeze(dim)

    def unsqueeze(self, dim: int) -> Elements:
        """With a dim of one before dim ``dim``."""
        at = dim if dim >= 0 else dim + self.dim() + 1
        return self.reshape([*self.shape[:at], 1, *self.shape[at:]])

    def squeeze(self, dim: int) -> Elements:
        """Without dim ``dim`` if that has size one."""
        dim = self._dim(dim)
        return self.reshape([n for d, n in enumerate(self.shape) if d != dim or n != 1])

    # ---- element by element -----------------------------------------------------------------------------------

    def written_out(self) -> torch.Tensor:
        """The numbers themselves."""
        if self.numel() > WRITTEN_OUT:
            raise Irregular(f"a pattern of {self.numel()} elements is too irregular to be followed")
        return torch.cat([torch.empty(0, dtype=torch.int64), *map(_write, self.runs)]).reshape(self.shape)

    def _written(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Elements:
        return read(move(self.written_out()))


def _write(run: StridedRun) -> torch.Tensor:
    found = torch.tensor([run.base])
    for count, stride in run.loops:
        found = (found[:, None] + torch.arange(count)[None, :] * stride).flatten()
    return found


def _written_equal(a: Sequence[StridedRun], b: Sequence[StridedRun]) -> bool:
    size = sum(run.numel for run in a)
    return size <= WRITTEN_OUT and torch.equal(torch.cat([*map(_write, a)]), torch.cat([*map(_write, b)]))


def read(numbers: torch.Tensor) -> Elements:
    """Numbers that are written out, as runs again: in as few as are found, within rows or beyond them."""
    flat, size = numbers.flatten(), numbers.shape[-1] if numbers.dim() else 1
    if not flat.numel():
        return Elements(tuple(numbers.shape), ())
    step = flat[1:] - flat[:-1]
    same = (flat[1:] >> BITS) == (flat[:-1] >> BITS)
    found = _runs(flat, step, same)
    if len(found) > 1 and 1 < size < flat.numel():
        by_rows = same.clone()
        by_rows[size - 1 :: size] = False
        found = min(found, _runs(flat, step, by_rows), key=len)
    return Elements(tuple(numbers.shape), found)


def _runs(flat: torch.Tensor, step: torch.Tensor, same: torch.Tensor) -> tuple[StridedRun, ...]:
    """Numbers by the steps between them, which are steps within a run only where ``same`` says so."""
    ends = torch.nonzero((step[1:] != step[:-1]) | ~same[1:] | ~same[:-1]).flatten().add(1).tolist()
    runs, at, values, steps, alike = [], 0, flat.tolist(), step.tolist(), same.tolist()
    ends.append(len(steps))
    next_end = iter(ends)
    end = next(next_end)
    while at < len(values):
        while end <= at and end < len(steps):
            end = next(next_end)
        last = end if at < len(steps) and alike[at] else at
        runs.append(make_run(values[at], ((last - at + 1, steps[at] if last > at else 0),)))
        at = last + 1
    return joined(runs)


def cat(tensors: Sequence[Elements], dim: int = 0) -> Elements:
    """The tensors joined along a dim."""
    first = tensors[0]
    dim = first._dim(dim)
    rest = first.shape[:dim], first.shape[dim + 1 :]
    if any((t.shape[:dim], t.shape[dim + 1 :]) != rest or t.dim() != first.dim() for t in tensors):
        raise RuntimeError(f"tensors of shapes {[t.shape for t in tensors]} cannot be joined along dim {dim}")
    shape = (*rest[0], sum(t.shape[dim] for t in tensors), *rest[1])
    outer = math.prod(rest[0])
    if outer == 1:
        return Elements(shape, joined(run for t in tensors for run in t.runs))
    if outer * len(tensors) <= ROWS:
        rows = [(t, t.numel() // outer) for t in tensors if t.numel()]
        pieces = (r for i in range(outer) for t, n in rows for r in sharding_runs(t.runs, i * n, (i + 1) * n))
        return Elements(shape, joined(pieces))
    front = Elements((shape[dim], *rest[0], *rest[1]), joined(run for t in tensors for run in t.movedim(dim, 0).runs))
    if len(front.runs) == 1:
        return front.movedim(0, dim)
    return read(torch.cat([t.written_out() for t in tensors], dim))
