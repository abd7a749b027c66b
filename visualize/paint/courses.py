"""Memory over the course of several programs, over one another: a line for each, their phases aligned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from shardfx.ir.text.printer import size_text
from shardfx.visualize.layout.geometry import Rect

from .course import HIGH, LEFT, MARGIN, PHASES, TOP, WIDE, draw_scale, starts
from .style import AXIS_COLOURS, FAINT, INK, MUTED, PAPER, width
from .svg import Canvas, document, number

ROOM = {"forward": (0.0, 0.4), "backward": (0.4, 0.95), "update": (0.95, 1.0)}
"""From where to where in the picture a phase lies, whatever the number of its calls."""


@dataclass(frozen=True)
class Line:
    """One program: the bytes at each call, its phases, and the bytes of its peak."""

    held: Sequence[int]
    phases: Sequence[str]
    peak: int


def draw_courses(lines: Mapping[str, Line], path: str | Path, title: str) -> Path:
    """Draw the memory of several plans of a model as one SVG file, by their names.

    Args:
        lines: for each plan the bytes when each call is done, and the phase of each; "" belongs to the one before.
        path: where to write the file; its folder is made.
        title: what stands above.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(courses_svg(lines, title), encoding="utf-8")
    return path


def courses_svg(lines: Mapping[str, Line], title: str) -> str:
    """The picture as SVG text (see :func:`draw_courses`)."""
    canvas, area = Canvas(), Rect(LEFT, TOP, WIDE, HIGH)
    canvas.text(MARGIN, 32, title, size=17, bold=True)
    most = max((line.peak for line in lines.values()), default=1) * 1.06
    draw_scale(canvas, area, most)
    for phase, (start, _) in ROOM.items():
        if any(phase in line.phases for line in lines.values()):
            at = area.x + area.w * start
            canvas.path(f"M{number(at)} {number(area.y)}V{number(area.bottom)}", stroke=FAINT, stroke_dasharray="4 3")
            canvas.text(at + 5, area.y + 12, phase, size=11, colour=MUTED, halo=PAPER)
    colours = dict(zip(lines, (AXIS_COLOURS[i % len(AXIS_COLOURS)] for i in range(len(lines))), strict=True))
    for name, line in lines.items():
        x = [area.x + area.w * place for place in places(line.phases)]
        points = [f"{number(at)} {number(area.bottom - area.h * n / most)}" for at, n in zip(x, line.held, strict=True)]
        with canvas.group("", f"{name}: {size_text(line.peak)} at most"):
            canvas.path(
                "M" + "L".join(points), stroke=colours[name], fill="none", stroke_width="1.8", stroke_linejoin="round"
            )
        if line.held:
            top = max(range(len(x)), key=line.held.__getitem__)
            at = area.bottom - area.h * line.peak / most
            canvas.element("circle", cx=x[top], cy=at, r="3.5", fill=PAPER, stroke=colours[name], stroke_width="1.8")
    y = area.bottom + 30
    for name, line in sorted(lines.items(), key=lambda item: -item[1].peak):
        canvas.rect(Rect(area.x, y - 9, 18, 4), radius=2, fill=colours[name])
        canvas.text(area.x + 26, y - 3, name, size=12)
        canvas.text(area.x + 250, y - 3, size_text(line.peak), size=12, mono=True, anchor="end", colour=INK)
        y += 20
    wide = max([area.right, *(area.x + 26 + width(name, 12) for name in lines)])
    return document(canvas, wide + MARGIN, y + MARGIN - 20, title, "memory over calls, by plan")


def places(phases: Sequence[str]) -> list[float]:
    """Where each call lies between 0 and 1: those of a phase are spread over its room."""
    begins = [*starts(phases), len(phases)]
    found: list[float] = []
    for phase, (first, end) in zip(PHASES, pairwise(begins), strict=True):
        left, right = ROOM[phase]
        found += [left + (right - left) * (i + 0.5) / (end - first) for i in range(max(end - first, 0))]
    return found
