"""A schedule over time: a row for each rank, an action each as long as it takes, and hatched where a rank is idle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from shardfx.ir.schedule.actions import KINDS
from shardfx.ir.schedule.simulation import ScheduleReport, Span
from shardfx.ir.timing.simulate import RankTimeline

from .style import FAINT, INK, MUTED, PAGE, PAPER, RULE, width
from .svg import Canvas, Rect, number, ticks

LEFT, TOP, MARGIN = 84.0, 84.0, 24.0
ROW, GAP = 32.0, 6.0
TEXT = 12.0
CELL, NARROW, WIDE = 26.0, 700.0, 1600.0
"""The width of an action of median length, and the bounds of the picture's width."""
COLOURS = {"F": "#3b74d9", "B": "#dd6b3a", "I": "#dc9a2e", "W": "#3d9a63", "U": "#9061c9"}
SENT, EXPOSED = "#0e7490", "#b91c1c"
BAND, NEAR, BAR = 12.0, 3.0, 5.0
"""The height of a link's lane, its distance to that above, and the height of the bar of exposed communication."""
LIGHTEST = 0.62
"""The lightening of a rank's last stage, relative to its first."""
HATCH = (
    '<defs><pattern id="idle" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="7" height="7" fill="#f1f5f9"/><rect width="1.5" height="7" fill="#cbd5e1"/></pattern></defs>'
)


