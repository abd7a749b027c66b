"""Tensors of element numbers, as compact strided patterns, on which :mod:`.numbering` executes data movement.

A tensor of numbers is its shape and, in row-major order, the *runs* that its elements are: nests of loops

    [[0, 1, 2], [8, 9, 10]]  ->  StridedRun(0, ((2, 8), (3, 1)))  from 0, twice in steps of 8, three times in steps of 1

so that a box of a value of a billion elements is one run, reshaping does nothing, and slicing, joining and transposing
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

BITS = 40
"""The number of low bits, which are the element's index; the bits above are its source."""
WRITTEN_OUT = 1 << 22
"""The most elements of an irregular pattern that is written out."""
ROWS = 1 << 12
"""The most rows that are joined one by one."""
Loops = tuple[tuple[int, int], ...]


class IrregularPattern(RuntimeError):
    """A large pattern that is not made of few loops."""


@dataclass(frozen=True, slots=True)
class StridedRun:
    """The numbers ``base + sum(i * stride)`` for i in nested loops (count, stride), outermost first, in normal form."""

    base: int
    loops: Loops = ()

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(count for count, _ in self.loops)

    @property
    def source(self) -> int:
        """The number of the value whose elements these are."""
        return self.base >> BITS

    def of(self, source: int) -> StridedRun:
        """The same elements of another value."""
        return StridedRun(self.base + ((source - self.source) << BITS), self.loops)

    def sliced(self, start: int, stop: int) -> list[StridedRun]:
        """The numbers from ``start`` to ``stop``."""
        if start >= stop:
            return []
        if start == 0 and stop == self.numel:
            return [self]
        (_, stride), inner = self.loops[0], self.loops[1:]
        size = math.prod(count for count, _ in inner)
        (first, head), (last, tail) = divmod(start, size), divmod(stop, size)
        if first == last:
            return StridedRun(self.base + first * stride, inner).sliced(head, tail)
        found = []
        if head:
            found += StridedRun(self.base + first * stride, inner).sliced(head, size)
            first += 1
        if last > first:
            found.append(make_run(self.base + first * stride, ((last - first, stride), *inner)))
        return found + StridedRun(self.base + last * stride, inner).sliced(0, tail)

    def by_dim(self, shape: Sequence[int]) -> list[Loops] | None:
        """The loops that make up each dim of a shape; None where a dim ends within a loop."""
        left = list(self.loops)
        found: list[Loops] = []
        for size in reversed(shape):
            mine: list[tuple[int, int]] = []
            while size > 1:
                count, stride = left.pop()
                if size % count == 0:
                    mine.append((count, stride))
                    size //= count
                elif count % size == 0:
                    mine.append((size, stride))
                    left.append((count // size, stride * size))
                    size = 1
                else:
                    return None
            found.append(tuple(reversed(mine)))
        return found[::-1]

    def written_out(self) -> torch.Tensor:
        """The numbers themselves."""
        found = torch.tensor([self.base])
        for count, stride in self.loops:
            found = (found[:, None] + torch.arange(count)[None, :] * stride).flatten()
        return found


def make_run(base: int, loops: Iterable[tuple[int, int]]) -> StridedRun:
    """A run in normal form: no loop of one, and no two loops that are one."""
    made: list[tuple[int, int]] = []
    for count, stride in loops:
        if count == 1:
            continue
        if made and made[-1][1] == count * stride:
            made[-1] = (made[-1][0] * count, stride)
        else:
            made.append((count, stride))
    return StridedRun(base, tuple(made))


def joined(runs: Iterable[StridedRun]) -> tuple[StridedRun, ...]:
    """The same numbers in fewer runs. A run has one source only."""
    remaining = list(runs)
    while True:
        found: list[StridedRun] = []
        for run in remaining:
            both = _both(found[-1], run) if found else None
            if both is None:
                found.append(run)
            else:
                found[-1] = both
        if len(found) == len(remaining):
            return tuple(found)
        remaining = found


def _both(a: StridedRun, b: StridedRun) -> StridedRun | None:
    """Two runs as one: iterations of an outermost loop that both have, or that one is a further iteration of."""
    if a.source != b.source:
        return None
    step = b.base - a.base
    if a.loops == b.loops:
        return make_run(a.base, ((2, step), *a.loops))
    if a.loops and a.loops[1:] == b.loops and step == a.loops[0][0] * a.loops[0][1]:
        return make_run(a.base, ((a.loops[0][0] + 1, a.loops[0][1]), *b.loops))
    if a.loops and b.loops and a.loops[1:] == b.loops[1:] and a.loops[0][1] == b.loops[0][1]:
        count, stride = a.loops[0]
        if step == count * stride:
            return make_run(a.base, ((count + b.loops[0][0], stride), *a.loops[1:]))
    if b.loops and b.loops[1:] == a.loops and step == b.loops[0][1]:
        return make_run(a.base, ((b.loops[0][0] + 1, step), *a.loops))
    return None


def _take(left: list[StridedRun], size: int) -> list[StridedRun]:
    """The next ``size`` numbers of runs that are stacked, the next one last."""
    found: list[StridedRun] = []
    while size > 0:
        run = left.pop()
        count = min(size, run.numel)
        found += run.sliced(0, count)
        left += reversed(run.sliced(count, run.numel))
        size -= count
    return found


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
        """The number of dims, as a method, as data movement ops call it."""
        return len(self.shape)

    def numel(self) -> int:
        """The number of elements, as a method."""
        return math.prod(self.shape)

    def equals(self, other: Elements) -> bool:
        """Whether both hold the same numbers in the same shape."""
        return self.met(other, lambda a, b: a if a == b else None) is not None

    def met(self, other: Elements, meet: Callable[[int, int], int | None]) -> Elements | None:
        """The common elements of both: equal places in one shape, of the source that ``meet`` makes of the two sources.

        None where places differ, or where ``meet`` gives no source.
        """
        if self is other or (self.shape == other.shape and self.runs == other.runs):
            return self
        if self.shape != other.shape:
            return None
        both, found = [list(reversed(each.runs)) for each in (self, other)], list[StridedRun]()
        while all(both):
            source, size = meet(*(left[-1].source for left in both)), min(left[-1].numel for left in both)
            if source is None:
                return None
            heads = [[head.of(source) for head in _take(left, size)] for left in both]
            if joined(heads[0]) != joined(heads[1]) and not _written_equal(*heads):
                return None
            found += heads[0]
        return None if any(both) else Elements(self.shape, joined(found))

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
            loops = self.runs[0].by_dim(self.shape)
            if loops is not None:
                return Elements.of(shape, self.runs[0].base, (loop for d in order for loop in loops[d]))
        row = self.numel() // self.shape[0]
        if len(self.runs) > 1 and all(run.numel % row == 0 for run in self.runs):
            blocks = [Elements((run.numel // row, *self.shape[1:]), (run,)) for run in self.runs]
            return cat([block.permute(order) for block in blocks], order.index(0))
        return read(self.written_out().permute(order))

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
        """Parts of a dim: of the sizes given, or of one size, the last then smaller."""
        dim = self._dim(dim)
        length = self.shape[dim]
        if isinstance(sizes, int):
            sizes = [min(sizes, length - at) for at in range(0, length, sizes)] or [0]
        if sum(sizes) != length:
            raise RuntimeError(f"{list(sizes)} does not split a dim of {length}")
        outer = math.prod(self.shape[:dim])
        if dim and outer * len(sizes) > ROWS:
            return [part.movedim(0, dim) for part in self.movedim(dim, 0).split(sizes)]
        inner, left = math.prod(self.shape[dim + 1 :]), list(reversed(self.runs))
        parts = [_take(left, size * inner) for _ in range(outer) for size in sizes]
        return [
            Elements((*self.shape[:dim], size, *self.shape[dim + 1 :]), joined(chain(*parts[i :: len(sizes)])))
            for i, size in enumerate(sizes)
        ]

    def chunk(self, count: int) -> list[Elements]:
        """At most so many parts of dim 0, as of ``torch.chunk``."""
        return self.split(-(-self.shape[0] // count))

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
            raise IrregularPattern(f"a pattern of {self.numel()} elements is too irregular to be followed")
        return torch.cat([torch.empty(0, dtype=torch.int64), *(run.written_out() for run in self.runs)]).reshape(
            self.shape
        )


def _written_equal(a: Sequence[StridedRun], b: Sequence[StridedRun]) -> bool:
    small = a[0].base == b[0].base and sum(run.numel for run in a) <= WRITTEN_OUT
    return small and torch.equal(*(torch.cat([run.written_out() for run in each]) for each in (a, b)))


def read(numbers: torch.Tensor) -> Elements:
    """Numbers that are written out, as runs again: in as few as are found, within rows or beyond them."""
    flat, size = numbers.flatten(), numbers.shape[-1] if numbers.dim() else 1
    if not flat.numel():
        return Elements(tuple(numbers.shape), ())
    same = (flat[1:] >> BITS) == (flat[:-1] >> BITS)
    found = _runs(flat, same)
    if len(found) > 1 and 1 < size < flat.numel():
        by_rows = same.clone()
        by_rows[size - 1 :: size] = False
        found = min(found, _runs(flat, by_rows), key=len)
    return Elements(tuple(numbers.shape), found)


def _runs(flat: torch.Tensor, same: torch.Tensor) -> tuple[StridedRun, ...]:
    """Numbers by the steps between them, which are steps within a run only where ``same`` says so."""
    step = flat[1:] - flat[:-1]
    ends = torch.nonzero((step[1:] != step[:-1]) | ~same[1:] | ~same[:-1]).flatten().add(1).tolist()
    runs, at, values, steps, alike = [], 0, flat.tolist(), step.tolist(), same.tolist()
    left = [len(steps), *reversed(ends)]
    while at < len(values):
        while left[-1] <= at and len(left) > 1:
            left.pop()
        last = left[-1] if at < len(steps) and alike[at] else at
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
    if outer <= 1:
        return Elements(shape, joined(run for t in tensors for run in t.runs))
    if outer * len(tensors) <= ROWS:
        rows = [(list(reversed(t.runs)), t.numel() // outer) for t in tensors]
        return Elements(shape, joined(run for _ in range(outer) for left, n in rows for run in _take(left, n)))
    front = Elements((shape[dim], *rest[0], *rest[1]), joined(run for t in tensors for run in t.movedim(dim, 0).runs))
    if len(front.runs) == 1:
        return front.movedim(0, dim)
    return read(torch.cat([t.written_out() for t in tensors], dim))
