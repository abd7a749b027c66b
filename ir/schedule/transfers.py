"""Sends and receives: what follows from a schedule for each rank, in an order in which nobody waits for another.

All actions and transfers of all ranks stand in *one* order, by the times of a simulation: actions by their ends, and a
transfer behind what has ended when it can start. A rank's actions, sends and receives are what that order has of it.
So also where a send waits until its receive was called, and a receive until its send was, the first that is not done
yet can always be done.
"""

from __future__ import annotations

from typing import NamedTuple

from .actions import Action, Schedule
from .dependencies import dependencies
from .simulation import COSTS, Costs, Simulation


class Transfer(NamedTuple):
    """What ``made`` gives goes from rank ``source``, which sends, to rank ``target``, which receives."""

    made: Action
    source: int
    target: int

    def __str__(self) -> str:
        return f"{self.made}:{self.source}>{self.target}"


def with_transfers(schedule: Schedule, costs: Costs = COSTS) -> tuple[tuple[Action | Transfer, ...], ...]:
    """For each rank its actions, sends and receives in order.

    Args:
        schedule: what is done where, in which order.
        costs: how long an action takes, by kind: transfers stand where they can start then.

    Raises:
        Error: the schedule cannot be done, or these are no costs of it.
    """
    simulation = Simulation.of(schedule, costs)
    targets: dict[Action, list[int]] = {}
    for action, needs in dependencies(schedule).items():
        for made in needs:
            target = schedule.rank_of(action.stage)
            if target != schedule.rank_of(made.stage):
                targets.setdefault(made, []).append(target)
    moments: list[tuple[tuple[float, float], Action | Transfer]] = []
    for action, span in simulation.spans.items():
        transfers = (Transfer(action, schedule.rank_of(action.stage), target) for target in targets.get(action, ()))
        moments += [((span.end, span.start), action), *(((span.end, span.end), each) for each in transfers)]
    rows: list[list[Action | Transfer]] = [[] for _ in schedule.ranks]
    for _, each in sorted(moments, key=lambda moment: moment[0]):
        for rank in (each.source, each.target) if isinstance(each, Transfer) else (schedule.rank_of(each.stage),):
            rows[rank].append(each)
    return tuple(map(tuple, rows))
