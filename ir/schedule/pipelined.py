"""A graph in stages: where each of them lies on the mesh, and in which order a rank does what there is for its own.

>>> pipelined = Pipelined("pp", "mb", Schedule.parse('''
... F0.0 F0.1 B0.0 B0.1
... F1.0 B1.0 F1.1 B1.1
... '''))
>>> pipelined.homes, pipelined.is_here((1,), {"pp": 0})
((0, 1), False)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from .actions import Schedule


@dataclass(frozen=True)
class Pipelined:
    """Stages on an axis of the mesh.

    Args:
        axis: the axis of ranks that stages lie along.
        time: the axis of turns that the schedule is of; empty where there are no turns.
        schedule: a row for each coordinate of the axis.
    """

    axis: str
    time: str
    schedule: Schedule

    @cached_property
    def homes(self) -> tuple[int, ...]:
        """The coordinate that each stage lies at."""
        return tuple(map(self.schedule.rank_of, self.schedule.stages))

    def places(self, at: Sequence[int]) -> tuple[int, ...]:
        """The coordinates of some stages, each once, in order; of all of them for none."""
        return tuple(sorted({self.homes[stage] for stage in at})) if at else tuple(self.schedule.ranks)

    def is_here(self, at: Sequence[int], coords: Mapping[str, int]) -> bool:
        """Whether a rank has one of some stages; for none, which is everywhere, it has."""
        return not at or any(self.homes[stage] == coords[self.axis] for stage in at)
