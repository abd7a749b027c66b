"""Is all there that is to be done: each action once, on the rank of its stage?"""

from __future__ import annotations

from itertools import product

from shardfx.ir.errors import Error

from .actions import Action, Schedule


def check_complete(schedule: Schedule, stages: int, turns: int) -> None:
    """See that each action stands once, on one rank for each stage, and that none is missing.

    Raises:
        Error: one is missing, stands twice, on another rank than its stage, or is of no stage or turn that there is; a
            backward is there whole and in halves; some stages are updated and others not.
    """
    _once(schedule, stages, turns)
    _complete(schedule, stages, turns)


def _once(schedule: Schedule, stages: int, turns: int) -> None:
    """Each action is of a stage and turn that there are, and stands once, on the rank of its stage."""
    seen: dict[Action, tuple[int, int]] = {}
    for rank, row in enumerate(schedule.rows):
        for index, action in enumerate(row):
            what, expected, remedy = "", "", ""
            if action.stage >= stages or action.turn >= turns:
                what = f"{action} is of a stage or turn that is not there"
                expected = f"stages 0 .. {stages - 1} and turns 0 .. {turns - 1}"
                remedy = f"make the schedule for {stages} stages and {turns} turns, or leave {action} out"
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


def _complete(schedule: Schedule, stages: int, turns: int) -> None:
    """All that is to be done stands somewhere: a forward and a backward, whole or in halves, of each turn."""
    there = frozenset(schedule)
    updated = any(action.kind == "U" for action in there)
    for stage, turn in product(range(stages), range(turns)):
        forward, whole, half, rest = (Action(kind, stage, turn) for kind in "FBIW")
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
        f"the backward of stage {whole.stage}, turn {whole.turn} stands there whole and in halves: {whole} and {half}",
        where=schedule.where(rank, schedule.rows[rank].index(half)),
        expected="B, or I and W",
        got=f"{whole} and {half}",
        remedy=f"leave {whole} out, or {half}",
    )


def _missing(schedule: Schedule, action: Action) -> Error:
    rank = next((rank for rank in schedule.ranks if action.stage in schedule.stages_of(rank)), None)
    row = "no rank has that stage" if rank is None else f"rank {rank}, the row  {_row(schedule, rank)}"
    needed = {
        "F": "F of each stage and turn",
        "B": "B, or I and W, of each stage and turn",
        "I": "I beside each W",
        "W": "W beside each I",
        "U": "U of each stage, or of none",
    }
    last, end = schedule.stages[-1], schedule.turns[-1]
    return Error(
        f"{action} is missing",
        where=row,
        expected=needed[action.kind],
        got=f"rows of stages 0 .. {last} and turns 0 .. {end}, without it",
        remedy=f"add {action}",
    )


def _row(schedule: Schedule, rank: int, most: int = 12) -> str:
    row = schedule.rows[rank]
    return " ".join(map(str, row[:most])) + " ..." * (len(row) > most)
