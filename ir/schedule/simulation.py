"""Simulation of a checked schedule: start and end of each action under given costs; in-flight micro-batches."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product
from typing import NamedTuple, Self

from shardfx.ir.errors import Error

from .actions import KINDS, Action, Schedule

Costs = Mapping[str, float | Sequence[float]]
"""The duration of actions by kind, in any unit: a number for all stages, or one for each."""
COSTS: Costs = {"F": 1, "B": 2, "I": 1, "W": 1, "U": 0}
"""The costs in the figures of papers: each half of a backward takes as long as a forward."""


class Span(NamedTuple):
    """A time interval, in the unit of the costs."""

    start: float
    end: float

    @property
    def length(self) -> float:
        """The duration."""
        return self.end - self.start


@dataclass(frozen=True)
class ScheduleReport:
    """A checked schedule, and the start and end of each of its actions: in-flight micro-batches, idle time, step time.

    A micro-batch is *live* at a stage from its ``F`` until its ``B`` or ``W`` is done. A rank with several stages
    counts a micro-batch once for each of them.
    """

    schedule: Schedule
    spans: Mapping[Action, Span]

    @classmethod
    def of(cls, schedule: Schedule, costs: Costs = COSTS, comm: float = 0.0) -> Self:
        """Simulate a schedule: each rank starts an action as soon as the one before and its dependencies are done.

        ``comm`` is the time of a transfer to another rank; the sender does not wait.

        Raises:
            Error: the schedule is incomplete or has a deadlock; a cost is missing, unknown, negative or not finite.
        """
        check_complete(schedule, len(schedule.stages), len(schedule.microbatches))
        table = cost_table(costs, {action.kind for action in schedule}, len(schedule.stages))
        if not _is_time(comm):
            raise _no_cost("comm", "the time of a transfer, a number of at least 0", comm)
        needs, spans = dependencies(schedule), dict[Action, Span]()
        free = [0.0 for _ in schedule.ranks]
        for action in executable_order(schedule):
            rank = schedule.rank_of(action.stage)
            there = (spans[each].end + comm * (schedule.rank_of(each.stage) != rank) for each in needs[action])
            start = max(free[rank], *there, 0.0)
            free[rank] = start + table[action.kind][action.stage]
            spans[action] = Span(start, free[rank])
        return cls(schedule, spans)

    @cached_property
    def step(self) -> float:
        """The step time: from the start of the first action to the end of the last."""
        return max(span.end for span in self.spans.values())

    def segments(self, action: Action) -> tuple[Span, ...]:
        """The intervals of an action, which others may interrupt."""
        return (self.spans[action],)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """The compute time of each rank."""
        return tuple(sum(each.length for action in row for each in self.segments(action)) for row in self.schedule.rows)

    @cached_property
    def bubble(self) -> float:
        """The bubble: the idle share of all ranks' step time, 0 .. 1."""
        return 1 - sum(self.busy) / (self.step * len(self.busy)) if self.step else 0.0

    @cached_property
    def present(self) -> tuple[Span, ...]:
        """The active interval of each rank: from the start of its first action to the end of its last."""
        return tuple(Span(self.spans[row[0]].start, self.spans[row[-1]].end) for row in self.schedule.rows)

    @cached_property
    def period(self) -> float:
        """The time per step when steps follow at once, each rank starting the next on its own.

        It is the longest active interval of a rank: the step time of the zero-bubble papers.
        """
        return max(span.length for span in self.present)

    @cached_property
    def waits(self) -> tuple[float, ...]:
        """The idle time of each rank within its active interval."""
        return tuple(span.length - busy for span, busy in zip(self.present, self.busy, strict=True))

    @cached_property
    def order(self) -> tuple[Action, ...]:
        """All actions of all ranks, sorted by their ends: a topological order."""
        return tuple(sorted(self.spans, key=lambda action: self.spans[action].end))

    @cached_property
    def live(self) -> tuple[tuple[int, ...], ...]:
        """The number of live micro-batches during each action, rank by rank."""
        return tuple(tuple(live_microbatches(row)) for row in self.schedule.rows)

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        """The maximum number of live micro-batches of each rank."""
        return tuple(map(max, self.live))

    def __str__(self) -> str:
        return (
            f"live micro-batches {', '.join(map(str, self.peaks))} at most on ranks 0 .. {len(self.peaks) - 1}; "
            f"step {self.step:g}, bubble {self.bubble:.1%}"
        )


def cost_table(costs: Costs, kinds: Collection[str], stages: int) -> Mapping[str, Sequence[float]]:
    """The cost of each kind of action at each stage."""
    check_costs(costs)
    table = {}
    for kind in sorted(kinds):
        if kind not in costs:
            raise _no_cost("costs", f"a number for {kind} ({KINDS[kind]}), which the schedule has", dict(costs))
        cost = costs[kind]
        table[kind] = tuple(cost) if isinstance(cost, Sequence) else (cost,) * stages
        if len(table[kind]) != stages:
            raise _no_cost(f"costs[{kind!r}]", f"a number, or {stages} of them, one for each stage", cost)
    return table


