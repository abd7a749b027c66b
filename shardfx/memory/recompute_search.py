"""``Hints(recompute="auto", memory=...)``: the cheapest activations to recompute or offload so that a plan fits.

A segment is what a module of a list does (``layers.3``), or of a module of the root where there is no list. Some of
its values are live until the backward; outputs that go on to other segments are kept in any case. The plan that keeps
everything tells the live bytes at each moment (:class:`SegmentedStep`). What to recompute is then chosen by a mixed
integer program, solved by HiGHS, and written as a few passes ``recompute{...}`` (and ``offload{...}`` with
``offload=("activations",)``). The resulting plan is replayed like any other; bytes beyond the prediction are
subtracted from the budget. Of ``K`` equal segments the first ``R[g]`` recompute group ``g``, and the last ones, which
the backward needs first, keep it, so a kind of segments costs one variable per group:

    minimize    sum of seconds[g] R[g] + away[g] A[g]
    subject to  R[g] + kept[g] >= R[user]      a recomputed user of g has it: g is recomputed too, or kept for that
                live[t] - sum of nbytes[g] (p - m[g, p]) + sum of extra[g] kept[g] <= budget       at each moment t
                m[g, p] >= p - R[g] - A[g], m >= 0     of the p segments live at t so many keep g on the device
                R[g] + A[g] <= K               the next A[g] segments offload it, where that is possible

All but the peak are integers: ``kept`` and ``m`` are so by themselves, and declared so, else HiGHS repairs what it
rounded, and prints that it does. (After Jain et al., Checkmate, 2020; over folded segments.)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from math import inf
from typing import Any, TypeVar

from shardfx.compile import Compiled, offloads
from shardfx.ir.cost.machine import Machine
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Node, Phase, Value, op_name
from shardfx.ir.names import block_of
from shardfx.ir.ops.alike import alike
from shardfx.ir.ops.pools.pool_ops import moves_pool
from shardfx.ir.ops.sends import fetched, is_comm
from shardfx.ir.ops.traits import gives_alias
from shardfx.ir.text.printer import size_text
from shardfx.memory.candidates import Candidate, PlanSearch, repeated_modules, what_fits
from shardfx.memory.rank_memory import RankMemory
from shardfx.passes import Offload, Recompute
from shardfx.passes.memory.module_patterns import matching_modules
from shardfx.passes.memory.offload import ACTIVATIONS

Mark = TypeVar("Mark", bound=Hashable)
TOGETHER = (2, 4, 8)
"""The numbers of consecutive modules that are recomputed as one segment, where nothing of them is kept."""
TRIES = 4
"""The number of corrections of the budget by a plan's replayed peak."""


def fitting_recompute(search: PlanSearch) -> Compiled:
    """The plan with enough recomputation to fit; the same plan, where none is asked for, or it fits already.

    Raises:
        Error: there is no budget; or no choice fits.
    """
    hints, compiled = search.hints, search.compiled
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
    if search.fits(search.initial) or not compiled.has_gradients:
        return compiled
    choices = RecomputeChoices(search)
    made, budget = search.first(choices.candidates()), size_text(search.budget)
    if made is None:
        raise Error(
            f"no choice of what is recomputed fits into Hints(memory={hints.memory!r})",
            where="Hints(recompute='auto')",
            expected=f"a budget of at least about {size_text(search.smallest().peak)}",
            got=f"{budget}, where a rank that keeps all holds {size_text(search.initial.peak)}",
            remedy=what_fits(search),
        )
    longer = made.seconds / search.initial.seconds - 1
    away = any(isinstance(each, Offload) and ACTIVATIONS in each.whats for each in made.plan.passes)
    how = "recomputed or offloaded" if away else "recomputed"
    made.plan.after.notes.append(
        f"{how} to fit into {budget}: {longer:.1%} more time in a step; {choices.quality}; "
        f"the rank holds {size_text(made.peak)}"
    )
    return made.plan


