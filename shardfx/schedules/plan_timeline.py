"""The timeline of a plan: what each rank does when, foreseen from the cost of its program on a machine.

>>> timeline = pm.timeline()
>>> timeline.step, timeline.bubble, timeline.exposed, timeline.hidden
(0.0113, 0.216, 0.0004, 0.0021)
>>> print(timeline.text(0))                     # what each stream of rank 0 does when
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from shardfx.ir.cost.live.storages import Footprint
from shardfx.ir.cost.machine import Machine
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.schedule.actions import Action, Schedule
from shardfx.ir.schedule.simulation import Span
from shardfx.ir.timing import foreseen
from shardfx.ir.timing.doings import doings
from shardfx.ir.timing.stream_order import COMPUTE
from shardfx.memory.rank_memory import RankMemory

from .timeline import Timeline, complete_event


@dataclass(frozen=True)
class PlanTimeline(Timeline):
    """When each action of a plan starts and ends, in seconds, row by row of its schedule.

    The row of a rank is that of its place along the axis of stages: ranks at one place do the same. Without stages
    there is one row, of a forward, a backward and an update.
    """

    memory: tuple[int, ...] = ()
    """For each rank the bytes that it holds at most: of ranks at one place, those of the first, which holds most."""
    host: float = 0.0
    """The seconds that the host of the slowest rank spends on its calls."""

    planned: Schedule | None = None
    """The schedule of the plan: ``schedule`` is what ranks really do, with their updates."""
    interrupted: Mapping[Action, tuple[Span, ...]] = field(default_factory=dict)
    """When actions are done that others interrupt: turns that are interleaved."""

    def pieces(self, action: Action) -> tuple[Span, ...]:
        """From when to when an action is done."""
        return self.interrupted.get(action) or super().pieces(action)

    @cached_property
    def step(self) -> float:
        """The seconds of a step: until the last rank is done, or its host with issuing the calls."""
        return max(self.host, *(course.end for course in self.courses))

    @property
    def exposures(self) -> tuple[float, ...]:
        """For each row the seconds of communication that no computing hides."""
        return tuple(course.exposed for course in self.courses)

    @property
    def exposed(self) -> float:
        """The seconds of communication that no computing hides, on the rank that has most of them."""
        return max(self.exposures)

    @property
    def hidden(self) -> float:
        """The seconds of communication on that rank that go on while it computes."""
        most = max(self.courses, key=lambda course: course.exposed)
        return max(most.communication - most.exposed, 0.0)

    def _beside(self, ranks: Sequence[int]) -> tuple[dict[int, str], list[dict[str, Any]]]:
        tracks: dict[int, str] = {}
        events = []
        for rank in ranks:
            course = self.courses[self._rows[rank]]
            if course.before.length:
                events.append(complete_event("once", "once", course.before, rank))
            for stall in course.stalls:
                exposed = stall.exposed * 1e6
                events.append(complete_event(f"waits for {stall.what}", "wait", stall.span, rank, exposed=exposed))
            for link, transfers in course.links.items():
                track = len(ranks) + len(tracks)
                tracks[track] = f"rank {rank}: {link}"
                events += [complete_event(each.what, "communication", each.span, track) for each in transfers]
        return tracks, events

    def text(self, rank: int = 0) -> str:
        """What the streams of a rank do when, a line each: when it starts and how long it takes, in microseconds.

        Raises:
            Error: the mesh has no such rank.
        """
        if not 0 <= rank < len(self._rows):
            known = f"a rank, 0 .. {len(self._rows) - 1}"
            raise Error(f"no rank {rank} on this mesh", where=f"timeline.text({rank})", expected=known, got=rank)
        row = self._rows[rank]
        course, actions = self.courses[row], self.schedule.rows[row]
        lines = [(piece, COMPUTE, str(action)) for action in actions for piece in self.pieces(action)]
        if course.before.length:
            lines.append((course.before, COMPUTE, "once"))
        lines += [(transfer.span, transfer.link, transfer.what) for transfer in course.transfers]
        lines += [(stall.span, COMPUTE, f"waits for {stall.what}") for stall in course.stalls]
        lines.sort(key=lambda line: line[0].start)
        return "\n".join(
            f"{span.start * 1e6:12.1f} {span.length * 1e6:12.1f}  {stream:<14} {what}" for span, stream, what in lines
        )

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """For each row how long it works, what is done before all turns included."""
        return tuple(
            sum(piece.length for action in row for piece in self.pieces(action)) + before.length
            for row, before in zip(self.schedule.rows, self.before, strict=True)
        )

    def __str__(self) -> str:
        step, exposed, hidden = (f"{seconds * 1e3:.3g} ms" for seconds in (self.step, self.exposed, self.hidden))
        return f"step {step}, bubble {self.bubble:.1%}, communication: {exposed} exposed, {hidden} hidden"


def plan_timeline(
    graph: Graph,
    program: Callable[[int], RankProgram],
    machine: Machine,
    planned_for: Machine,
    replayed: Callable[[RankProgram], Footprint],
) -> PlanTimeline:
    """The timeline of a planned graph.

    Args:
        program: what a rank runs.
        machine: whose rates count; of links that the mesh does not state, too.
        planned_for: the machine of the plan.
        replayed: the replay of a program (:func:`shardfx.ir.cost.replay.replay`).
    """
    mesh = machine.connect(graph.mesh, instead_of=planned_for)
    places = rank_places(graph)
    firsts = [places.index(place) for place in range(max(places) + 1)]
    rows: list[Any] = []
    peaks: list[int] = []
    host = 0.0
    for rank in firsts:
        made = program(rank)
        footprint = replayed(made)
        rows.append(doings(made, footprint, machine, mesh))
        peaks.append(RankMemory(made, footprint).peak)
        host = max(host, footprint.cost.issuing(machine))
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
        courses,
        memory=tuple(peaks[place] for place in places),
        host=host,
        planned=graph.pipeline.schedule if graph.pipeline is not None else None,
        interrupted={
            action: pieces for course in courses for action, pieces in course.pieces.items() if len(pieces) > 1
        },
    )


def rank_places(graph: Graph) -> tuple[int, ...]:
    """For each rank its place along the axis of stages."""
    mesh, pipeline = graph.mesh, graph.pipeline
    return tuple(mesh.coords(rank)[pipeline.axis] if pipeline is not None else 0 for rank in range(mesh.size))
