"""The tables of a report about stages and time: what each stage has, and how a step goes, foreseen and measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from shardfx.ir.schedule.simulation import check_schedule
from shardfx.ir.text.printer import size_text

from .console import count_text, seconds_text, table

if TYPE_CHECKING:
    from .figures import Report, Timing

MOST_ROWS = 8
SHOWN = 12
"""So many actions of a row are shown."""


def stage_tables(report: Report) -> list[RenderableType]:
    """The stages, the schedule, and what a step takes; nothing of a plan that has no stages and was not measured."""
    made: list[RenderableType] = []
    if report.stages:
        made += [_stages(report), ""]
    if report.timing is not None:
        made += [*_schedule(report.timing, bool(report.stages)), _step(report.timing), ""]
    return made


def _stages(report: Report) -> RenderableType:
    columns = "stage", "ranks", "modules", "parameters", "on a rank", "sent an iteration", "operations"
    made = table("Stages", *columns, right=[0, 3, 4, 5, 6])
    for row in report.stages:
        ranks = f"{row.ranks[0]}" if len(row.ranks) == 1 else f"{row.ranks[0]} .. {row.ranks[-1]}"
        numbers = size_text(row.nbytes), size_text(row.sent), count_text(row.flops, "FLOP")
        made.add_row(f"{row.stage}", ranks, ", ".join(row.modules), count_text(row.parameters, "").strip(), *numbers)
    return made


def _schedule(timing: Timing, staged: bool) -> list[RenderableType]:
    """The rows, and the live iterations of each."""
    if not staged:
        return []
    schedule = timing.foreseen.planned
    assert schedule is not None
    report = check_schedule(schedule, stages=len(schedule.stages), microbatches=len(schedule.microbatches))
    made = table("Schedule", "place", "live iterations", "actions", right=[0, 1])
    for place, row in enumerate(schedule.rows[:MOST_ROWS]):
        more = f" ... ({len(row)})" if len(row) > SHOWN else ""
        made.add_row(f"{place}", f"{report.peaks[place]}", Text(" ".join(map(str, row[:SHOWN])) + more, "dim"))
    if len(schedule.rows) > MOST_ROWS:
        made.add_row("...", "", Text(f"and {len(schedule.rows) - MOST_ROWS} rows more", "dim"))
    return [made, ""]


def _step(timing: Timing) -> RenderableType:
    seen, measured = timing.foreseen, timing.measured
    columns = ["foreseen"] if measured is None else ["foreseen", "measured"]
    made = table("A step, over all ranks", "", *columns, right=[1, 2])

    def add(name: str, foreseen: str, then: str) -> None:
        made.add_row(name, foreseen, *([then] if measured is not None else []))

    add("step", seconds_text(seen.step), "" if measured is None or timing.virtual else seconds_text(measured.step))
    if measured is not None and timing.virtual:
        add("all ranks' work in one process", seconds_text(timing.as_measured), seconds_text(measured.step))
    bubble = "" if measured is None or timing.virtual else f"{measured.bubble:.1%}"
    add("bubble", f"{seen.bubble:.1%}", bubble)
    add("communication that nothing hides", seconds_text(seen.exposed), "")
    return made
