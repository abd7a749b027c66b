"""Pictures of simulated schedules, and traces for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from shardfx.ir.cost.amounts import Cost
from shardfx.ir.cost.footprint import Footprint
from shardfx.ir.cost.machine import Machine
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph
from shardfx.ir.mesh import Mesh
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.schedule.actions import KINDS, Action, Schedule
from shardfx.ir.schedule.simulation import COSTS, Costs, ScheduleReport, Span
from shardfx.ir.timing.rank_tasks import rank_tasks
from shardfx.ir.timing.simulate import RankTimeline, simulate_ranks
from shardfx.memory.rank_memory import RankMemory
from shardfx.runtime.recording import Recording

COMPUTE = "compute"


class StreamEvent(NamedTuple):
    """An interval on a stream of a rank."""

    span: Span
    stream: str
    what: str
    category: str
    args: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Timeline(ScheduleReport):
    """When each action of a schedule starts and ends, with a picture and a trace."""

    places: tuple[int, ...] = ()
    """For each rank its row; none: the ranks are the rows."""
    courses: tuple[RankTimeline, ...] = ()
    """For each row of a plan when it computes, and what goes over its links meanwhile."""

    def draw(self, path: str | Path, title: str = "Schedule") -> Path:
        """Draw it as one SVG file: a row for each rank, actions in the colours of their kinds, the bubble hatched; of a
        plan one for each link below, and exposed communication marked."""
        from shardfx.visualize import draw_schedule

        return draw_schedule(self, path, title, self._rows, self.before, self.courses)

    def trace(self, path: str | Path) -> Path:
        """Write it as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing show: a track for each stream of
        each rank.

        Costs are taken as seconds; the file has microseconds.
        """
        ranks = range(len(self._rows))
        links: dict[tuple[int, str], int] = {}
        events = []
        for rank in ranks:
            for each in self.events(rank):
                link = rank, each.stream
                track = rank if each.stream == COMPUTE else links.setdefault(link, len(ranks) + len(links))
                events.append(trace_event(each, track))
        tracks = {rank: f"rank {rank}" for rank in ranks}
        tracks |= {track: f"rank {rank}: {link}" for (rank, link), track in links.items()}
        return write_trace(path, tracks, events)

    def events(self, rank: int) -> list[StreamEvent]:
        """What a rank does on its streams."""
        row = self.schedule.rows[self._rows[rank]]
        return [action_event(action, segment) for action in row for segment in self.segments(action)]

    @property
    def before(self) -> tuple[Span, ...]:
        """For each row what is done once, before all micro-batches."""
        return tuple(course.before for course in self.courses)

    @property
    def _rows(self) -> tuple[int, ...]:
        return self.places or tuple(self.schedule.ranks)


def action_event(action: Action, span: Span) -> StreamEvent:
    """An action, on the stream on which a rank computes."""
    args = {"stage": action.stage, "microbatch": action.microbatch}
    return StreamEvent(span, COMPUTE, str(action), KINDS[action.kind], args)


def trace_event(event: StreamEvent, track: int) -> dict[str, Any]:
    """An event of a Chrome trace; seconds become microseconds."""
    times = {"ts": event.span.start * 1e6, "dur": event.span.length * 1e6}
    return {"name": event.what, "cat": event.category, "ph": "X", "pid": 0, "tid": track, **times, "args": event.args}


def write_trace(path: str | Path, tracks: Mapping[int, str], events: Sequence[dict[str, Any]]) -> Path:
    """A file that Perfetto reads: tracks by their numbers, with their names, and what is on them."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    named = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": track, "args": {"name": name}}
        for track, name in tracks.items()
    ]
    content = {"traceEvents": [*named, *events], "displayTimeUnit": "ms"}
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return path


def simulate(schedule: Schedule, costs: Costs = COSTS, comm: float = 0.0) -> Timeline:
    """When each action starts and ends, if each rank starts it as soon as it can.

    Args:
        schedule: what is done where, in which order.
        costs: how long an action takes, by kind: a number for all stages, or one for each.
        comm: how long it takes from an action's end until what it made is on another rank.

    Raises:
        Error: the schedule is not complete, or cannot be done; a cost is missing, unknown, negative or not finite.
    """
    return Timeline.of(schedule, costs, comm)