class RecomputeChoices:
    """Candidates from a plan that stores all activations, by what of it they recompute or offload.

    ``quality``: what is known of the last candidate's distance to the best one.
    """

    def __init__(self, search: PlanSearch) -> None:
        self.search, self.quality = search, ""
        offloaded = offloads(search.hints)
        self.options = next((each for each in offloaded if ACTIVATIONS in each.whats), None)
        self._others = tuple(left for each in offloaded for left in each.without(ACTIVATIONS))
        memory, machine = search.initial.memory, Machine.of(search.hints.machine)
        self._step = SegmentedStep(memory, search.compiled.after, machine, self.options)

    def candidates(self) -> Iterator[Candidate]:
        """The cheapest choices; if they do not fit, and the leanest does, which needs less than predicted, those with
        its margin, and itself; then those that recompute all alike."""
        step, budget = self._step, self.search.budget
        yield from self._cheapest(budget)
        floor = least_peak(step.kinds, step.moments)
        choice = cheapest(step.kinds, step.moments, floor)
        leanest = self._planned(choice) if choice is not None else None
        if leanest is not None and self.search.fits(leanest):
            yield from self._cheapest(budget + floor - leanest.peak)
            self.quality = "no cheaper choice was found"
            yield leanest
        yield from self._wholesale()

    def _cheapest(self, budget: int) -> Iterator[Candidate]:
        """The cheapest choices; bytes of each plan beyond the prediction are subtracted from the budget of the next."""
        for _ in range(TRIES):
            choice = cheapest(self._step.kinds, self._step.moments, budget)
            if choice is None:
                return
            made = self._planned(choice)
            self.quality = f"the cheapest choice is at most {choice.gap:.1%} cheaper"
            yield made
            budget -= made.peak - self.search.budget

    def _wholesale(self) -> Iterator[Candidate]:
        """The fastest that fits, of those that recompute all segments, or all modules of a list, or those of the root,
        alone or several together; that offload all; or both."""
        all_again = tuple(_recompute(self._step, kind.segments, regather=True) for kind in self._step.kinds)
        all_away = () if self.options is None else (replace(self.options, what=ACTIVATIONS),)
        patterns = (*repeated_modules(self.search.compiled), "*")
        named = [(Recompute(pattern, segment=several),) for pattern in patterns for several in (1, *TOGETHER)]
        ways = [(again, away) for again in ((), all_again, *named) for away in dict.fromkeys(((), all_away))][1:]
        found = self.search.fastest(self._plan(*way) for way in ways)
        self.quality = "nothing between was found"
        yield from () if found is None else (found,)

    def _planned(self, choice: RecomputeChoice) -> Candidate:
        """The candidate of a choice: of each kind a pass for each run of segments that recompute, or offload, alike."""
        again, away, step = list[Recompute](), list[Offload](), self._step
        for kind in step.kinds:
            needed, indices = {group for group in kind.groups if group.nbytes}, range(len(kind.segments))
            for segments, kept in runs(
                kind, [frozenset(g for g in kind.groups if choice.keeps(g, i)) for i in indices]
            ):
                if not needed <= kept:
                    again.append(_recompute(step, segments, kept))
            for segments, gone in runs(
                kind, [frozenset(g for g in kind.groups if choice.offloads(g, i)) for i in indices]
            ):
                if gone:
                    assert self.options is not None
                    where, only = _named(step, segments, gone)
                    away.append(replace(self.options, what=ACTIVATIONS, only=only, **where))
        return self._plan(tuple(again), tuple(away))

    def _plan(self, again: tuple[Recompute, ...], away: tuple[Offload, ...]) -> Candidate:
        """The candidate with some recomputation, and some activations offloaded."""
        return self.search.plan(recompute=again, offload=(*self._others, *away))


def _recompute(
    step: SegmentedStep, segments: Sequence[ModelSegment], kept: Iterable[OpGroup] = (), regather: bool = False
) -> Recompute:
    where, save = _named(step, segments, kept)
    return Recompute(save=save, regather=regather, **where)


