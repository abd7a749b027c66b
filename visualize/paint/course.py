"""Memory over the course of a program: a stack of areas, one a category, with phases and the peak marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from shardfx.ir.text.printer import size_text
from shardfx.visualize.layout.geometry import Rect

from .style import AXIS_COLOURS, FAINT, HOST, INK, MUTED, PAPER, RULE, width
from .svg import Canvas, document, number

PHASES = ("forward", "backward", "update")
WIDE, HIGH = 880.0, 300.0
LEFT, TOP, MARGIN = 84.0, 56.0, 24.0
COLOURS = {
    "parameters": "#94a3b8",
    "buffers": "#cbd5e1",
    "constants": "#e2e8f0",
    "inputs": "#b8c2d0",
    "gradients": AXIS_COLOURS[1],
    "optimizer states": AXIS_COLOURS[3],
    "gathered parameters": "#60a5fa",
    "cast parameters": "#93c5fd",
    "fetched": HOST,
    "activations": AXIS_COLOURS[0],
    "communication buffers": AXIS_COLOURS[4],
    "arena": "#5eead4",
    "temporaries": AXIS_COLOURS[2],
    "results": AXIS_COLOURS[5],
    "new buffers": AXIS_COLOURS[6],
    "new parameters": AXIS_COLOURS[6],
    "new states": AXIS_COLOURS[6],
}
"""What is there all the time is grey, and lies at the bottom."""


def draw_course(
    course: Sequence[Mapping[str, int]],
    phases: Sequence[str],
    top: int,
    peak: int,
    holders: Sequence[str],
    path: str | Path,
    title: str,
    beside: Sequence[int] = (),
) -> Path:
    """Draw memory over a program's course as one SVG file.

    Args:
        course: for each call the bytes by category when it is done.
        phases: for each call its phase; "" belongs to the one before.
        top: the call of the peak; ``peak`` its bytes, ``holders`` the largest of what is there, as texts.
        path: where to write the file; its folder is made.
        title: what stands above.
        beside: for each call the bytes in the second pool of memory; drawn below, where there are any.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(course_svg(course, phases, top, peak, holders, title, beside), encoding="utf-8")
    return path


def course_svg(
    course: Sequence[Mapping[str, int]],
    phases: Sequence[str],
    top: int,
    peak: int,
    holders: Sequence[str],
    title: str,
    beside: Sequence[int] = (),
) -> str:
    """The picture as SVG text (see :func:`draw_course`)."""
    canvas = Canvas()
    shown = [name for name in COLOURS if any(moment.get(name) for moment in course)]
    shown += [name for moment in course[:1] for name in moment if name not in COLOURS]
    canvas.text(MARGIN, 32, title, size=17, bold=True)
    area = Rect(LEFT, TOP, WIDE, HIGH)
    most = max(peak, 1) * 1.06
    x = [area.x + area.w * (i + 0.5) / max(len(course), 1) for i in range(len(course))]
    draw_scale(canvas, area, most)
    _phases(canvas, area, phases, x)
    below = [0.0] * len(course)
    for name in shown:
        above = [base + moment.get(name, 0) for base, moment in zip(below, course, strict=True)]
        with canvas.group("", f"{name}: {size_text(max(moment.get(name, 0) for moment in course))} at most"):
            canvas.path(_area(x, below, above, area, most), fill=COLOURS.get(name, FAINT))
        below = above
    if course:
        at = area.bottom - area.h * peak / most
        canvas.path(f"M{number(area.x)} {number(at)}H{number(area.right)}", stroke=INK, stroke_dasharray="2 3")
        canvas.element("circle", cx=x[top], cy=at, r="4", fill=PAPER, stroke=INK, stroke_width="1.5")
        left = x[top] > area.x + area.w * 0.6
        anchor, aside = ("end", -9) if left else ("start", 9)
        canvas.text(x[top] + aside, at - 7, f"peak {size_text(peak)}", bold=True, anchor=anchor, halo=PAPER)
    if any(beside):
        area = _second_pool(canvas, area, beside, x)
    y = _legend(canvas, area, shown)
    for i, text in enumerate(["Largest at the peak", *holders]):
        canvas.text(LEFT, y + 18 * i, text, size=12, mono=i > 0, bold=i == 0, colour=INK if i == 0 else MUTED)
    return document(canvas, max(canvas.right, area.right) + MARGIN, canvas.bottom + MARGIN, title, "memory over calls")


