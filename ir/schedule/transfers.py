"""Sends and receives: what follows from a schedule for each rank, in an order in which nobody waits for another.

What an action makes for the stage beside it is sent where the action stands in *one* order of all actions of all ranks
(:attr:`.Simulation.order`). A rank's actions and transfers are what that order has of it. So also where a send waits
until its receive was called, and a receive until its send was, the first that is not done yet can always be done.
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
    order = Simulation.of(schedule, costs).order
    targets: dict[Action, list[int]] = {}
    for action, needs in dependencies(schedule).items():
        for made in needs:
            target = schedule.rank_of(action.stage)
            if target != schedule.rank_of(made.stage):
                targets.setdefault(made, []).append(target)
    rows: list[list[Action | Transfer]] = [[] for _ in schedule.ranks]
    for action in order:
        source = schedule.rank_of(action.stage)
        rows[source].append(action)
        for target in targets.get(action, ()):
            transfer = Transfer(action, source, target)
            rows[source].append(transfer)
            rows[target].append(transfer)
    return tuple(map(tuple, rows))