def check_costs(costs: Costs) -> None:
    """Check that kinds are known, and costs are finite and not negative."""
    if not isinstance(costs, Mapping):
        raise _no_cost("costs", 'a mapping such as {"F": 1, "B": 2}', costs)
    for kind, cost in costs.items():
        if kind not in KINDS:
            raise _no_cost("costs", f"some of {', '.join(KINDS)}", kind)
        each = cost if isinstance(cost, Sequence) else (cost,)
        if not all(map(_is_time, each)):
            raise _no_cost(f"costs[{kind!r}]", "a number of at least 0, or one for each stage", cost)


def _no_cost(where: str, expected: str, got: object) -> Error:
    return Error(
        "these are no costs of a schedule's actions",
        where=where,
        expected=expected,
        got=repr(got),
        remedy='say how long each kind of action takes, in any unit: costs={"F": 1, "B": 2}; or leave costs out',
    )


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value) and value >= 0


KEEPS = {"F": 1, "B": -1, "W": -1, "I": 0, "U": 0}
"""The change in a rank's in-flight micro-batches at the end of an action, by kind."""

NUMBERS = {
    "stages": "stages",
    "microbatches": "micro-batches",
    "ranks": "ranks",
    "max_in_flight": "micro-batches in flight",
}
"""The quantity that each integer option counts, for errors."""


def check_schedule(schedule: Schedule, *, stages: int, microbatches: int, costs: Costs = COSTS) -> ScheduleReport:
    """Check that a schedule is complete and free of deadlocks, for so many stages and micro-batches.

    Args:
        costs: the duration of an action, by kind; for the report alone.

    Raises:
        Error: an action is missing, duplicate, on another rank than its stage, or of no stage or micro-batch that there
            is; a backward is there whole and in halves; some stages are updated and others not; an action stands before
            one for which it waits, or ranks wait for one another. It names rank, action and row.
    """
    if not isinstance(schedule, Schedule):
        raise Error(
            "this is no schedule",
            where="check_schedule(schedule, ...)",
            expected="an sx.schedules.Schedule",
            got=f"{schedule!r:.100} of type {type(schedule).__name__}",
            remedy="sx.schedules.Schedule.parse reads a text, sx.schedules.make_schedule makes one by its name",
        )
    check_number("stages", stages)
    check_number("microbatches", microbatches)
    check_complete(schedule, stages, microbatches)
    return ScheduleReport.of(schedule, costs)


def live_microbatches(row: Sequence[Action]) -> Iterator[int]:
    """The number of live micro-batches during each action: one that is released is live until the action is done."""
    after = accumulate(KEEPS[action.kind] for action in row)
    return (kept - min(KEEPS[action.kind], 0) for kept, action in zip(after, row, strict=True))


def check_number(what: str, number: object) -> None:
    """Check that an option of :data:`NUMBERS` is an int of at least 1."""
    if type(number) is not int or number < 1:
        raise Error(
            f"this is no number of {NUMBERS[what]}",
            where=what,
            expected="an int of at least 1",
            got=repr(number),
            remedy=f"say {what}=1 or more" + (", or leave it out" if what in ("ranks", "max_in_flight") else ""),
        )


# ---- what a schedule has to hold ------------------------------------------------------------------------------------


def check_complete(schedule: Schedule, stages: int, microbatches: int) -> None:
    """Check that each action has a valid stage and micro-batch, occurs once, on the rank of its stage, and that none is
    missing: a forward and a backward (or its halves) of each micro-batch, an update of each stage or
    none."""
    seen: dict[Action, tuple[int, int]] = {}
    for rank, row in enumerate(schedule.rows):
        for index, action in enumerate(row):
            what, expected, remedy = "", "", ""
            if action.stage >= stages or action.microbatch >= microbatches:
                what = f"{action} is of a stage or micro-batch that is not there"
                expected = f"stages 0 .. {stages - 1} and micro-batches 0 .. {microbatches - 1}"
                remedy = (
                    f"make the schedule for {stages} stages and {microbatches} micro-batches, or leave {action} out"
                )
            elif action in seen:
                what, expected = f"{action} stands twice", f"each action once; it is {schedule.where(*seen[action])}"
                remedy = "leave one of them out"
            elif schedule.rank_of(action.stage) != rank:
                what = f"{action} stands on another rank than its stage"
                expected = f"all actions of stage {action.stage} on rank {schedule.rank_of(action.stage)}"
                remedy = "move it: the parameters of a stage lie on one rank"
            if what:
                where, got = schedule.where(rank, index), f"{action} on rank {rank}"
                raise Error(what, where=where, expected=expected, got=got, remedy=remedy)
            seen[action] = rank, index
    for stage, microbatch in product(range(stages), range(microbatches)):
        forward, full, half, rest = (Action(kind, stage, microbatch) for kind in "FBIW")
        halves = [each for each in (half, rest) if each in seen]
        if full in seen and halves:
            rank, index = seen[halves[0]]
            raise Error(
                f"stage {stage}, micro-batch {microbatch} is done whole and in halves: {full} and {halves[0]}",
                where=schedule.where(rank, index),
                expected="B, or I and W",
                got=f"{full} and {halves[0]}",
                remedy=f"leave {full} out, or {halves[0]}",
            )
        for needed in (forward, half, rest) if halves else (forward, full):
            if needed not in seen:
                raise _missing(schedule, needed)
    for update in (Action("U", stage) for stage in range(stages) if any(action.kind == "U" for action in seen)):
        if update not in seen:
            raise _missing(schedule, update)


