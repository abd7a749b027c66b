"""Where stages begin, of blocks one behind the other: the slowest stage is as fast as can be, in what ranks may hold.

By dynamic programming over stages and blocks. The time of the slowest stage is sought by halves among those that
stretches of blocks have; of splits that are as fast, the one that sends least is taken.
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
"""So many ways to fill ranks are followed up to one place, where ranks have several stages: then it may be that a
better split is not found. Where each has one there is one way, and the split is the best."""


class Held(NamedTuple):
    """Bytes that stay while a rank has iterations under way, and bytes that there are in passing beside them."""

    stays: float = 0.0
    passes: float = 0.0

    def __add__(self, other: object) -> Held:
        """What a rank holds that has both."""
        assert isinstance(other, Held)
        return Held(self.stays + other.stays, max(self.passes, other.passes))


@dataclass(frozen=True)
class Room:
    """What ranks may hold, and what stages would.

    Args:
        homes: the rank of each stage.
        budgets: the bytes that each rank may hold.
        held: what a stage holds on its rank that has the blocks from one on and before another.
    """

    homes: Sequence[int]
    budgets: Sequence[float]
    held: Callable[[int, int, int], Held]

    def of(self, firsts: Sequence[int], blocks: int) -> list[float]:
        """The bytes that each rank holds, of stages that begin so."""
        found = [Held() for _ in self.budgets]
        for stage, (first, end) in enumerate(zip(firsts, [*firsts[1:], blocks], strict=True)):
            found[self.homes[stage]] += self.held(stage, first, end)
        return [sum(each) for each in found]


class Way(NamedTuple):
    """The first stages: what they send, what the ranks hold that get more of them, and where they begin."""

    sent: float
    held: tuple[tuple[int, Held], ...]
    firsts: tuple[int, ...]

    def is_worse(self, other: Way) -> bool:
        """Whether another one sends and holds no more."""
        return self.sent >= other.sent and all(
            a.stays >= b.stays and a.passes >= b.passes for (_, a), (_, b) in zip(self.held, other.held, strict=True)
        )


def best_split(
    costs: Sequence[float], count: int, sent: Sequence[float] = (), room: Room | None = None
) -> list[int] | None:
    """Where each of so many stages begins; None where no split fits into ``room``.

    Args:
        costs: the time of each block; a stage takes the sum of its blocks'.
        count: how many stages there are.
        sent: what is sent in an iteration if a stage begins at a block.
        room: what ranks may hold; None: anything.

    Example::

        best_cut([1, 1, 1, 3], 2)    # [0, 3]
    """
    sums = [0.0, *accumulate(costs)]
    room = replace(room, held=cache(room.held)) if room is not None else None
    line = _Line(sums, sent or [0.0] * len(costs), count, room)
    times = sorted({b - a for place, a in enumerate(sums) for b in sums[place + 1 :]})
    low = bisect_left(times, max(sums[-1] / count * (1 - 1e-9), *costs))
    high, step, found = low, 1, line.within(times[low])
    while found is None and high < len(times) - 1:  # long stretches are many: they are tried last
        low, high, step = high + 1, min(high + step, len(times) - 1), 2 * step
        found = line.within(times[high])
    while found and low < high:
        middle = (low + high) // 2
        other = line.within(times[middle])
        found, low, high = (other, low, middle) if other else (found, middle + 1, high)
    return list(found.firsts) if found else None


def roomiest_split(costs: Sequence[float], count: int, room: Room) -> tuple[list[int], float]:
    """The split of which the fullest rank holds least beyond its budget (or most below it), and so many bytes; to
    within
    a thousandth of what may be."""
    room = replace(room, held=cache(room.held))
    sums = [0.0, *accumulate(costs)]
    low, high, found = -max(room.budgets), float(sum(room.of([0, *range(1, count)], len(costs)))), None
    high += room.of([0, *range(len(costs) - count + 1, len(costs))], len(costs))[room.homes[0]]
    near = max(1.0, (high - low) / 1e3)
    while high - low > near:
        middle = (low + high) / 2
        wider = replace(room, budgets=[budget + middle for budget in room.budgets])
        way = _Line(sums, [0.0] * len(costs), count, wider).within(inf)
        found, low, high = (way, low, middle) if way else (found, middle, high)
    assert found is not None
    beyond = max(held - budget for held, budget in zip(room.of(found.firsts, len(costs)), room.budgets, strict=True))
    return list(found.firsts), beyond


@dataclass(frozen=True)
class _Line:
    """Blocks one behind the other, by the sums of their costs."""

    sums: Sequence[float]
    sent: Sequence[float]
    count: int
    room: Room | None

    def within(self, seconds: float) -> Way | None:
        """The split that sends least, of those whose stages take no longer."""
        blocks = len(self.sums) - 1
        row: dict[int, list[Way]] = {0: [Way(0.0, (), ())]}
        for stage in range(self.count):
            made: dict[int, list[Way]] = {}
            for first, ways in row.items():
                least = first + 1 if stage < self.count - 1 else blocks
                for end in range(least, blocks - (self.count - stage - 1) + 1):
                    if self.sums[end] - self.sums[first] > seconds or self._is_too_much(stage, first, end):
                        break
                    if self.sums[-1] - self.sums[end] > seconds * (self.count - stage - 1) * (1 + 1e-9):
                        continue  # the others would have too much to do
                    longer = [each for way in ways if (each := self._longer(way, stage, first, end))]
                    if longer:
                        made.setdefault(end, []).extend(longer)
            row = {end: best(ways) for end, ways in made.items()}
        return min(row.get(blocks, ()), key=lambda way: way.sent, default=None)

    def _is_too_much(self, stage: int, first: int, end: int) -> bool:
        room = self.room
        return room is not None and sum(room.held(stage, first, end)) > room.budgets[room.homes[stage]]

    def _longer(self, way: Way, stage: int, first: int, end: int) -> Way | None:
        """A way with one stage more, if it fits."""
        sent, firsts = way.sent + (self.sent[first] if first else 0.0), (*way.firsts, first)
        if self.room is None:
            return Way(sent, (), firsts)
        home, held = self.room.homes[stage], dict(way.held)
        mine = held.pop(home, Held()) + self.room.held(stage, first, end)
        if sum(mine) > self.room.budgets[home]:
            return None
        if home in self.room.homes[stage + 1 :]:
            held[home] = mine
        return Way(sent, tuple(sorted(held.items())), firsts)


def best(ways: Sequence[Way]) -> list[Way]:
    """Those of several ways to one place that may be the beginning of the best split, where they are not too many."""
    found: list[Way] = []
    for way in sorted(ways, key=lambda way: (way.sent, sum(held.stays for _, held in way.held))):
        if len(found) == WIDTH:
            break
        if not any(way.is_worse(other) for other in found):
            found.append(way)
    return found
