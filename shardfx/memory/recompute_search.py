"""``Hints(recompute="auto", memory=...)``: the cheapest activations to recompute or offload so that a plan fits.

The plan that keeps everything tells the live bytes at each moment (:mod:`.recompute_segments`). What to recompute is
then chosen by a mixed integer program, solved by HiGHS, and written as a few passes ``recompute{...}`` (and
``offload{...}`` with ``offload=("activations",)``). The resulting plan is replayed like any other; bytes beyond the
prediction are subtracted from the budget. Of ``K`` equal segments the first ``R[g]`` recompute group ``g``, and the
last ones, which the backward needs first, keep it, so a kind of segments costs one variable per group:

    minimize    sum of seconds[g] R[g] + away[g] A[g]
    subject to  R[g] + kept[g] >= R[user]      a recomputed user of g has it: g is recomputed too, or kept for that
                live[t] - sum of nbytes[g] (p - m[g, p]) + sum of extra[g] kept[g] <= budget       at each moment t
                m[g, p] >= p - R[g] - A[g], m >= 0     of the p segments live at t so many keep g on the device
                R[g] + A[g] <= K               the next A[g] segments offload it, where that is possible

All but the peak are integers: ``kept`` and ``m`` are so by themselves, and declared so, else HiGHS repairs what it
rounded, and prints that it does. (After Jain et al., Checkmate, 2020; over folded segments.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any

from shardfx.compile import offloads
from shardfx.compiled import Compiled
from shardfx.hints import bytes_of
from shardfx.ir.cost.machine import Machine
from shardfx.ir.errors import Error
from shardfx.ir.graph import Phase
from shardfx.ir.names import prefixes
from shardfx.ir.text.printer import size_text
from shardfx.memory.budget import Candidate, MemoryPredictor, repeated_modules, what_fits
from shardfx.memory.recompute_segments import OpGroup, SegmentedStep, SegmentKind, runs, segmentations
from shardfx.passes import Offload, Recompute
from shardfx.passes.memory.offload import ACTIVATIONS

TOGETHER = (2, 4, 8)
"""The numbers of consecutive modules that are recomputed as one segment, as a last resort."""
TRIES = 4
"""The number of corrections of the budget by a plan's replayed peak."""


def fitted(compiled: Compiled, predictor: MemoryPredictor) -> Compiled:
    """The plan with enough recomputation to fit; the same plan, where none is asked for, or it fits already.

    Raises:
        Error: there is no budget; or no choice fits.
    """
    hints = compiled.hints
    if hints.recompute != "auto":
        return compiled
    if hints.memory is None:
        raise Error(
            "Hints(recompute='auto') is asked to make a plan fit, and not into what",
            where="Hints(recompute='auto')",
            expected="Hints(memory=...), the bytes that a rank may hold, such as '16GiB'",
            got="memory=None",
            remedy="say it; or name modules: Hints(recompute='layers.*')",
        )
    budget, memory = bytes_of(hints.memory), predictor.of(compiled)
    if memory.peak <= budget or not compiled.has_gradients:
        return compiled
    search = RecomputeSearch(compiled, predictor, budget)
    made = search.within(budget) or search.from_leanest() or search.joined() or search.wholesale()
    if made is None:
        raise Error(
            f"no choice of what is recomputed fits into Hints(memory={hints.memory!r})",
            where="Hints(recompute='auto')",
            expected=f"a budget of at least about {size_text(search.least)}",
            got=f"{size_text(budget)}, where a rank that keeps all holds {size_text(memory.peak)}",
            remedy=what_fits(compiled, predictor, budget),
        )
    longer = made.seconds / memory.seconds - 1
    away = any(isinstance(each, Offload) and ACTIVATIONS in each.whats for each in made.plan.passes)
    how = "recomputed or offloaded" if away else "recomputed"
    made.plan.after.notes.append(
        f"{how} to fit into {size_text(budget)}: {longer:.1%} more time in a step; "
        f"{search.said}; the rank holds {size_text(made.peak)}"
    )
    return made.plan


