"""A simulated schedule to look at: as a picture, and as a trace for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shardfx.ir.schedule.actions import KINDS, Action, Schedule
from shardfx.ir.schedule.simulation import COSTS, Costs, Simulation, Span


@dataclass(frozen=True)
class Timeline(Simulation):
    """When each action of a schedule starts and ends, with a picture and a trace."""

    before: tuple[Span, ...] = ()
    """For each row what is done once, before all turns."""
    places: tuple[int, ...] = ()
    """For each rank its row; none: the ranks are the rows."""

    def draw(self, path: str | Path, title: str = "Schedule") -> Path:
        """Draw it as one SVG file: a row for each rank, actions in the colours of their kinds, the bubble hatched."""
        from shardfx.visualize import draw_schedule

        return draw_schedule(self, path, title, self._rows, self.before)

    def trace(self, path: str | Path) -> Path:
        """Write it as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing show: a track for each rank.

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
        return write_trace(path, ranks, done)

    @property
    def _rows(self) -> tuple[int, ...]:
        return self.places or tuple(self.schedule.ranks)

    @cached_property
    def _in_row(self) -> tuple[frozenset[Action], ...]:
        return tuple(map(frozenset, self.schedule.rows))


def trace_event(action: Action, span: Span, rank: int) -> dict[str, Any]:
    """An action on the track of a rank; seconds become microseconds."""
    return {
        "name": str(action),
        "cat": KINDS[action.kind],
        "ph": "X",
        "pid": 0,
        "tid": rank,
        "ts": span.start * 1e6,
        "dur": span.length * 1e6,
        "args": {"stage": action.stage, "turn": action.turn},
    }


def write_trace(path: str | Path, ranks: Iterable[int], events: Sequence[dict[str, Any]]) -> Path:
    """A file that Perfetto reads: a track for each rank, and what is on them."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    both = [*map(_track, ranks), *events]
    path.write_text(json.dumps({"traceEvents": both, "displayTimeUnit": "ms"}, indent=1), encoding="utf-8")
    return path


def _track(rank: int) -> dict[str, Any]:
    return {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}


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