def draw_schedule(
    of: ScheduleReport,
    path: str | Path,
    title: str,
    rows: Sequence[int] = (),
    before: Sequence[Span] = (),
    courses: Sequence[RankTimeline] = (),
) -> Path:
    """Draw a simulated schedule as one SVG file.

    Args:
        of: the schedule and its times.
        path: where to write the file; its folder is made.
        title: the heading.
        rows: for each rank the row of the schedule that it does; none: each its own.
        before: for each row the span of what is done once, before its first action.
        courses: for each row the transfers over its links.
    """
    canvas, schedule = Canvas(), of.schedule
    rows = rows or schedule.ranks
    canvas.parts.append(HATCH)
    canvas.text(MARGIN, 34, title, size=17, bold=True)
    said = f"{len(schedule.stages)} stages, {len(schedule.microbatches)} micro-batches; a step takes {of.step:.4g}"
    exposed = f", and {max(course.exposed for course in courses):.4g} exposed communication" if courses else ""
    canvas.text(MARGIN, 57, f"{said}, of which {of.bubble:.1%} is bubble{exposed}", size=12.5, colour=MUTED)
    lengths = sorted(part.length for action in of.spans for part in of.segments(action) if part.length)
    wanted = CELL * of.step / lengths[len(lengths) // 2] if lengths else NARROW
    area = Rect(LEFT, TOP, min(max(wanted, NARROW), WIDE), 0)
    scale = area.w / of.step if of.step else 0.0
    y = TOP
    for rank, row in enumerate(rows):
        lane = Rect(LEFT, y, area.w, ROW)
        _lane(canvas, of, f"rank {rank}", row, lane, scale)
        if before and before[row].length:
            first = before[row]
            with canvas.group("b", f"once, before all micro-batches\n{first.start:.4g} to {first.end:.4g}"):
                canvas.rect(_cell(lane, first, scale), fill=MUTED)
        y = _links(canvas, courses[row], lane, scale) + GAP if courses else lane.bottom + GAP
    y = _axis(canvas, of.step, Rect(LEFT, TOP, area.w, y - GAP - TOP), scale)
    _legend(canvas, of, y + 34, any(course.transfers for course in courses))
    described = f"{said}, bubble {of.bubble:.1%}, on {len(rows)} ranks"
    return canvas.save(path, max(canvas.right, area.right) + MARGIN, canvas.bottom + MARGIN, title, described)


def _cell(lane: Rect, span: Span, scale: float) -> Rect:
    """The part of a lane that a span of time takes."""
    return Rect(lane.x + span.start * scale, lane.y, span.length * scale, lane.h)


def _lane(canvas: Canvas, of: ScheduleReport, name: str, rank: int, lane: Rect, scale: float) -> None:
    """One rank: hatched, its actions on it, and the share of the step in which it is idle."""
    canvas.text(lane.x - 12, lane.middle + 4, name, size=TEXT, bold=True, anchor="end")
    idle = 1 - of.busy[rank] / of.step if of.step else 0.0
    with canvas.group("", f"{name} is idle for {of.step - of.busy[rank]:.4g} of {of.step:.4g}"):
        canvas.rect(lane, 4, fill="url(#idle)")
    stages = of.schedule.stages_of(rank)
    for action in of.schedule.rows[rank]:
        share = LIGHTEST * stages.index(action.stage) / max(len(stages) - 1, 1)
        update = action.kind == "U"
        text = f"U{action.stage}" if update else str(action.microbatch)
        room = width(text if update else str(of.schedule.microbatches[-1]), TEXT)
        said = f"{action}: {KINDS[action.kind]} of stage {action.stage}"
        said += "" if update else f", micro-batch {action.microbatch}"
        for span in of.segments(action):
            cell = _cell(lane, span, scale)
            with canvas.group("b", f"{said}\n{span.start:.4g} to {span.end:.4g}"):
                fill, edge = tint(COLOURS[action.kind], share), min(1.0, cell.w / 6)
                canvas.rect(cell, 3 if cell.w > 8 else 0, fill=fill, stroke=PAPER, stroke_width=edge)
                if room + 2 <= cell.w:
                    ink = PAPER if share < 0.4 else INK
                    canvas.text(cell.centre, cell.middle + 4, text, size=TEXT, colour=ink, anchor="middle")
    canvas.text(lane.right + 12, lane.middle + 4, f"{idle:.0%} idle", size=11, colour=MUTED)


def _links(canvas: Canvas, course: RankTimeline, lane: Rect, scale: float) -> float:
    """A bar where a rank waits for communication, and a lane below for each of its links; gives where they end."""
    for stall in course.stalls:
        if stall.exposed:
            left = lane.x + (stall.span.end - stall.exposed) * scale
            with canvas.group("b", f"waits for {stall.what}\n{stall.exposed:.4g} exposed"):
                canvas.rect(Rect(left, lane.bottom - BAR, stall.exposed * scale, BAR), fill=EXPOSED)
    y = lane.bottom
    for link, transfers in course.links.items():
        band = Rect(lane.x, y + NEAR, lane.w, BAND)
        canvas.text(band.x - 12, band.middle + 3.5, link, size=10, colour=MUTED, anchor="end")
        canvas.rect(band, 2, fill=PAGE)
        for transfer in transfers:
            cell = _cell(band, transfer.span, scale)
            with canvas.group("b", f"{transfer.what}\n{transfer.span.start:.4g} to {transfer.span.end:.4g}"):
                canvas.rect(cell, fill=SENT, stroke=PAPER, stroke_width=min(0.5, cell.w / 6))
        y = band.bottom
    return y


def _axis(canvas: Canvas, step: float, area: Rect, scale: float) -> float:
    """Times below the rows; gives where the axis ends."""
    y = area.bottom + 8
    canvas.path(f"M{number(area.x)} {number(y)}H{number(area.right)}", stroke=RULE, fill="none")
    for time in ticks(step):
        x = area.x + time * scale
        canvas.path(f"M{number(x)} {number(y)}v4", stroke=FAINT, fill="none")
        canvas.text(x, y + 17, f"{time:g}", size=10.5, colour=MUTED, anchor="middle")
    return y + 17


def _legend(canvas: Canvas, of: ScheduleReport, y: float, sends: bool) -> None:
    """The kinds of actions, the bubble, and the meaning of lighter colours."""
    entries = [(COLOURS[kind], KINDS[kind]) for kind in COLOURS if any(action.kind == kind for action in of.schedule)]
    entries.append(("url(#idle)", "bubble"))
    if sends:
        entries += [(SENT, "communication"), (EXPOSED, "exposed communication")]
    if max(len(of.schedule.stages_of(rank)) for rank in of.schedule.ranks) > 1:
        entries.append((tint(COLOURS["F"], LIGHTEST), "lighter: a later stage of the rank"))
    canvas.swatches(LEFT, y, math.inf, entries)


def tint(colour: str, share: float) -> str:
    """A colour, by a share (0 .. 1) nearer to white."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)