@dataclass
class RecomputeSearch:
    """The search for a plan that fits into a budget, from one that stores all activations.

    ``parts``: the modules of each segment, where they are several. ``said``: the quality of the last plan found;
    ``least``: the lowest peak of the plans tried.
    """

    compiled: Compiled
    predictor: MemoryPredictor
    budget: int
    parts: tuple[tuple[str, ...], ...] = ()
    said: str = ""
    least: int = 0

    @cached_property
    def course(self) -> SegmentedStep:
        """The segments that may be recomputed or offloaded."""
        hints = self.compiled.hints
        options = next((each for each in offloads(hints) if ACTIVATIONS in each.whats), None)
        memory, machine = self.predictor.of(self.compiled).memory, Machine.of(hints.machine)
        return SegmentedStep(memory, self.compiled.after, machine, options, self.parts)

    @cached_property
    def _moments(self) -> dict[tuple[int, ...], int]:
        return self.course.moments()

    def within(self, wanted: int) -> Candidate | None:
        """The cheapest choice that fits; bytes of its plan beyond the prediction are subtracted from ``wanted``."""
        for _ in range(TRIES):
            choice = cheapest(self.course.kinds, self._moments, wanted)
            if choice is None:
                return None
            made = self._chosen(choice)
            if made.peak <= self.budget:
                self.said = f"the cheapest choice is at most {choice.gap:.1%} cheaper"
                return made
            wanted -= made.peak - self.budget
        return None

    def from_leanest(self) -> Candidate | None:
        """The search for plans that need less than predicted, with the margin of the leanest one."""
        floor = least_peak(self.course.kinds, self._moments)
        choice = cheapest(self.course.kinds, self._moments, floor)
        leanest = self._chosen(choice) if choice is not None else None
        if leanest is None or leanest.peak > self.budget:
            return None
        self.said = "no cheaper choice was found"
        return self.within(self.budget + floor - leanest.peak) or leanest

    def joined(self) -> Candidate | None:
        """The search with longer segments, of consecutive modules: those first whose choice is cheapest."""
        choices = []
        for parts in segmentations(self.course):
            search = RecomputeSearch(self.compiled, self.predictor, self.budget, parts)
            kinds, moments = search.course.kinds, search._moments
            choice = cheapest(kinds, moments, self.budget)
            fit = (inf, least_peak(kinds, moments)) if choice is None else (choice.seconds, 0)
            choices.append((*fit, search))
        for seconds, _, search in sorted(choices, key=lambda each: each[:2]):
            made = search.within(self.budget) or search.from_leanest()
            self.said, self.least = search.said, min(self.least, search.least or self.least)
            if made is not None or seconds == inf:
                return made
        return None

    def wholesale(self) -> Candidate | None:
        """The fastest that fits, of those that recompute all segments, or all modules of a list, or those of the root,
        alone or several together; that offload all; or both."""
        all_again = tuple(
            replace(_pass(self.course, kind, 0, len(kind.segments), frozenset()), regather=True)
            for kind in self.course.kinds
        )
        options = self.course.offload
        all_away = () if options is None else (replace(options, what=ACTIVATIONS),)
        patterns = (*repeated_modules(self.compiled), "*")
        named = [(Recompute(pattern, segment=several),) for pattern in patterns for several in (1, *TOGETHER)]
        ways = [(again, away) for again in ((), all_again, *named) for away in dict.fromkeys(((), all_away))][1:]
        fit = [made for made in (self._planned(*way) for way in ways) if made.peak <= self.budget]
        self.said = "nothing between was found"
        return min(fit, key=lambda made: made.seconds, default=None)

    def _chosen(self, choice: RecomputeChoice) -> Candidate:
        return self._planned(tuple(_passes(self.course, choice)), tuple(_offloads(self.course, choice)))

    def _planned(self, again: tuple[Recompute, ...], away: tuple[Offload, ...]) -> Candidate:
        """The candidate with some recomputation, and some activations offloaded."""
        others = tuple(left for each in offloads(self.compiled.hints) for left in each.without(ACTIVATIONS))
        made = self.predictor.under(self.compiled, recompute=again, offload=(*others, *away))
        self.least = min(self.least or made.peak, made.peak)
        return made


def _passes(course: SegmentedStep, choice: RecomputeChoice) -> Iterator[Recompute]:
    """The choice as passes: of each kind one for each run of segments that keep the same."""
    for kind in course.kinds:
        count = len(kind.segments)
        kept = [frozenset(g for g in kind.groups if _keeps(g, choice, i)) for i in range(count)]
        needed = {group for group in kind.groups if group.nbytes}
        for start, length in runs(kept):
            if not needed <= kept[start]:
                yield _pass(course, kind, start, length, kept[start])


def _offloads(course: SegmentedStep, choice: RecomputeChoice) -> Iterator[Offload]:
    """The offloaded groups as passes, likewise."""
    assert course.offload is not None or not any(choice.away.values())
    for kind in course.kinds:
        gone = [
            frozenset(g for g in kind.groups if 0 <= i - choice.again[g] < choice.away.get(g, 0))
            for i in range(len(kind.segments))
        ]
        for start, length in runs(gone):
            if gone[start] and course.offload is not None:
                modules, skip, count, only = _named(course, kind, start, length, gone[start])
                chosen = replace(course.offload, what=ACTIVATIONS, modules=modules, only=only, skip=skip, count=count)
                yield chosen


def _keeps(group: OpGroup, choice: RecomputeChoice, index: int) -> bool:
    """Whether a segment keeps a group."""
    again = choice.again[group]
    return again <= index and (group.nbytes > 0 or index < again + choice.kept[group])


def _pass(course: SegmentedStep, kind: SegmentKind, start: int, length: int, kept: frozenset[OpGroup]) -> Recompute:
    modules, skip, count, keep = _named(course, kind, start, length, kept)
    together = len(kind.segments[start].paths)
    return Recompute(modules, keep, regather=False, skip=skip, count=count, segment=together)