def _named(
    step: SegmentedStep, segments: Sequence[ModelSegment], groups: Iterable[OpGroup]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """How a pass names consecutive segments, by a pattern where that is possible, and the ops of groups in them."""
    paths = [each.path for each in segments]
    pattern = ".".join([*paths[0].split(".")[:-1], "*"])
    there = list(dict.fromkeys(matching_modules(step.graph, pattern, where="Hints(recompute='auto')").values()))
    first, count = there.index(paths[0]), len(segments)
    if there[first : first + count] == paths and len(there) > 1:
        where = {"modules": pattern, "skip": first, "count": count}
        return where, tuple(sorted(group.pattern(pattern) for group in groups))
    named = {group.pattern(each.path) for group in groups for each in segments}
    return {"modules": tuple(paths)}, tuple(sorted(named))


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
Variable = tuple[Hashable, ...]
"""A variable of the mixed integer program: its name, and its group, if it has one."""
PEAK: Variable = ("peak",)


@dataclass(frozen=True)
class RecomputeChoice:
    """The number of segments that recompute each group (the first ones), and of those behind them that keep it for
    others that are recomputed; its cost, and the gap to the optimum. ``away``: the number behind the first ones that
    offload it."""

    again: dict[OpGroup, int]
    kept: dict[OpGroup, int]
    away: dict[OpGroup, int]
    seconds: float
    gap: float

    def keeps(self, group: OpGroup, index: int) -> bool:
        """Whether a segment keeps a group."""
        again = self.again[group]
        return again <= index and (group.nbytes > 0 or index < again + self.kept[group])

    def offloads(self, group: OpGroup, index: int) -> bool:
        """Whether a segment offloads a group."""
        return 0 <= index - self.again[group] < self.away.get(group, 0)


def cheapest(kinds: Sequence[SegmentKind], moments: Mapping[LiveCounts, int], budget: int) -> RecomputeChoice | None:
    """The cheapest choice with at most ``budget`` live bytes at each moment; None: there is none."""
    groups = [group for kind in kinds for group in kind.groups]
    cost: dict[Variable, float] = {("again", group): max(group.seconds, LEAST) * UNIT for group in groups}
    cost |= {("away", group): max(group.away, LEAST) * UNIT for group in groups}
    found = _Problem(kinds, moments, budget).solve(cost)
    if found is None:
        return None
    values, gap = found
    again, kept, away = (
        {group: round(values[name, group]) for group in groups if (name, group) in values}
        for name in ("again", "kept", "away")
    )
    seconds = sum(group.seconds * count for group, count in again.items())
    seconds += sum(group.away * count for group, count in away.items())
    return RecomputeChoice(again, kept, away, seconds, gap)


def least_peak(kinds: Sequence[SegmentKind], moments: Mapping[LiveCounts, int]) -> int:
    """The lowest peak of any choice, in bytes."""
    found = _Problem(kinds, moments).solve({PEAK: 1})
    assert found is not None
    return round(float(found[0][PEAK] + ROUNDING) * UNIT)


class _Problem:
    """The mixed integer program: ``upper`` bounds of its variables, and ``rows`` of factors with a lower bound each."""

    def __init__(self, kinds: Sequence[SegmentKind], moments: Mapping[LiveCounts, int], budget: float = inf) -> None:
        self.upper: dict[Variable, float] = {PEAK: budget / UNIT}
        self.rows: list[tuple[dict[Variable, float], float]] = []
        for kind in kinds:
            count = len(kind.segments)
            for group in kind.groups:
                again, kept, away = ("again", group), ("kept", group), ("away", group)
                self.upper |= {again: count, kept: count}
                if group.nbytes and group.away < inf:
                    self.upper[away] = count
                    self.rows.append(({again: -1, away: -1}, -count))
                for user in group.users:
                    self.upper["again", user] = count
                    self.rows.append(({again: 1, kept: 1, ("again", user): -1}, 0))
        for waiting, live in moments.items():
            self._moment(zip(kinds, waiting, strict=True), live)

    def _moment(self, waiting: Iterable[tuple[SegmentKind, int]], live: int) -> None:
        row: dict[Variable, float] = {PEAK: 1}
        for kind, count in waiting:
            for group in kind.groups if count else ():
                if group.users:
                    row["kept", group] = -group.extra / UNIT
                stays: Variable = ("stays", group, count)
                if stays not in self.upper:
                    self.upper[stays] = count
                    gone = [each for each in (("again", group), ("away", group)) if each in self.upper]
                    self.rows.append(({stays: 1, **dict.fromkeys(gone, 1)}, count))
                row[stays] = -group.nbytes / UNIT
                live -= group.nbytes * count
        self.rows.append((row, live / UNIT))

    def solve(self, cost: Mapping[Variable, float]) -> tuple[dict[Variable, float], float] | None:
        """The values of the variables at the lowest cost, and the gap to the optimum; None: there are none."""
        from scipy.optimize import Bounds, LinearConstraint, milp  # which takes a second to import
        from scipy.sparse import csr_array

        column = {variable: i for i, variable in enumerate(self.upper)}
        entries = [(i, column[each], value) for i, (row, _) in enumerate(self.rows) for each, value in row.items()]
        rows, columns, values = zip(*entries, strict=True)
        found = milp(
            [cost.get(variable, 0) for variable in self.upper],
            integrality=[variable != PEAK for variable in self.upper],
            bounds=Bounds(0, list(self.upper.values())),
            constraints=LinearConstraint(
                csr_array((values, (rows, columns)), shape=(len(self.rows), len(self.upper))),
                [least - ROUNDING for _, least in self.rows],
                inf,
            ),
            options={"time_limit": SECONDS, "mip_rel_gap": 1e-4},
        )
        return None if found.x is None else (dict(zip(self.upper, found.x, strict=True)), float(found.mip_gap or 0.0))


# ---- segments -------------------------------------------------------------------------------------------------------


def segment_of(module: str) -> str:
    """The module of a list that a module lies in, or else the module of the root; empty for the root itself."""
    return block_of(module) or module.partition(".")[0]


@dataclass
class ModelSegment:
    """The segment of a module: its nodes, and a rank's calls for them, ``ahead`` in the forward, ``back`` behind it."""

    path: str
    nodes: list[Node] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)
    back: list[int] = field(default_factory=list)

    def waits(self, call: int) -> bool:
        """Whether a call is between its forward and its backward."""
        return self.ahead[-1] < call < self.back[0]


