"""The cheapest choice of what to keep and what to make again within a budget: a mixed integer program, by HiGHS.

Of ``K`` stretches alike the first ``R[g]`` make group ``g`` again, and the last ones, which the backward needs first,
keep it. So a kind of stretches costs one number for each of its groups, however many there are of it:

    least   sum of seconds[g] R[g] + away[g] A[g]
    where   R[g] + kept[g] >= R[user]          who is made again of g has it: it is made again too, or was kept for that
            held[t] - sum of nbytes[g] (p - m[g, p]) + sum of extra[g] kept[g] <= budget           at each moment t
            m[g, p] >= p - R[g] - A[g], m >= 0        of the p stretches that wait at t so many keep g on the device
            R[g] + A[g] <= K                   the next A[g] stretches put it away, where that may be

A choice is linear in it, for what waits is convex. All but the peak are whole numbers: ``kept`` and ``m`` are so by
themselves, and said to be, else HiGHS repairs what it rounded, and prints that it does. (After Jain et al., Checkmate,
2020; over folded stretches.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from .stretches import Group, Kind

SECONDS = 20.0
"""So long the solver may take; the best that it has found by then is taken."""
UNIT = 1e6
"""Bytes count in megabytes, seconds in microseconds: solvers want numbers of a size."""
ROUNDING = 1e-6
"""So many megabytes are not counted: a byte."""
LEAST = 1e-9
"""Seconds of what takes none: nothing is made again for nothing."""
Waiting = tuple[int, ...]
"""Of each kind how many stretches wait for their backward."""


@dataclass(frozen=True)
class Choice:
    """How many of the stretches make each group again (the first ones), and how many behind them keep it for others
    that are made again; what it costs, and how far from the best it may be. ``away``: how many behind the first ones
    put it away."""

    again: dict[Group, int]
    kept: dict[Group, int]
    seconds: float
    gap: float
    away: dict[Group, int] = field(default_factory=dict)


def cheapest(kinds: Sequence[Kind], moments: Mapping[Waiting, int], budget: int) -> Choice | None:
    """The cheapest choice that holds at most ``budget`` bytes at each moment; None: there is none."""
    problem = _Problem(kinds, moments)
    problem.upper[problem.peak] = budget / UNIT
    cost = [0.0] * len(problem.upper)
    for kind in kinds:
        for group in kind.groups:
            cost[problem.number["R", group, 0]] = max(group.seconds, LEAST) * UNIT
            if ("A", group, 0) in problem.number:
                cost[problem.number["A", group, 0]] = max(group.away, LEAST) * UNIT
    found = problem.solved(cost)
    if found.x is None:
        return None
    named = {(name, group): round(found.x[i]) for (name, group, _), i in problem.number.items()}
    again = {group: count for (name, group), count in named.items() if name == "R"}
    kept = {group: count for (name, group), count in named.items() if name == "kept"}
    away = {group: count for (name, group), count in named.items() if name == "A"}
    seconds = sum(group.seconds * count for group, count in again.items())
    seconds += sum(group.away * count for group, count in away.items())
    return Choice(again, kept, seconds, float(found.mip_gap or 0.0), away)


def least_peak(kinds: Sequence[Kind], moments: Mapping[Waiting, int]) -> int:
    """The bytes that the choice holds which holds least."""
    problem = _Problem(kinds, moments)
    cost = [0.0] * len(problem.upper)
    cost[problem.peak] = 1
    return round((float(problem.solved(cost).x[problem.peak]) + ROUNDING) * UNIT)


class _Problem:
    """The variables and the rows of the program; ``peak`` is the variable of what is held at most."""

    def __init__(self, kinds: Sequence[Kind], moments: Mapping[Waiting, int]) -> None:
        self.number: dict[tuple[str, Group, int], int] = {}
        self.upper: list[float] = [inf]
        self.whole: list[int] = [0]
        self.peak = 0
        self._rows: list[dict[int, float]] = []
        self._least: list[float] = []
        for kind in kinds:
            self._kind(kind, len(kind.stretches))
        for waiting, held in moments.items():
            self._moment(kinds, waiting, held)

    def _variable(self, name: str, group: Group, most: float, at: int = 0) -> int:
        key = name, group, at
        if key not in self.number:
            self.number[key] = len(self.upper)
            self.upper.append(most)
            self.whole.append(1)
        return self.number[key]

    def _row(self, row: dict[int, float], least: float) -> None:
        self._rows.append(row)
        self._least.append(least)

    def _kind(self, kind: Kind, count: int) -> None:
        for group in kind.groups:
            again, kept = self._variable("R", group, count), self._variable("kept", group, count)
            if group.nbytes and group.away < inf:
                self._row({again: -1, self._variable("A", group, count): -1}, -count)
            for user in group.users:
                self._row({again: 1, kept: 1, self._variable("R", user, count): -1}, 0)

    def _moment(self, kinds: Sequence[Kind], waiting: Waiting, held: int) -> None:
        row: dict[int, float] = {self.peak: 1}
        least = held / UNIT
        for kind, p in zip(kinds, waiting, strict=True):
            for group in kind.groups if p else ():
                count = len(kind.stretches)
                if group.users:
                    row[self._variable("kept", group, count)] = -group.extra / UNIT
                fresh = ("m", group, p) not in self.number
                stays = self._variable("m", group, p, p)
                if fresh:
                    gone = {self.number[name, group, 0]: 1.0 for name in "RA" if (name, group, 0) in self.number}
                    self._row({stays: 1, **gone}, p)
                row[stays] = -group.nbytes / UNIT
                least -= group.nbytes / UNIT * p
        self._row(row, least)

    def solved(self, cost: Sequence[float]) -> Any:
        """What the solver finds, for the cost of each variable."""
        from scipy.optimize import Bounds, LinearConstraint, milp  # which takes a second to import
        from scipy.sparse import csr_array

        entries = [(i, column, value) for i, row in enumerate(self._rows) for column, value in row.items()]
        rows, columns, values = zip(*entries, strict=True)
        matrix = csr_array((values, (rows, columns)), shape=(len(self._rows), len(self.upper)))
        return milp(
            cost,
            integrality=self.whole,
            bounds=Bounds(0, self.upper),
            constraints=LinearConstraint(matrix, [least - ROUNDING for least in self._least], inf),
            options={"time_limit": SECONDS, "mip_rel_gap": 1e-4},
        )