def _named(
    course: SegmentedStep, kind: SegmentKind, start: int, length: int, groups: frozenset[OpGroup]
) -> tuple[str | tuple[str, ...], int, int, tuple[str, ...]]:
    """The arguments by which a pass names segments and groups: module patterns, how many to skip and to take, ops."""
    chosen = kind.segments[start : start + length]
    paths = [path for each in chosen for path in each.paths]
    pattern = ".".join([*paths[0].split(".")[:-1], "*"])
    there = _matched(course, pattern)
    first = there.index(paths[0]) if paths[0] in there else 0
    if there[first : first + length] == paths and len(there) > 1:
        return pattern, first, length, tuple(sorted(group.pattern([pattern]) for group in groups))
    return tuple(paths), 0, 0, tuple(sorted({group.pattern(each.paths) for group in groups for each in chosen}))


def _matched(course: SegmentedStep, pattern: str) -> list[str]:
    """The modules that match a pattern of a pass, in its order."""
    depth = pattern.count(".") + 1
    outer = pattern[:-1]
    nodes = [node for node in course.graph.nodes if node.phase is Phase.FORWARD]
    paths = (prefixes(node.where.module)[depth - 1 : depth] for node in nodes)
    return list(dict.fromkeys(path for each in paths for path in each if path.startswith(outer)))


SECONDS = 20.0
"""The solver's time limit in seconds; the best solution found by then is taken."""
UNIT = 1e6
"""The scaling of bytes to megabytes, and of seconds to microseconds, for the solver's conditioning."""
ROUNDING = 1e-6
"""The tolerance in megabytes: a byte."""
LEAST = 1e-9
"""The least cost in seconds, so that nothing is recomputed needlessly."""
LiveCounts = tuple[int, ...]
"""The number of segments of each kind that are between forward and backward."""


@dataclass(frozen=True)
class RecomputeChoice:
    """The number of segments that recompute each group (the first ones), and of those behind them that keep it for
    others that are recomputed; its cost, and the gap to the optimum. ``away``: the number behind the first ones that
    offload it."""

    again: dict[OpGroup, int]
    kept: dict[OpGroup, int]
    seconds: float
    gap: float
    away: dict[OpGroup, int] = field(default_factory=dict)


def cheapest(kinds: Sequence[SegmentKind], moments: Mapping[LiveCounts, int], budget: int) -> RecomputeChoice | None:
    """The cheapest choice with at most ``budget`` live bytes at each moment; None: there is none."""
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
    return RecomputeChoice(again, kept, seconds, float(found.mip_gap or 0.0), away)


def least_peak(kinds: Sequence[SegmentKind], moments: Mapping[LiveCounts, int]) -> int:
    """The lowest peak of any choice, in bytes."""
    problem = _Problem(kinds, moments)
    cost = [0.0] * len(problem.upper)
    cost[problem.peak] = 1
    return round((float(problem.solved(cost).x[problem.peak]) + ROUNDING) * UNIT)


class _Problem:
    """The mixed integer program: variables and rows; ``peak`` is the variable of the peak memory."""

    def __init__(self, kinds: Sequence[SegmentKind], moments: Mapping[LiveCounts, int]) -> None:
        self.number: dict[tuple[str, OpGroup, int], int] = {}
        self.upper: list[float] = [inf]
        self.integrality: list[int] = [0]
        self.peak = 0
        self._rows: list[dict[int, float]] = []
        self._least: list[float] = []
        for kind in kinds:
            self._kind(kind, len(kind.segments))
        for waiting, live in moments.items():
            self._moment(kinds, waiting, live)

    def _variable(self, name: str, group: OpGroup, most: float, at: int = 0) -> int:
        key = name, group, at
        if key not in self.number:
            self.number[key] = len(self.upper)
            self.upper.append(most)
            self.integrality.append(1)
        return self.number[key]

    def _row(self, row: dict[int, float], least: float) -> None:
        self._rows.append(row)
        self._least.append(least)

    def _kind(self, kind: SegmentKind, count: int) -> None:
        for group in kind.groups:
            again, kept = self._variable("R", group, count), self._variable("kept", group, count)
            if group.nbytes and group.away < inf:
                self._row({again: -1, self._variable("A", group, count): -1}, -count)
            for user in group.users:
                self._row({again: 1, kept: 1, self._variable("R", user, count): -1}, 0)

    def _moment(self, kinds: Sequence[SegmentKind], waiting: LiveCounts, live: int) -> None:
        row: dict[int, float] = {self.peak: 1}
        least = live / UNIT
        for kind, p in zip(kinds, waiting, strict=True):
            for group in kind.groups if p else ():
                count = len(kind.segments)
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
        """The solver's result, for the cost of each variable."""
        from scipy.optimize import Bounds, LinearConstraint, milp  # which takes a second to import
        from scipy.sparse import csr_array

        entries = [(i, column, value) for i, row in enumerate(self._rows) for column, value in row.items()]
        rows, columns, values = zip(*entries, strict=True)
        matrix = csr_array((values, (rows, columns)), shape=(len(self._rows), len(self.upper)))
        return milp(
            cost,
            integrality=self.integrality,
            bounds=Bounds(0, self.upper),
            constraints=LinearConstraint(matrix, [least - ROUNDING for least in self._least], inf),
            options={"time_limit": SECONDS, "mip_rel_gap": 1e-4},
        )
