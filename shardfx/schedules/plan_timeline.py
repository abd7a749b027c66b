"""The timeline of a plan: what each rank does when, foreseen from the cost of its program on a machine.

>>> timeline = pm.timeline()
>>> timeline.step, timeline.bubble, timeline.exposed
(0.0113, 0.216, 0.0004)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from shardfx.ir.cost.fake_calls import FakeCalls
from shardfx.ir.cost.live.transport import Transport
from shardfx.ir.cost.machine import Machine
from shardfx.ir.cost.replay import replay
from shardfx.ir.graph import Graph
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.schedule.actions import Action, Schedule
from shardfx.ir.schedule.simulation import Span
from shardfx.ir.timing import foreseen
from shardfx.ir.timing.doings import doings
from shardfx.memory.rank_memory import RankMemory

from .timeline import Timeline


@dataclass(frozen=True)
class PlanTimeline(Timeline):
    """When each action of a plan starts and ends, in seconds, row by row of its schedule.

    The row of a rank is that of its place along the axis of stages: ranks at one place do the same. Without stages
    there is one row, of a forward, a backward and an update.
    """

    exposures: tuple[float, ...] = ()
    """For each row the seconds of communication that no computing hides."""
    memory: tuple[int, ...] = ()
    """For each rank the bytes that it holds at most: of ranks at one place, those of the first, which holds most."""

    planned: Schedule | None = None
    """The schedule of the plan: ``schedule`` is what ranks really do, with their updates."""
    interrupted: Mapping[Action, tuple[Span, ...]] = field(default_factory=dict)
    """When actions are done that others interrupt: turns that are interleaved."""

    def pieces(self, action: Action) -> tuple[Span, ...]:
        """From when to when an action is done."""
        return self.interrupted.get(action) or super().pieces(action)

    @property
    def exposed(self) -> float:
        """The seconds of communication that no computing hides, on the rank that has most of them."""
        return max(self.exposures)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """For each row how long it works, what is done before all turns included."""
        return tuple(
            sum(piece.length for action in row for piece in self.pieces(action)) + before.length
            for row, before in zip(self.schedule.rows, self.before, strict=True)
        )

    def __str__(self) -> str:
        return f"step {self.step * 1e3:.3g} ms, bubble {self.bubble:.1%}, exposed {self.exposed * 1e3:.3g} ms"


def plan_timeline(
    graph: Graph, program: Callable[[int], RankProgram], machine: Machine, planned_for: Machine, transport: Transport
) -> PlanTimeline:
    """The timeline of a planned graph.

    Args:
        program: what a rank runs.
        machine: whose rates count; of links that the mesh does not state, too.
        planned_for: the machine of the plan.
        transport: as for :func:`shardfx.ir.cost.replay.replay`.
    """
    mesh, fakes = machine.connect(graph.mesh, instead_of=planned_for), FakeCalls()
    places = rank_places(graph)
    firsts = [places.index(place) for place in range(max(places) + 1)]
    rows: list[Any] = []
    peaks: list[int] = []
    for rank in firsts:
        made = program(rank)
        footprint = replay(made, transport, fakes)
        rows.append(doings(made, footprint, machine, mesh))
        peaks.append(RankMemory(made, footprint).peak)
    courses = foreseen(rows)
    spans: dict[Action, Span] = {action: span for course in courses for action, span in course.spans.items()}
    schedule = Schedule(tuple(tuple(course.spans) or (Action("F", place),) for place, course in enumerate(courses)))
    for row in schedule.rows:
        for action in row:
            spans.setdefault(action, Span(0.0, 0.0))
    return PlanTimeline(
        schedule,
        spans,
        tuple(course.before for course in courses),
        places,
        tuple(course.exposed for course in courses),
        tuple(peaks[place] for place in places),
        graph.pipeline.schedule if graph.pipeline is not None else None,
        {action: pieces for course in courses for action, pieces in course.pieces.items() if len(pieces) > 1},
    )


def rank_places(graph: Graph) -> tuple[int, ...]:
    """For each rank its place along the axis of stages."""
    mesh, pipeline = graph.mesh, graph.pipeline
    return tuple(mesh.coords(rank)[pipeline.axis] if pipeline is not None else 0 for rank in range(mesh.size))
