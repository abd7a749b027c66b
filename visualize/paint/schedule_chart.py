"""A schedule over time: a row for each rank, an action each as long as it takes, and hatched where a rank waits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from shardfx.ir.schedule.actions import KINDS, Action
from shardfx.ir.schedule.simulation import Simulation, Span
from shardfx.ir.timing.simulate import Course
from shardfx.visualize.layout.geometry import Rect

from .style import FAINT, INK, MUTED, PAGE, PAPER, RULE, width
from .svg import Canvas, document, number

LEFT, TOP, MARGIN = 84.0, 84.0, 24.0
ROW, GAP = 32.0, 6.0
TEXT = 12.0
CELL, NARROW, WIDE = 26.0, 700.0, 1600.0
"""How wide an action of median length is, where the picture does not become too narrow or too wide by that."""
COLOURS = {"F": "#3b74d9", "B": "#dd6b3a", "I": "#dc9a2e", "W": "#3d9a63", "U": "#9061c9"}
SENT, EXPOSED = "#0e7490", "#b91c1c"
BAND, NEAR, BAR = 12.0, 3.0, 5.0
"""How high the lane of a link is, how near to that above, and how high the bar of what is exposed."""
LIGHTEST = 0.62
"""How much nearer to white a rank's last stage is than its first."""
HATCH = (
    '<defs><pattern id="idle" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="7" height="7" fill="#f1f5f9"/><rect width="1.5" height="7" fill="#cbd5e1"/></pattern></defs>'
)


