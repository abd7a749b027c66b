"""Completeness and dependencies of a schedule, and a topological order of its actions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from itertools import product

from shardfx.ir.errors import Error

from .actions import Action, Schedule


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
