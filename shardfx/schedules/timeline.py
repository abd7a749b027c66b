"""A simulated schedule to look at: as a picture, and as a trace for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from shardfx.ir.cost.footprint import Footprint
from shardfx.ir.cost.machine import Machine
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.schedule.actions import KINDS, Action, Schedule
from shardfx.ir.schedule.simulation import COSTS, Costs, Simulation, Span
from shardfx.ir.timing.rank_tasks import rank_tasks
from shardfx.ir.timing.simulate import RankTimeline, simulate_ranks
from shardfx.ir.timing.stream_order import COMPUTE
from shardfx.memory.rank_memory import RankMemory
from shardfx.runtime.distributed.groups import is_dry_run
from shardfx.runtime.engine import Probe
from shardfx.runtime.recording import Recording


@dataclass(frozen=True)
class Timeline(Simulation):
    """When each action of a schedule starts and ends, with a picture and a trace."""

    before: tuple[Span, ...] = ()
    """For each row what is done once, before all micro-batches."""
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
        done = [
            trace_event(action, segment, rank)
            for action in self.order
            for rank in ranks
            if action in self._in_row[self._rows[rank]]
            for segment in self.segments(action)
        ]
        tracks, beside = self._beside(ranks)
        return write_trace(path, rank_tracks(ranks) | tracks, [*done, *beside])

    def _beside(self, ranks: Sequence[int]) -> tuple[dict[int, str], list[dict[str, Any]]]:
        """Further tracks, and what is on all of them beside actions."""
        return {}, []

    @property
    def _rows(self) -> tuple[int, ...]:
        return self.places or tuple(self.schedule.ranks)

    @cached_property
    def _in_row(self) -> tuple[frozenset[Action], ...]:
        return tuple(map(frozenset, self.schedule.rows))


def trace_event(action: Action, span: Span, rank: int) -> dict[str, Any]:
    """An action on the stream on which a rank computes."""
    return complete_event(str(action), KINDS[action.kind], span, rank, stage=action.stage, microbatch=action.microbatch)


def complete_event(name: str, category: str, span: Span, track: int, **args: Any) -> dict[str, Any]:
    """Something on a track; seconds become microseconds."""
    times = {"ts": span.start * 1e6, "dur": span.length * 1e6}
    return {"name": name, "cat": category, "ph": "X", "pid": 0, "tid": track, **times, "args": args}


def rank_tracks(ranks: Iterable[int]) -> dict[int, str]:
    """The tracks of the streams on which ranks compute, with their names."""
    return {rank: f"rank {rank}" for rank in ranks}


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
    """When actions are done that others interrupt: micro-batches that are interleaved."""

    def segments(self, action: Action) -> tuple[Span, ...]:
        """From when to when an action is done."""
        return self.interrupted.get(action) or super().segments(action)

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
        lines = [(segment, COMPUTE, str(action)) for action in actions for segment in self.segments(action)]
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
    firsts = [places.index(place) for place in range(max(places) + 1)]
    rows: list[Any] = []
    peaks: list[int] = []
    host = 0.0
    for rank in firsts:
        made = program(rank)
        footprint = replayed(made)
        rows.append(rank_tasks(made, footprint, machine, mesh))
        peaks.append(RankMemory(made, footprint).peak)
        host = max(host, footprint.cost.issuing(machine))
    courses = simulate_ranks(rows)
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
            action: spans for course in courses for action, spans in course.segments.items() if len(spans) > 1
        },
    )


def rank_places(graph: Graph) -> tuple[int, ...]:
    """For each rank its place along the axis of stages."""
    mesh, pipeline = graph.mesh, graph.pipeline
    return tuple(mesh.coords(rank)[pipeline.axis] if pipeline is not None else 0 for rank in range(mesh.size))


class RecordedModule(Protocol):
    """What runs programs, and shows them to a watch."""

    _watch: Probe | None
    _measured: Recording | None

    @property
    def _this_rank(self) -> int | None:
        """The rank of this process; None where all ranks are here."""


@contextmanager
def recorded(module: RecordedModule, path: str | Path) -> Iterator[Recording]:
    """Measure what a module runs within; ranks come together at the end, and the first one writes the trace."""
    before, recording = module._watch, Recording()
    module._watch = recording
    try:
        yield recording
    finally:
        module._watch = before
    everybody: list[Any] = [recording.rows()]
    if module._this_rank is not None and not is_dry_run():
        mine, everybody = everybody[0], [None] * dist.get_world_size()
        dist.all_gather_object(everybody, mine)
    recording.close(everybody)
    if recording.steps:
        module._measured = recording
    if not module._this_rank or is_dry_run():
        ranks, done = trace_of(recording)
        write_trace(path, rank_tracks(ranks), done)


def trace_of(recording: Recording) -> tuple[Sequence[int], list[dict[str, Any]]]:
    """The ranks, and what each did in all steps."""
    ranks = sorted({rank for step in recording.steps for rank in step.rows})
    done = [
        trace_event(action, span, rank)
        for step in recording.steps
        for rank, row in step.rows.items()
        for action, span in row
    ]
    return ranks, done
