"""A simulated schedule to look at: as a picture, and as a trace for Perfetto."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardfx.ir.schedule.actions import KINDS, Action, Schedule
from shardfx.ir.schedule.simulation import COSTS, Costs, Simulation


@dataclass(frozen=True)
class Timeline(Simulation):
    """When each action of a schedule starts and ends, with a picture and a trace."""

    def draw(self, path: str | Path, title: str = "Schedule") -> Path:
        """Draw it as one SVG file: a row for each rank, actions in the colours of their kinds, the bubble hatched."""
        from shardfx.visualize import draw_schedule

        return draw_schedule(self, path, title)

    def trace(self, path: str | Path) -> Path:
        """Write it as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing show: a track for each rank.

        Costs are taken as seconds; the file has microseconds.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        events = [*map(_track, self.schedule.ranks), *map(self._event, self.order)]
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=1), encoding="utf-8")
        return path

    def _event(self, action: Action) -> dict[str, Any]:
        span = self.spans[action]
        return {
            "name": str(action),
            "cat": KINDS[action.kind],
            "ph": "X",
            "pid": 0,
            "tid": self.schedule.rank_of(action.stage),
            "ts": span.start * 1e6,
            "dur": span.length * 1e6,
            "args": {"stage": action.stage, "turn": action.turn},
        }


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