@dataclass(eq=False)
class OpGroup:
    """The nodes of one op in one module of a segment: kept together, or recomputed together.

    ``module`` is the path within the segment, and ``seconds`` the time to recompute it. Where it is kept, ``nbytes`` of
    it are live until the backward, which needs them itself; the ``extra`` bytes are needed by ``users`` that are
    recomputed, and live where there are such. ``away`` are the seconds of offloading and fetching the bytes, where that
    is possible.
    """

    module: str
    op: str
    nbytes: int = 0
    seconds: float = 0.0
    extra: int = 0
    users: list[OpGroup] = field(default_factory=list)
    away: float = inf

    def pattern(self, path: str) -> str:
        """The group's pattern in the option ``save``, with ``path`` for the module of the segment."""
        return f"{path}{self.module}:{self.op}"


@dataclass
class SegmentKind:
    """Segments that are alike, in the order in which they run, and the groups that each of them has."""

    segments: list[ModelSegment]
    groups: list[OpGroup]


@dataclass
class SegmentedStep:
    """The memory of a step that stores all activations, and the segments of it that may be recomputed.

    Args:
        memory: of a rank, predicted.
        graph: the planned graph that its program was lowered from.
    """

    memory: RankMemory
    graph: Graph
    machine: Machine
    offload: Offload | None = None
    """The options of offloading activations."""

    @cached_property
    def _forward(self) -> list[Node]:
        return [node for node in self.graph.nodes if node.phase is Phase.FORWARD]

    @cached_property
    def segments(self) -> list[ModelSegment]:
        """The segments that have a forward and a backward, in forward order."""
        found: dict[str, ModelSegment] = {}
        for node in self._forward:
            if path := segment_of(node.where.module):
                found.setdefault(path, ModelSegment(path)).nodes.append(node)
        for at, call in enumerate(self.memory.footprint.calls):
            planned = call.meta.get("shardfx")
            if not isinstance(planned, Node) or planned.phase is Phase.UPDATE:
                continue
            if (segment := found.get(segment_of(planned.where.module))) is not None:
                (segment.ahead if planned.phase is Phase.FORWARD else segment.back).append(at)
        for each in found.values():
            each.ahead, each.back = split_calls(each.ahead, each.back)
        full = [each for each in found.values() if each.ahead and each.back]
        return sorted(full, key=lambda each: each.ahead[0])

    @cached_property
    def kinds(self) -> list[SegmentKind]:
        """The kinds of segments: equal ones grouped."""
        found: dict[Hashable, list[ModelSegment]] = {}
        for each in self.segments:
            start = len(each.path)
            key = tuple([(node.where.module[start:], alike(node, placed=True)) for node in each.nodes])
            found.setdefault(key, []).append(each)
        return [SegmentKind(alike, self._groups(alike[len(alike) // 2])) for alike in found.values()]

    def _groups(self, segment: ModelSegment) -> list[OpGroup]:
        """The groups of one segment that may be recomputed: no gathers of parameters, which are bucketed with those of
        other segments, so that to gather some of them again frees nothing."""
        found: dict[tuple[str, str], OpGroup] = {}
        of: dict[Node, OpGroup] = {}
        offloaded: dict[OpGroup, list[Value]] = {}
        leaving = sources(value for value, users in self._users.items() if users - {segment.path})
        for node in segment.nodes:
            gathers = is_comm(node) and self._fetched.issuperset(node.outs)
            if not leaving.issuperset(node.outs) and not gives_alias(node.op) and not moves_pool(node) and not gathers:
                key = node.where.module[len(segment.path) :], op_name(node.op)
                of[node] = found.setdefault(key, OpGroup(*key))
        for node, group in of.items():
            group.seconds += self._seconds.get(node, 0.0)
            for value in (value for value in node.outs if value not in leaving):
                if value in self.needed:
                    group.nbytes += value.local_bytes(self.graph.mesh)
                    offloaded.setdefault(group, []).append(value)
                else:
                    group.extra += value.local_bytes(self.graph.mesh)
            for value in sources(node.operands):
                used = of.get(value.node) if value.node is not None else None
                if used is not None and used is not group and value not in self.needed:
                    used.users.append(group)
        for group, values in offloaded.items():
            group.away = self._carrying(values)
        return list(found.values())

    def _carrying(self, values: Sequence[Value]) -> float:
        """The seconds of offloading values and fetching them; infinite, where some of them are not."""
        options = self.offload
        if options is None or any(value.type.numel < options.min_numel for value in values):
            return inf
        link = self.machine.pool(options.to)
        return 2 * sum(link.seconds(1, value.local_bytes(self.graph.mesh)) for value in values)

    @cached_property
    def _users(self) -> dict[Value, set[str]]:
        """The segments whose forward uses each value; or a mark that it leaves the graph."""
        found: dict[Value, set[str]] = {output.value: {"outputs"} for output in self.graph.outputs}
        for node in self._forward:
            for value in node.operands:
                found.setdefault(value, set()).add(segment_of(node.where.module))
        return found

    @cached_property
    def needed(self) -> set[Value]:
        """The forward values that the backward uses, behind views."""
        later = (value for node in self.graph.nodes if node.phase is not Phase.FORWARD for value in node.operands)
        return {v for v in sources(later) if v.node is not None and v.node.phase is Phase.FORWARD}

    @cached_property
    def _fetched(self) -> set[Value]:
        """Parameters, and values that are only gathered from them."""
        return fetched(self.graph)

    @cached_property
    def _seconds(self) -> dict[Node, float]:
        """The predicted seconds of each node on a rank."""
        found: dict[Node, float] = {}
        for call, cost in zip(self.memory.footprint.calls, self.memory.footprint.costs, strict=True):
            planned = call.meta.get("shardfx")
            if isinstance(planned, Node):
                found[planned] = found.get(planned, 0.0) + cost.seconds(self.machine, self.graph.mesh)
        return found

    @cached_property
    def live(self) -> list[int]:
        """The live bytes at each call."""
        stored = sum(self.memory.stored.values())
        return [stored + nbytes for nbytes in self.memory.footprint.held]

    @cached_property
    def moments(self) -> dict[tuple[int, ...], int]:
        """The peak of live bytes by the number of segments of each kind that are between forward and backward.

        Where a segment is about to be recomputed, what its forward holds for a moment is there too.
        """
        found: dict[tuple[int, ...], int] = {}
        live = self.live
        for at, nbytes in enumerate(live):
            waiting = self._waiting(at)
            found[waiting] = max(found.get(waiting, 0), nbytes)
        for each in self.segments:
            ahead = live[each.ahead[0] : each.ahead[-1] + 1]
            waiting = self._waiting(each.back[0])
            found[waiting] = max(found[waiting], live[each.back[0]] + max(ahead) - ahead[-1])
        return found

    def _waiting(self, call: int) -> tuple[int, ...]:
        return tuple(sum(each.waits(call) for each in kind.segments) for kind in self.kinds)


def split_calls(ahead: Sequence[int], back: Sequence[int]) -> tuple[list[int], list[int]]:
    """The calls of a forward before the moment that best parts it from its backward, and those of the backward after.

    A few may stand elsewhere: the part of a layer in the loss is summed when all else is done.

    >>> split_calls([1, 2, 3, 90], [50, 51, 52])
    ([1, 2, 3], [50, 51, 52])
    """
    moments = [-1, *ahead]
    best = max(moments, key=lambda moment: sum(at <= moment for at in ahead) + sum(at > moment for at in back))
    return [at for at in ahead if at <= best], [at for at in back if at > best]


def sources(values: Iterable[Value]) -> set[Value]:
    """The base values of views; values themselves, if they are none."""
    open_, found = list(values), set[Value]()
    seen: set[Value] = set()
    while open_:
        value = open_.pop()
        if value in seen:
            continue
        seen.add(value)
        if value.node is not None and gives_alias(value.node.op):
            open_ += value.node.operands
        else:
            found.add(value)
    return found


def runs(kind: SegmentKind, marks: Sequence[Mark]) -> Iterator[tuple[list[ModelSegment], Mark]]:
    """Consecutive segments of equal marks, and their mark."""
    for mark, pairs in groupby(zip(kind.segments, marks, strict=True), key=lambda pair: pair[1]):
        yield [segment for segment, _ in pairs], mark
