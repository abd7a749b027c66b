"""Runs of equally spaced numbers: what element numbers are made of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BITS = 40
"""The upper bits of a number say of which source it is an element, the lower ones which element."""
Loops = tuple[tuple[int, int], ...]


class Irregular(RuntimeError):
    """A large pattern that is not made of few loops."""


@dataclass(frozen=True, slots=True)
class StridedRun:
    """The numbers ``base + sum(i * stride)`` for i in nested loops (count, stride), outermost first, in normal form."""

    base: int
    loops: Loops = ()

    @property
    def numel(self) -> int:
        """How many numbers."""
        return math.prod(count for count, _ in self.loops)

    @property
    def source(self) -> int:
        """The number of the value whose elements these are; the low bits say which element."""
        return self.base >> BITS

    def of(self, source: int) -> StridedRun:
        """The same elements of another value."""
        return StridedRun(self.base + ((source - self.source) << BITS), self.loops)


def make_run(base: int, loops: Iterable[tuple[int, int]]) -> StridedRun:
    """In normal form: no loop of one, and no two loops that are one."""
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
    given = list(runs)
    while True:
        found: list[StridedRun] = []
        for run in given:
            both = _both(found[-1], run) if found else None
            if both is None:
                found.append(run)
            else:
                found[-1] = both
        if len(found) == len(given):
            return tuple(found)
        given = found


def _both(a: StridedRun, b: StridedRun) -> StridedRun | None:
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


def sharding_run(run: StridedRun, start: int, stop: int) -> list[StridedRun]:
    """The numbers from ``start`` to ``stop`` of a run."""
    if start >= stop:
        return []
    if start == 0 and stop == run.numel:
        return [run]
    (_, stride), inner = run.loops[0], run.loops[1:]
    size = math.prod(count for count, _ in inner)
    (first, head), (last, tail) = divmod(start, size), divmod(stop, size)
    if first == last:
        return sharding_run(StridedRun(run.base + first * stride, inner), head, tail)
    found = []
    if head:
        found += sharding_run(StridedRun(run.base + first * stride, inner), head, size)
        first += 1
    if last > first:
        found.append(make_run(run.base + first * stride, ((last - first, stride), *inner)))
    if tail:
        found += sharding_run(StridedRun(run.base + last * stride, inner), 0, tail)
    return found


def sharding_runs(runs: Sequence[StridedRun], start: int, stop: int) -> list[StridedRun]:
    """The numbers from ``start`` to ``stop`` of several runs, one behind the other."""
    found, at = [], 0
    for run in runs:
        size = run.numel
        if at + size > start and at < stop:
            found += sharding_run(run, max(start - at, 0), min(stop - at, size))
        at += size
        if at >= stop:
            break
    return found


def dealt(runs: Sequence[StridedRun], sizes: Iterable[int]) -> list[list[StridedRun]]:
    """The numbers of several runs, one behind the other, as pieces of these sizes: in one walk."""
    pieces: list[list[StridedRun]] = []
    left = list(reversed(runs))
    for size in sizes:
        piece: list[StridedRun] = []
        while size > 0:
            run = left.pop()
            taken = min(size, run.numel)
            piece += sharding_run(run, 0, taken)
            left += reversed(sharding_run(run, taken, run.numel))
            size -= taken
        pieces.append(piece)
    return pieces


def by_dim(run: StridedRun, shape: Sequence[int]) -> list[Loops] | None:
    """The loops of a run that make up each dim; None where a dim ends within a loop."""
    left = list(run.loops)
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