def _missing(schedule: Schedule, action: Action, most: int = 12) -> Error:
    rank = next((rank for rank in schedule.ranks if action.stage in schedule.stages_of(rank)), None)
    row = schedule.rows[rank or 0]
    text = " ".join(map(str, row[:most])) + " ..." * (len(row) > most)
    last, end = schedule.stages[-1], schedule.microbatches[-1]
    return Error(
        f"{action} is missing",
        where="no rank has that stage" if rank is None else f"rank {rank}, the row  {text}",
        expected="F, and B, or I and W, of each stage and micro-batch; U of each stage, or of none",
        got=f"rows of stages 0 .. {last} and micro-batches 0 .. {end}, without it",
        remedy=f"add {action}",
    )


def dependencies(schedule: Schedule) -> Mapping[Action, tuple[Action, ...]]:
    """The dependencies of each action: those of :func:`needs`; ``U`` waits for all ``B`` and ``W`` of its stage."""
    split = {(action.stage, action.microbatch) for action in schedule if action.kind == "I"}

    def ends(stage: int) -> tuple[Action, ...]:
        return tuple(
            Action("W" if (stage, microbatch) in split else "B", stage, microbatch)
            for microbatch in schedule.microbatches
        )

    def back(stage: int, microbatch: int) -> Action:
        return Action("I" if (stage, microbatch) in split else "B", stage, microbatch)

    last = schedule.stages[-1]
    return {action: ends(action.stage) if action.kind == "U" else needs(action, last, back) for action in schedule}


def needs(action: Action, last: int, back: Callable[[int, int], Action]) -> tuple[Action, ...]:
    """The dependencies of ``F``, ``B``, ``I`` and ``W``: ``F`` on ``F`` of the stage before; ``B`` and ``I`` on their
    own ``F``, and on ``B`` or ``I`` (``back``) of the stage behind, up to the ``last``; ``W`` on its ``I``."""
    kind, stage, microbatch = action
    if kind == "F":
        return (Action("F", stage - 1, microbatch),) if stage else ()
    if kind == "W":
        return (Action("I", stage, microbatch),)
    return (Action("F", stage, microbatch), *((back(stage + 1, microbatch),) if stage < last else ()))


def executable_order(schedule: Schedule) -> tuple[Action, ...]:
    """A topological order of all actions of a complete schedule; an Error names the ranks of a deadlock."""
    wanted = dependencies(schedule)
    waiting: dict[Action, deque[int]] = {}
    done: dict[Action, None] = {}
    at = [0 for _ in schedule.ranks]
    ready = deque(schedule.ranks)
    while ready:
        rank = ready.popleft()
        while at[rank] < len(schedule.rows[rank]):
            action = schedule.rows[rank][at[rank]]
            missing = next((each for each in wanted[action] if each not in done), None)
            if missing is not None:
                waiting.setdefault(missing, deque()).append(rank)
                break
            done[action] = None
            at[rank] += 1
            ready.extend(waiting.pop(action, ()))
    stuck = {rank: i for rank, i in enumerate(at) if i < len(schedule.rows[rank])}
    if stuck:
        raise _deadlock(schedule, stuck, {rank: action for action, ranks in waiting.items() for rank in ranks})
    return tuple(done)


def _deadlock(schedule: Schedule, stuck: Mapping[int, int], missing: Mapping[int, Action]) -> Error:
    circle: list[int] = []
    rank = min(stuck)
    while rank not in circle:
        circle.append(rank)
        rank = schedule.rank_of(missing[rank].stage)
    circle = circle[circle.index(rank) :]
    lines = [f"{schedule.where(each, stuck[each])}  waits for {missing[each]}" for each in circle]
    earlier = f"let {missing[circle[-1]]} stand earlier in the row of rank {circle[0]}"
    if len(circle) == 1:
        what = f"{schedule.rows[rank][stuck[rank]]} stands before {missing[rank]}, for which it waits"
    else:
        what = f"a deadlock: ranks {', '.join(map(str, circle))} wait for one another"
    return Error(
        what,
        where="\n            ".join(lines),
        expected="rows in whose order each action finds done what it waits for",
        got=", ".join(f"{schedule.rows[each][stuck[each]]} before {missing[each]}" for each in circle),
        remedy=f"{earlier}, or take a schedule of sx.schedules.make_schedule",
    )
