"""A simulated schedule to look at: as a picture, and as a trace for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shardfx.ir.schedule.actions import KINDS, Action, Schedule
from shardfx.ir.schedule.simulation import COSTS, Costs, Simulation, Span
from shardfx.ir.timing.foreseen import Course


@dataclass(frozen=True)
class Timeline(Simulation):
    """When each action of a schedule starts and ends, with a picture and a trace."""

    before: tuple[Span, ...] = ()
    """For each row what is done once, before all turns."""
    places: tuple[int, ...] = ()
    """For each rank its row; none: the ranks are the rows."""
    courses: tuple[Course, ...] = ()
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
            trace_event(action, piece, rank)
            for action in self.order
            for rank in ranks
            if action in self._in_row[self._rows[rank]]
            for piece in self.pieces(action)
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
    return complete_event(str(action), KINDS[action.kind], span, rank, stage=action.stage, turn=action.turn)


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