def _second_pool(canvas: Canvas, above: Rect, beside: Sequence[int], x: Sequence[float]) -> Rect:
    """What is put away, over the same calls, and on a scale of its own; gives where."""
    area = Rect(above.x, above.bottom + 44, above.w, HIGH / 3)
    top = max(range(len(beside)), key=beside.__getitem__)
    most, said = beside[top] * 1.25, f"put away, beside the device: {size_text(beside[top])} at most"
    canvas.text(area.x, area.y - 10, said, size=12, bold=True)
    draw_scale(canvas, area, most)
    with canvas.group("", f"put away: {size_text(beside[top])} at most"):
        canvas.path(_area(x, [0.0] * len(beside), beside, area, most), fill=HOST)
    return area


def draw_scale(canvas: Canvas, area: Rect, most: float) -> None:
    """Lines at round numbers of bytes."""
    unit = 10.0 ** (len(str(int(most))) - 1)
    step = next(unit * part for part in (0.2, 0.5, 1.0, 2.0) if most / (unit * part) <= 6)
    value = 0.0
    while value <= most:
        y = area.bottom - area.h * value / most
        canvas.path(f"M{number(area.x)} {number(y)}H{number(area.right)}", stroke=RULE, stroke_width="0.7")
        canvas.text(area.x - 8, y + 4, size_text(int(value)), size=11, colour=MUTED, anchor="end")
        value += step


def _phases(canvas: Canvas, area: Rect, phases: Sequence[str], x: Sequence[float]) -> None:
    """A line where each phase begins, and its name above, where there is room for it."""
    begins = {phase: x[at] for phase, at in zip(PHASES, starts(phases), strict=True) if phase in phases}
    for (phase, at), end in zip(begins.items(), [*begins.values(), area.right][1:], strict=True):
        canvas.path(f"M{number(at)} {number(area.y)}V{number(area.bottom)}", stroke=FAINT, stroke_dasharray="4 3")
        if end - at > width(phase, 11) + 10:
            canvas.text(at + 5, area.y + 12, phase, size=11, colour=MUTED, halo=PAPER)


def starts(phases: Sequence[str]) -> list[int]:
    """The calls at which the phases begin, in the order of :data:`PHASES`: so that the fewest calls lie on the wrong
    side, for some are made ahead, or later."""
    return [0, *(_start(phases, PHASES[: i + 1], PHASES[i + 1 :]) for i in range(len(PHASES) - 1))]


def _start(phases: Sequence[str], before: Sequence[str], behind: Sequence[str]) -> int:
    right = sum(phase in behind for phase in phases)
    best, at = right, 0
    for i, phase in enumerate(phases):
        right += (phase in before) - (phase in behind)
        if right > best:
            best, at = right, i + 1
    return at if any(phase in behind for phase in phases) else len(phases)


def _area(x: Sequence[float], below: Sequence[float], above: Sequence[float], area: Rect, most: float) -> str:
    """The outline between two courses, in steps."""

    def points(values: Sequence[float], back: bool) -> list[str]:
        half = area.w / max(len(x), 1) / 2
        corners = []
        for at, value in zip(x, values, strict=True):
            y = number(area.bottom - area.h * value / most)
            corners += [f"{number(at - half)} {y}", f"{number(at + half)} {y}"]
        return corners[::-1] if back else corners

    return "M" + "L".join([*points(above, back=False), *points(below, back=True)]) + "Z"


def _legend(canvas: Canvas, area: Rect, shown: Sequence[str]) -> float:
    """The categories, in lines as wide as the picture; gives where the next text may stand."""
    x, y = area.x, area.bottom + 30
    for name in shown:
        wide = width(name, 12) + 34
        if x + wide > area.right:
            x, y = area.x, y + 20
        canvas.rect(Rect(x, y - 10, 12, 12), radius=3, fill=COLOURS.get(name, FAINT))
        canvas.text(x + 18, y, name, size=12)
        x += wide
    return y + 34
