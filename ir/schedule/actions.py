"""Schedules: for each rank a row of actions (kind, stage, micro-batch), and the placement of stages on a mesh axis.

>>> schedule = Schedule.parse('''
... F0.0 F0.1 B0.0 B0.1
... F1.0 B1.0 F1.1 B1.1
... ''')
>>> schedule.rows[1][2], schedule.rank_of(1)
(F1.1, 1)
>>> pipelined = Pipelined("pp", "mb", schedule)
>>> pipelined.homes, pipelined.is_here((1,), {"pp": 0})
((0, 1), False)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shardfx.ir.errors import Error

KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward for inputs",
    "W": "backward for weights",
    "U": "update",
}
"""Kinds of actions; ``I`` and ``W`` are the halves of ``B``. All but the update run once a micro-batch."""
WORD = re.compile(r"([FBIW])(\d+)\.(\d+)|(U)(\d+)", re.ASCII)
NEAR = 3


class Action(NamedTuple):
    """One kind of work for one stage and one micro-batch: ``F0.3`` is the forward of stage 0, micro-batch 3, ``U0`` an
    update."""

    kind: str
    stage: int
    microbatch: int = 0

    def __str__(self) -> str:
        return f"U{self.stage}" if self.kind == "U" else f"{self.kind}{self.stage}.{self.microbatch}"

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Schedule:
    """The actions of each rank, in execution order.

    ``str`` gives a row a rank, and :meth:`parse` reads it; :func:`.simulation.check_schedule` checks completeness.
    """

    rows: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        rows = tuple(self.rows) if _is_sequence(self.rows) else ()
        if not rows or not all(_is_sequence(row) and row for row in rows):
            raise Error(
                "a schedule has a row for each rank, and actions in each",
                where="Schedule(...)",
                expected="Schedule(((Action(...), ...), ...)): for each rank the actions in order",
                got=repr(self.rows)[:200],
                remedy="take one of sx.schedules.make_schedule, or write rows and read them by Schedule.parse",
            )
        wrong = next(((rank, each) for rank, row in enumerate(rows) for each in row if not _is_action(each)), None)
        if wrong:
            raise Error(
                "this is no action",
                where=f"row {wrong[0]}",
                expected="an Action of kind F, B, I, W or U, with a stage and a micro-batch from 0 (U: micro-batch 0)",
                got=f"Action{tuple(wrong[1])}" if type(wrong[1]) is Action else repr(wrong[1])[:200],
                remedy="write sx.schedules.Action(kind, stage, micro-batch)",
            )
        object.__setattr__(self, "rows", tuple(tuple(row) for row in rows))

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Parse a schedule: a line for each rank, actions separated by blanks."""
        if not isinstance(text, str):
            raise Error(
                "this is no text of a schedule",
                where="Schedule.parse(text)",
                expected="a row for each rank, such as 'F0.0 B0.0'",
                got=f"{text!r:.100} of type {type(text).__name__}",
                remedy="str(schedule) writes one",
            )
        lines = [line.split() for line in text.splitlines() if line.strip()]
        return cls(tuple(tuple(_read(word, rank, i) for i, word in enumerate(row)) for rank, row in enumerate(lines)))

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, row)) for row in self.rows)

    def __iter__(self) -> Iterator[Action]:
        return (action for row in self.rows for action in row)

    @cached_property
    def ranks(self) -> range:
        """The ranks, one per row."""
        return range(len(self.rows))

    @cached_property
    def stages(self) -> range:
        """All stages, up to the highest that occurs."""
        return range(1 + max(action.stage for action in self))

    @cached_property
    def microbatches(self) -> range:
        """All micro-batches, up to the highest that occurs."""
        return range(1 + max(action.microbatch for action in self))

    @cached_property
    def _homes(self) -> dict[int, int]:
        return {action.stage: rank for rank in reversed(self.ranks) for action in self.rows[rank]}

    def rank_of(self, stage: int) -> int:
        """The rank of a stage: the first with an action of it."""
        if stage not in self._homes:
            raise Error(
                f"no rank has an action of stage {stage}",
                where="Schedule.rank_of(stage)",
                expected=f"a stage of 0 .. {self.stages[-1]}",
                got=stage,
                remedy="ask for a stage that is there",
            )
        return self._homes[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in order."""
        return tuple(sorted({action.stage for action in self.rows[rank]}))

    def with_updates(self) -> Schedule:
        """The schedule with the update of each stage at the end of its row."""
        return Schedule(
            tuple((*row, *(Action("U", stage) for stage in self.stages_of(r))) for r, row in enumerate(self.rows))
        )

    def where(self, rank: int, index: int) -> str:
        """A label of an action for errors: its rank, its place and its neighbors in the row."""
        row = self.rows[rank]
        near = " ".join(map(str, row[max(0, index - NEAR) : index + NEAR + 1]))
        left, right = "... " * (index > NEAR), " ..." * (index + NEAR + 1 < len(row))
        return f"rank {rank}, action {index} ({row[index]}) of the row  {left}{near}{right}"


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_action(value: object) -> bool:
    if type(value) is not Action or value.kind not in KINDS or (value.kind == "U" and value.microbatch):
        return False
    return type(value.stage) is type(value.microbatch) is int and value.stage >= 0 <= value.microbatch


def _read(word: str, rank: int, index: int) -> Action:
    match = WORD.fullmatch(word)
    if match is None:
        raise Error(
            f"{word!r} is no action",
            where=f"row {rank}, word {index}",
            expected="a kind F, B, I or W, a stage, a dot and a micro-batch, such as F0.3; or U and a stage: U0",
            got=word,
            remedy="write a row for each rank, and blanks between the actions",
        )
    kind, stage, microbatch, update, updated = match.groups()
    return Action(update, int(updated)) if update else Action(kind, int(stage), int(microbatch))


@dataclass(frozen=True)
class Pipelined:
    """Stages on an axis of the mesh.

    Args:
        axis: the mesh axis whose ranks have the stages.
        microbatches: the loop axis of the schedule's micro-batches; empty without micro-batches.
        schedule: a row for each coordinate of the axis.
    """

    axis: str
    microbatches: str
    schedule: Schedule

    @cached_property
    def homes(self) -> tuple[int, ...]:
        """The coordinate of each stage."""
        return tuple(map(self.schedule.rank_of, self.schedule.stages))

    def places(self, at: Sequence[int]) -> tuple[int, ...]:
        """The distinct coordinates of some stages, in order; of all stages for an empty sequence."""
        return tuple(sorted({self.homes[stage] for stage in at})) if at else tuple(self.schedule.ranks)

    def is_here(self, at: Sequence[int], coords: Mapping[str, int]) -> bool:
        """Whether a rank has one of these stages; true for an empty sequence, which means all."""
        return not at or any(self.homes[stage] == coords[self.axis] for stage in at)