def draw_schedule(
    of: Simulation,
    path: str | Path,
    title: str,
    rows: Sequence[int] = (),
    before: Sequence[Span] = (),
    courses: Sequence[Course] = (),
) -> Path:
    """Draw a simulated schedule as one SVG file.

    Args:
        of: what is done where, and when.
        path: where to write the file; its folder is made.
        title: what stands above.
        rows: for each rank the row of the schedule that it does; none: each its own.
        before: for each row what is done once, before its first action.
        courses: for each row what goes over its links.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(schedule_svg(of, title, rows, before, courses), encoding="utf-8")
    return path


def schedule_svg(
    of: Simulation,
    title: str,
    rows: Sequence[int] = (),
    before: Sequence[Span] = (),
    courses: Sequence[Course] = (),
) -> str:
    """The picture as SVG text (see :func:`draw_schedule`)."""
    canvas, schedule = Canvas(), of.schedule
    rows = rows or schedule.ranks
    canvas.parts.append(HATCH)
    canvas.text(MARGIN, 34, title, size=17, bold=True)
    said = f"{len(schedule.stages)} stages, {len(schedule.turns)} turns; a step takes {of.step:.4g}"
    exposed = f", and {max(course.exposed for course in courses):.4g} exposed communication" if courses else ""
    canvas.text(MARGIN, 57, f"{said}, of which {of.bubble:.1%} is bubble{exposed}", size=12.5, colour=MUTED)
    wide, y = _width(of), TOP
    per_time = wide / of.step if of.step else 0.0
    for rank, row in enumerate(rows):
        lane = Rect(LEFT, y, wide, ROW)
        _lane(canvas, of, f"rank {rank}", row, lane, per_time)
        if before and before[row].length:
            _once(canvas, before[row], lane, per_time)
        y = lane.bottom
        if courses:
            _stalls(canvas, courses[row], lane, per_time)
            y = _links(canvas, courses[row], lane, per_time)
        y += GAP
    area = Rect(LEFT, TOP, wide, y - GAP - TOP)
    y = _axis(canvas, of, area, per_time)
    _legend(canvas, of, y + 34, any(course.transfers for course in courses))
    described = f"{said}, bubble {of.bubble:.1%}, on {len(rows)} ranks"
    return document(canvas, max(canvas.right, area.right) + MARGIN, canvas.bottom + MARGIN, title, described)


def _width(of: Simulation) -> float:
    """How wide the rows are: an action of median length takes a cell."""
    lengths = sorted(piece.length for action in of.spans for piece in of.pieces(action) if piece.length)
    wanted = CELL * of.step / lengths[len(lengths) // 2] if lengths else NARROW
    return min(max(wanted, NARROW), WIDE)


def _lane(canvas: Canvas, of: Simulation, name: str, rank: int, lane: Rect, per_time: float) -> None:
    """One rank: hatched, its actions on it, and how much of the step it waits."""
    canvas.text(lane.x - 12, lane.middle + 4, name, size=TEXT, bold=True, anchor="end")
    idle = 1 - of.busy[rank] / of.step if of.step else 0.0
    with canvas.group("", f"{name} waits for {of.step - of.busy[rank]:.4g} of {of.step:.4g}"):
        canvas.rect(lane, 4, fill="url(#idle)")
    for action in of.schedule.rows[rank]:
        for piece in of.pieces(action):
            _cell(canvas, of, action, piece, rank, lane, per_time)
    canvas.text(lane.right + 12, lane.middle + 4, f"{idle:.0%} idle", size=11, colour=MUTED)


def _stalls(canvas: Canvas, course: Course, lane: Rect, per_time: float) -> None:
    """Where the rank waits for communication: a bar at the foot of its lane."""
    for stall in course.stalls:
        if stall.exposed:
            start = lane.x + (stall.span.end - stall.exposed) * per_time
            with canvas.group("b", f"waits for {stall.what}\n{stall.exposed:.4g} exposed"):
                canvas.rect(Rect(start, lane.bottom - BAR, stall.exposed * per_time, BAR), 0, fill=EXPOSED)


def _links(canvas: Canvas, course: Course, lane: Rect, per_time: float) -> float:
    """A lane for each link of a rank below its own; gives where they end."""
    y = lane.bottom
    for link, transfers in course.links.items():
        band = Rect(lane.x, y + NEAR, lane.w, BAND)
        canvas.text(band.x - 12, band.middle + 3.5, link, size=10, colour=MUTED, anchor="end")
        canvas.rect(band, 2, fill=PAGE)
        for transfer in transfers:
            span = transfer.span
            with canvas.group("b", f"{transfer.what}\n{span.start:.4g} to {span.end:.4g}"):
                cell = Rect(band.x + span.start * per_time, band.y, span.length * per_time, band.h)
                canvas.rect(cell, 0, fill=SENT, stroke=PAPER, stroke_width=min(0.5, cell.w / 6))
        y = band.bottom
    return y


def _once(canvas: Canvas, span: Span, lane: Rect, per_time: float) -> None:
    """What is done before all turns."""
    with canvas.group("b", f"once, before all turns\n{span.start:.4g} to {span.end:.4g}"):
        canvas.rect(Rect(lane.x + span.start * per_time, lane.y, span.length * per_time, lane.h), 0, fill=MUTED)


def _cell(canvas: Canvas, of: Simulation, action: Action, span: Span, rank: int, lane: Rect, per_time: float) -> None:
    """A piece of an action: its turn in the colour of its kind, the lighter the later its stage among those of the
    rank."""
    stages = of.schedule.stages_of(rank)
    share = LIGHTEST * stages.index(action.stage) / max(len(stages) - 1, 1)
    cell = Rect(lane.x + span.start * per_time, lane.y, span.length * per_time, lane.h)
    with canvas.group("b", _tooltip(action, span)):
        fill, edge = tint(COLOURS[action.kind], share), min(1.0, cell.w / 6)
        canvas.rect(cell, 3 if cell.w > 8 else 0, fill=fill, stroke=PAPER, stroke_width=edge)
        update = action.kind == "U"
        text, widest = (f"U{action.stage}",) * 2 if update else (str(action.turn), str(of.schedule.turns[-1]))
        if width(widest, TEXT) + 2 <= cell.w:
            middle, ink = cell.x + cell.w / 2, PAPER if share < 0.4 else INK
            canvas.text(middle, cell.middle + 4, text, size=TEXT, colour=ink, anchor="middle")


def _tooltip(action: Action, span: Span) -> str:
    turn = "" if action.kind == "U" else f", turn {action.turn}"
    return f"{action}: {KINDS[action.kind]} of stage {action.stage}{turn}\n{span.start:.4g} to {span.end:.4g}"


def _axis(canvas: Canvas, of: Simulation, area: Rect, per_time: float) -> float:
    """Times below the rows; gives where the axis ends."""
    y = area.bottom + 8
    canvas.path(f"M{number(area.x)} {number(y)}H{number(area.right)}", stroke=RULE, fill="none")
    for time in ticks(of.step):
        x = area.x + time * per_time
        canvas.path(f"M{number(x)} {number(y)}v4", stroke=FAINT, fill="none")
        canvas.text(x, y + 17, f"{time:g}", size=10.5, colour=MUTED, anchor="middle")
    return y + 17


def ticks(most: float) -> Iterator[float]:
    """Round numbers from 0 to ``most``, at most about ten."""
    unit = 10.0 ** math.floor(math.log10(most)) if most > 0 else 1.0
    step = next(unit * part for part in (0.1, 0.2, 0.5, 1.0) if most / (unit * part) <= 10)
    return (round(i * step, 12) for i in range(int(most / step + 1e-9) + 1))


def _legend(canvas: Canvas, of: Simulation, y: float, sends: bool) -> None:
    """The kinds that there are, the bubble, and what lighter colours are."""
    entries = [(COLOURS[kind], KINDS[kind]) for kind in COLOURS if any(action.kind == kind for action in of.schedule)]
    entries.append(("url(#idle)", "bubble"))
    if sends:
        entries += [(SENT, "communication"), (EXPOSED, "exposed communication")]
    if max(len(of.schedule.stages_of(rank)) for rank in of.schedule.ranks) > 1:
        entries.append((tint(COLOURS["F"], LIGHTEST), "lighter: a later stage of the rank"))
    x = LEFT
    for colour, text in entries:
        canvas.rect(Rect(x, y - 10, 16, 12), 3, fill=colour)
        canvas.text(x + 23, y, text, size=TEXT)
        x += 23 + width(text, TEXT) + 18


def tint(colour: str, share: float) -> str:
    """A colour, by a share (0 .. 1) nearer to white."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)