@dataclass(frozen=True, kw_only=True)
class PlanTimeline(Timeline):
    """When each action of a plan starts and ends, in seconds, row by row of its schedule.

    The row of a rank is that of its place along the axis of stages: ranks at one place do the same. Without stages
    there is one row, of a forward, a backward and an update.
    """

    memory: tuple[int, ...] = ()
    """For each rank the bytes that it holds at most: of ranks at one place, those of the first, which holds most."""
    host: float = 0.0
    """The seconds that the host of the slowest rank spends on its calls."""

    cost: Cost
    """The work of rank 0, whose parts :attr:`compute`, :attr:`communication` and :attr:`carrying` are in seconds."""
    machine: Machine
    mesh: Mesh
    planned: Schedule | None = None
    """The schedule of the plan: ``schedule`` is what ranks really do, with their updates."""

    def segments(self, action: Action) -> tuple[Span, ...]:
        """From when to when an action is done: in parts, where micro-batches are interleaved."""
        return self.courses[self.schedule.rank_of(action.stage)].segments.get(action) or super().segments(action)

    @cached_property
    def step(self) -> float:
        """The seconds of a step: until the last rank is done, or its host with issuing the calls."""
        return max(self.host, *(course.end for course in self.courses))

    @property
    def total(self) -> float:
        """The seconds of a step, as :attr:`step`."""
        return self.step

    @property
    def compute(self) -> float:
        """Seconds of everything but communication."""
        return self.cost.computing(self.machine)

    @property
    def communication(self) -> float:
        """Seconds of communication, by the links of the mesh."""
        return self.cost.sending(self.machine, self.mesh)

    @property
    def carrying(self) -> float:
        """Seconds of offloading and fetching, by the machine's link to its other memory."""
        return self.cost.copying(self.machine)

    @property
    def exposed(self) -> float:
        """The seconds of communication that no computing hides, on the rank that has most of them."""
        return max(course.exposed for course in self.courses)

    @property
    def hidden(self) -> float:
        """The seconds of communication on that rank that go on while it computes."""
        most = max(self.courses, key=lambda course: course.exposed)
        return max(most.communication - most.exposed, 0.0)

    def events(self, rank: int) -> list[StreamEvent]:
        """What a rank does on its streams: actions, waits, and the transfers of each link."""
        course = self.courses[self._rows[rank]]
        found = super().events(rank)
        if course.before.length:
            found.append(StreamEvent(course.before, COMPUTE, "once", "once"))
        for stall in course.stalls:
            exposed = {"exposed": stall.exposed * 1e6}
            found.append(StreamEvent(stall.span, COMPUTE, f"waits for {stall.what}", "wait", exposed))
        return found + [StreamEvent(each.span, each.link, each.what, "communication") for each in course.transfers]

    def text(self, rank: int = 0) -> str:
        """What the streams of a rank do when, a line each: when it starts and how long it takes, in microseconds.

        Raises:
            Error: the mesh has no such rank.
        """
        if not 0 <= rank < len(self._rows):
            known = f"a rank, 0 .. {len(self._rows) - 1}"
            raise Error(f"no rank {rank} on this mesh", where=f"timeline.text({rank})", expected=known, got=rank)
        return "\n".join(
            f"{each.span.start * 1e6:12.1f} {each.span.length * 1e6:12.1f}  {each.stream:<14} {each.what}"
            for each in sorted(self.events(rank), key=lambda event: event.span.start)
        )

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """For each row how long it works, what is done before all micro-batches included."""
        return tuple(
            sum(segment.length for action in row for segment in self.segments(action)) + before.length
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
    made = [program(rank) for rank in first_ranks(graph)]
    footprints = [replayed(each) for each in made]
    peaks = [RankMemory(*each).peak for each in zip(made, footprints, strict=True)]
    courses = simulate_ranks([rank_tasks(*each, machine, mesh) for each in zip(made, footprints, strict=True)])
    spans: dict[Action, Span] = {action: span for course in courses for action, span in course.spans.items()}
    schedule = Schedule(tuple(tuple(course.spans) or (Action("F", place),) for place, course in enumerate(courses)))
    for row in schedule.rows:
        for action in row:
            spans.setdefault(action, Span(0.0, 0.0))
    return PlanTimeline(
        schedule,
        spans,
        places,
        courses,
        memory=tuple(peaks[place] for place in places),
        host=max(each.cost.issuing(machine) for each in footprints),
        cost=footprints[0].cost,
        machine=machine,
        mesh=mesh,
        planned=graph.pipeline.schedule if graph.pipeline is not None else None,
    )


def rank_places(graph: Graph) -> tuple[int, ...]:
    """For each rank its place along the axis of stages."""
    mesh, pipeline = graph.mesh, graph.pipeline
    return tuple(mesh.coords(rank)[pipeline.axis] if pipeline is not None else 0 for rank in range(mesh.size))


def first_ranks(graph: Graph) -> list[int]:
    """The first rank at each place along the axis of stages; of no stages, the first."""
    places = rank_places(graph)
    return [places.index(place) for place in range(max(places) + 1)]


def write_recording(path: str | Path, recording: Recording) -> Path:
    """A trace of what each rank did in all steps."""
    ranks = sorted({rank for step in recording.steps for rank in step.rows})
    done = [
        trace_event(action_event(action, span), rank)
        for step in recording.steps
        for rank, row in step.rows.items()
        for action, span in row
    ]
    return write_trace(path, {rank: f"rank {rank}" for rank in ranks}, done)
