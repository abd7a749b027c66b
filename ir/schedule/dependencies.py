"""What an action waits for, and an order of all actions of all ranks in which none waits for a later one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from shardfx.ir.errors import Error

from .actions import Action, Schedule


def dependencies(schedule: Schedule) -> Mapping[Action, tuple[Action, ...]]:
    """For each action those that must be done before it, wherever they are, whatever its row says.

    Those of :func:`needs`; ``U`` waits for all ``B`` and ``W`` of its stage.
    """
    split = {(action.stage, action.turn) for action in schedule if action.kind == "I"}

    def ends(stage: int) -> tuple[Action, ...]:
        return tuple(Action("W" if (stage, turn) in split else "B", stage, turn) for turn in schedule.turns)

    def back(stage: int, turn: int) -> Action:
        return Action("I" if (stage, turn) in split else "B", stage, turn)

    last = schedule.stages[-1]
    return {action: ends(action.stage) if action.kind == "U" else needs(action, last, back) for action in schedule}


def needs(action: Action, last: int, back: Callable[[int, int], Action]) -> tuple[Action, ...]:
    """What ``F``, ``B``, ``I`` and ``W`` wait for.

    ``F`` waits for ``F`` of the stage before; ``B`` and ``I`` for their own ``F``, and for ``B`` or ``I`` of the stage
    behind; ``W`` for its ``I``.

    Args:
        action: what waits.
        last: the last stage.
        back: the action that makes the gradients of a stage's inputs in a turn, ``B`` or ``I``.
    """
    kind, stage, turn = action
    if kind == "F":
        return (Action("F", stage - 1, turn),) if stage else ()
    if kind == "W":
        return (Action("I", stage, turn),)
    return (Action("F", stage, turn), *((back(stage + 1, turn),) if stage < last else ()))


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
        remedy=f"{earlier}, or take a schedule of sx.make_schedule",
    )
