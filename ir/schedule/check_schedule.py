"""Is a schedule complete, can it be done, and what does it keep and cost?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from shardfx.ir.errors import Error

from .actions import Action, Schedule
from .complete import check_complete
from .simulation import COSTS, Costs, Simulation

KEEPS = {"F": 1, "B": -1, "W": -1, "I": 0, "U": 0}
"""How many turns more a rank keeps for the backward when an action is done."""

NUMBERS = {"stages": "stages", "turns": "turns", "ranks": "ranks", "live": "live turns"}
"""What is counted, by the option that says it."""


@dataclass(frozen=True)
class ScheduleReport:
    """What a checked schedule keeps and costs.

    A turn is *live* at a stage from its ``F`` until its ``B`` or ``W`` is done. A rank with several stages counts a
    turn once for each of them.
    """

    live: tuple[tuple[int, ...], ...]
    """For each rank and each of its actions, how many turns are live while it is done."""
    simulation: Simulation

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        """For each rank the most turns that are live at a time."""
        return tuple(map(max, self.live))

    @property
    def step(self) -> float:
        """From the start of the first action to the end of the last, in the unit of the costs."""
        return self.simulation.step

    @property
    def bubble(self) -> float:
        """The share of the step in which ranks do nothing."""
        return self.simulation.bubble

    @property
    def order(self) -> tuple[Action, ...]:
        """All actions of all ranks in one order that agrees with all rows and dependencies."""
        return self.simulation.order

    def __str__(self) -> str:
        return (
            f"live turns {', '.join(map(str, self.peaks))} at most on ranks 0 .. {len(self.peaks) - 1}; "
            f"step {self.step:g}, bubble {self.bubble:.1%}"
        )


def check_schedule(schedule: Schedule, *, stages: int, turns: int, costs: Costs = COSTS) -> ScheduleReport:
    """Check that a schedule does all that is to be done, once, where and when it can be done.

    Args:
        schedule: what is done where, in which order.
        stages: how many stages there are.
        turns: how many turns (micro-batches) there are.
        costs: how long an action takes, by kind; for the report alone.

    Raises:
        Error: it is no schedule; an action is missing, stands twice, on another rank than others of its stage, or is of
            a stage or turn that is not there; a backward is there whole and in halves; some stages are updated and
            others not; an action stands before one for which it waits, or ranks wait for one another. It names rank,
            action and row.
    """
    if not isinstance(schedule, Schedule):
        raise Error(
            "this is no schedule",
            where="check_schedule(schedule, ...)",
            expected="an sx.Schedule",
            got=f"{schedule!r:.100} of type {type(schedule).__name__}",
            remedy="sx.Schedule.parse reads a text, sx.make_schedule makes one by its name",
        )
    check_number("stages", stages)
    check_number("turns", turns)
    check_complete(schedule, stages, turns)
    simulation = Simulation.of(schedule, costs)
    return ScheduleReport(tuple(tuple(_live(row)) for row in schedule.rows), simulation)


def _live(row: tuple[Action, ...]) -> Iterator[int]:
    """How many turns are live while each action is done: what is given up is there until the action is done."""
    after = accumulate(KEEPS[action.kind] for action in row)
    return (kept - min(KEEPS[action.kind], 0) for kept, action in zip(after, row, strict=True))


def check_number(what: str, number: object) -> None:
    """Check what an option of :data:`NUMBERS` says.

    Raises:
        Error: it is no int of at least 1.
    """
    if type(number) is not int or number < 1:
        raise Error(
            f"this is no number of {NUMBERS[what]}",
            where=what,
            expected="an int of at least 1",
            got=repr(number),
            remedy=f"say {what}=1 or more" + (", or leave it out" if what in ("ranks", "live") else ""),
        )
