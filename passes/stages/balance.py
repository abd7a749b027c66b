"""Balanced split of consecutive blocks into stages: the slowest stage is as fast as possible, within memory budgets.

By dynamic programming over stages and blocks. The time of the slowest stage is found by bisection among those of
contiguous ranges of blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from math import inf
from typing import NamedTuple

WIDTH = 16
"""The beam width: partial splits kept per position, if ranks have several stages; the result may then not be
optimal. With one stage per rank there is one way, and the split is optimal."""


@dataclass(frozen=True)
class MemoryBudget:
    """Memory budgets of ranks, and the memory of stages.

    Args:
        homes: the rank of each stage.
        budgets: the bytes that each rank may hold.
        memory: the bytes of a stage on its rank, with the blocks from one on and before another.
    """

    homes: Sequence[int]
    budgets: Sequence[float]
    memory: Callable[[int, int, int], float]

    def of(self, firsts: Sequence[int], blocks: int) -> list[float]:
        """The bytes of each rank, for stages with these first blocks."""
        found = [0.0 for _ in self.budgets]
        for stage, (first, end) in enumerate(zip(firsts, [*firsts[1:], blocks], strict=True)):
            found[self.homes[stage]] += self.memory(stage, first, end)
        return found


class _Way(NamedTuple):
    """A split into the first stages: the memory of ranks that get more stages, and the first blocks."""

    memory: tuple[tuple[int, float], ...]
    firsts: tuple[int, ...]

    def is_worse(self, other: _Way) -> bool:
        """Whether another one stores no more."""
        pairs = zip(self.memory, other.memory, strict=True)
        return all(mine >= theirs for (_, mine), (_, theirs) in pairs)


def balanced_split(costs: Sequence[float], count: int, budget: MemoryBudget | None = None) -> list[int] | None:
    """The first block of each stage in the best split; None if no split fits into ``budget``.

    Args:
        costs: the time of each block; a stage takes the sum of its blocks'.
        count: how many stages there are.
        budget: what ranks may hold; None: anything.

    Example::

        balanced_split([1, 1, 1, 3], 2)    # [0, 3]
    """
    sums = [0.0, *accumulate(costs)]
    budget = replace(budget, memory=cache(budget.memory)) if budget is not None else None
    line = _Blocks(sums, count, budget)
    times = sorted({b - a for place, a in enumerate(sums) for b in sums[place + 1 :]})
    low = bisect_left(times, max(sums[-1] / count * (1 - 1e-9), *costs))
    high, step, found = low, 1, line.within(times[low])
    while found is None and high < len(times) - 1:  # long ranges are many: they are tried last
        low, high, step = high + 1, min(high + step, len(times) - 1), 2 * step
        found = line.within(times[high])
    while found and low < high:
        middle = (low + high) // 2
        other = line.within(times[middle])
        found, low, high = (other, low, middle) if other else (found, middle + 1, high)
    return list(found.firsts) if found else None


def smallest_split(costs: Sequence[float], count: int, budget: MemoryBudget) -> tuple[list[int], float]:
    """The split that minimizes the excess of the fullest rank over its budget (negative if it fits), and that excess in
    bytes; to within a thousandth of the range."""
    budget = replace(budget, memory=cache(budget.memory))
    sums, blocks = [0.0, *accumulate(costs)], len(costs)
    low, high, found = -max(budget.budgets), float(sum(budget.of([0, *range(1, count)], blocks))), None
    high += budget.of([0, *range(blocks - count + 1, blocks)], blocks)[budget.homes[0]]
    near = max(1.0, (high - low) / 1e3)
    while high - low > near:
        middle = (low + high) / 2
        wider = replace(budget, budgets=[each + middle for each in budget.budgets])
        way = _Blocks(sums, count, wider).within(inf)
        found, low, high = (way, low, middle) if way else (found, middle, high)
    assert found is not None
    used = budget.of(found.firsts, blocks)
    return list(found.firsts), max(mine - may for mine, may in zip(used, budget.budgets, strict=True))


@dataclass(frozen=True)
class _Blocks:
    """Consecutive blocks, by prefix sums of their costs."""

    sums: Sequence[float]
    count: int
    budget: MemoryBudget | None

    def within(self, seconds: float) -> _Way | None:
        """A split whose stages take no longer, if there is one."""
        blocks = len(self.sums) - 1
        row: dict[int, list[_Way]] = {0: [_Way((), ())]}
        for stage in range(self.count):
            made: dict[int, list[_Way]] = {}
            left = self.count - stage - 1
            for first, ways in row.items():
                for end in range(first + 1 if left else blocks, blocks - left + 1):
                    if self.sums[end] - self.sums[first] > seconds or not self._fits(stage, first, end):
                        break
                    if self.sums[-1] - self.sums[end] > seconds * left * (1 + 1e-9):
                        continue  # the others would have too much to do
                    longer = [each for way in ways if (each := self._longer(way, stage, first, end))]
                    if longer:
                        made.setdefault(end, []).extend(longer)
            row = {end: _best(ways) for end, ways in made.items()}
        return next(iter(row.get(blocks, ())), None)

    def _fits(self, stage: int, first: int, end: int) -> bool:
        budget = self.budget
        return budget is None or budget.memory(stage, first, end) <= budget.budgets[budget.homes[stage]]

    def _longer(self, way: _Way, stage: int, first: int, end: int) -> _Way | None:
        """A way with one stage more, if it fits."""
        firsts = *way.firsts, first
        if self.budget is None:
            return _Way((), firsts)
        home, memory = self.budget.homes[stage], dict(way.memory)
        mine = memory.pop(home, 0.0) + self.budget.memory(stage, first, end)
        if mine > self.budget.budgets[home]:
            return None
        if home in self.budget.homes[stage + 1 :]:
            memory[home] = mine
        return _Way(tuple(sorted(memory.items())), firsts)


def _best(ways: Sequence[_Way]) -> list[_Way]:
    """The partial splits that may start the best split, at most ``WIDTH``."""
    found: list[_Way] = []
    for way in sorted(ways, key=lambda way: sum(memory for _, memory in way.memory)):
        if len(found) < WIDTH and not any(way.is_worse(other) for other in found):
            found.append(way)
    return found
