"""Completeness and dependencies of a schedule, and a topological order of its actions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from itertools import product

from shardfx.ir.errors import Error

from .actions import Action, Schedule


def check_complete(schedule: Schedule, stages: int, microbatches: int) -> None:
    """See that each action stands once, on one rank for each stage, and that none is missing.

    Raises:
        Error: one is missing, stands twice, on another rank than its stage, or is of no stage or micro-batch that there
            is; a backward is there whole and in halves; some stages are updated and others not.
    """
    _once(schedule, stages, microbatches)
    _complete(schedule, stages, microbatches)


def _once(schedule: Schedule, stages: int, microbatches: int) -> None:
    """Each action is of a stage and micro-batch that there are, and stands once, on the rank of its stage."""
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


def _complete(schedule: Schedule, stages: int, microbatches: int) -> None:
    """All that is to be done stands somewhere: a forward and a backward, whole or in halves, of each micro-batch."""
    there = frozenset(schedule)
    updated = any(action.kind == "U" for action in there)
    for stage, microbatch in product(range(stages), range(microbatches)):
        forward, whole, half, rest = (Action(kind, stage, microbatch) for kind in "FBIW")
        halves = half in there or rest in there
        if whole in there and halves:
            raise _two_backwards(schedule, whole, half if half in there else rest)
        for needed in (forward, half, rest) if halves else (forward, whole):
            if needed not in there:
                raise _missing(schedule, needed)
    for stage in range(stages):
        if updated and Action("U", stage) not in there:
            raise _missing(schedule, Action("U", stage))


def _two_backwards(schedule: Schedule, whole: Action, half: Action) -> Error:
    rank = schedule.rank_of(whole.stage)
    return Error(
        f"stage {whole.stage}, micro-batch {whole.microbatch} is done whole and in halves: {whole} and {half}",
        where=schedule.where(rank, schedule.rows[rank].index(half)),
        expected="B, or I and W",
        got=f"{whole} and {half}",
        remedy=f"leave {whole} out, or {half}",
    )


def _missing(schedule: Schedule, action: Action) -> Error:
    rank = next((rank for rank in schedule.ranks if action.stage in schedule.stages_of(rank)), None)
    row = "no rank has that stage" if rank is None else f"rank {rank}, the row  {_row(schedule, rank)}"
    needed = {
        "F": "F of each stage and micro-batch",
        "B": "B, or I and W, of each stage and micro-batch",
        "I": "I beside each W",
        "W": "W beside each I",
        "U": "U of each stage, or of none",
    }
    last, end = schedule.stages[-1], schedule.microbatches[-1]
    return Error(
        f"{action} is missing",
        where=row,
        expected=needed[action.kind],
        got=f"rows of stages 0 .. {last} and micro-batches 0 .. {end}, without it",
        remedy=f"add {action}",
    )


def _row(schedule: Schedule, rank: int, most: int = 12) -> str:
    row = schedule.rows[rank]
    return " ".join(map(str, row[:most])) + " ..." * (len(row) > most)


def dependencies(schedule: Schedule) -> Mapping[Action, tuple[Action, ...]]:
    """For each action those that must be done before it, wherever they are, whatever its row says.

    Those of :func:`needs`; ``U`` waits for all ``B`` and ``W`` of its stage.
    """
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
    """What ``F``, ``B``, ``I`` and ``W`` wait for.

    ``F`` waits for ``F`` of the stage before; ``B`` and ``I`` for their own ``F``, and for ``B`` or ``I`` of the stage
    behind; ``W`` for its ``I``.

    Args:
        action: what waits.
        last: the last stage.
        back: the action that makes the gradients of a stage's inputs in a micro-batch, ``B`` or ``I``.
    """
    kind, stage, microbatch = action
    if kind == "F":
        return (Action("F", stage - 1, microbatch),) if stage else ()
    if kind == "W":
        return (Action("I", stage, microbatch),)
    return (Action("F", stage, microbatch), *((back(stage + 1, microbatch),) if stage < last else ()))


def executable_order(schedule: Schedule) -> tuple[Action, ...]:
    """All actions of a complete schedule in one order that agrees with every row and with all dependencies.

    Raises:
        Error: there is none. Ranks wait for one another, or a rank for itself; the error names them.
    """
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
    """The ranks that wait for one another, from one to the next."""
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
