"""Memory over the calls of a program: a stack of areas, one a category; or a curve for each of several plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from shardfx.ir.text.printer import size_text

from .style import AXIS_COLOURS, FAINT, HOST, INK, MUTED, PAPER, RULE, colour_of, width
from .svg import Canvas, Rect, number, polygon, polyline, ticks

PHASES = ("forward", "backward", "update")
ROOM = {"forward": (0.0, 0.4), "backward": (0.4, 0.95), "update": (0.95, 1.0)}
"""The horizontal range of each phase in a picture of several plans, whatever the number of its calls."""
AREA, MARGIN = Rect(84.0, 56.0, 880.0, 300.0), 24.0
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
"""Colours by category: persistent memory is grey, and at the bottom."""


@dataclass(frozen=True)
class MemoryCurve:
    """One program: the bytes at each call, its phases, and the bytes of its peak."""

    nbytes: Sequence[int]
    phases: Sequence[str]
    peak: int


def draw_memory(
    by_call: Sequence[Mapping[str, int]],
    phases: Sequence[str],
    top: int,
    peak: int,
    largest: Sequence[str],
    path: str | Path,
    title: str,
    host: Sequence[int] = (),
) -> Path:
    """Draw the memory of a program as one SVG file.

    Args:
        by_call: for each call the bytes by category after it.
        phases: for each call its phase; "" belongs to the one before.
        top: the call of the peak; ``peak`` its bytes, ``largest`` the largest live storages then, as texts.
        path: where to write the file; its folder is made.
        title: the heading.
        host: for each call the bytes in host memory; drawn below, where there are any.
    """
    canvas, area = Canvas(), AREA
    canvas.text(MARGIN, 32, title, size=17, bold=True)
    shown = [name for name in COLOURS if any(call.get(name) for call in by_call)]
    shown += [name for call in by_call[:1] for name in call if name not in COLOURS]
    most = max(peak, 1) * 1.06
    x = [area.x + area.w * (i + 0.5) / max(len(by_call), 1) for i in range(len(by_call))]
    _scale(canvas, area, most)
    _phases(canvas, {name: x[at] for name, at in zip(PHASES, starts(phases), strict=True) if name in phases})
    below = [0.0] * len(x)
    for name in shown:
        above = [base + call.get(name, 0) for base, call in zip(below, by_call, strict=True)]
        with canvas.group("", f"{name}: {size_text(max(call.get(name, 0) for call in by_call))} at most"):
            canvas.path(_steps(x, below, above, area, most), fill=COLOURS.get(name, FAINT))
        below = above
    if x:
        at = area.bottom - area.h * peak / most
        canvas.path(f"M{number(area.x)} {number(at)}H{number(area.right)}", stroke=INK, stroke_dasharray="2 3")
        canvas.element("circle", cx=x[top], cy=at, r="4", fill=PAPER, stroke=INK, stroke_width="1.5")
        anchor, aside = ("end", -9) if x[top] > area.x + area.w * 0.6 else ("start", 9)
        canvas.text(x[top] + aside, at - 7, f"peak {size_text(peak)}", bold=True, anchor=anchor, halo=PAPER)
    if any(host):
        said = f"host memory: {size_text(max(host))} at most"
        area = Rect(area.x, area.bottom + 44, area.w, area.h / 3)
        canvas.text(area.x, area.y - 10, said, size=12, bold=True)
        _scale(canvas, area, max(host) * 1.25)
        with canvas.group("", said):
            canvas.path(_steps(x, [0.0] * len(host), host, area, max(host) * 1.25), fill=HOST)
    entries = ((COLOURS.get(name, FAINT), name) for name in shown)
    y = canvas.swatches(area.x, area.bottom + 30, area.right, entries)
    for i, text in enumerate(["Largest at the peak", *largest]):
        canvas.text(area.x, y + 34 + 18 * i, text, size=12, mono=i > 0, bold=i == 0, colour=MUTED if i else INK)
    wide, high = max(canvas.right, area.right) + MARGIN, canvas.bottom + MARGIN
    return canvas.save(path, wide, high, title, "memory over calls")


def draw_memory_of_plans(curves: Mapping[str, MemoryCurve], path: str | Path, title: str) -> Path:
    """Draw the memory of several plans of a model as one SVG file, by their names, with their phases aligned.

    Args:
        path: where to write the file; its folder is made.
        title: the heading.
    """
    canvas, area = Canvas(), AREA
    canvas.text(MARGIN, 32, title, size=17, bold=True)
    most = max((curve.peak for curve in curves.values()), default=1) * 1.06
    _scale(canvas, area, most)
    there = {phase for curve in curves.values() for phase in curve.phases}
    _phases(canvas, {phase: area.x + area.w * ROOM[phase][0] for phase in PHASES if phase in there})
    colours = {name: colour_of(i) for i, name in enumerate(curves)}
    for name, curve in curves.items():
        x = [area.x + area.w * place for place in places(curve.phases)]
        line = polyline((at, area.bottom - area.h * n / most) for at, n in zip(x, curve.nbytes, strict=True))
        style = {"stroke": colours[name], "stroke_width": "1.8"}
        with canvas.group("", f"{name}: {size_text(curve.peak)} at most"):
            canvas.path(line, fill="none", stroke_linejoin="round", **style)
        if curve.nbytes:
            top = max(range(len(x)), key=curve.nbytes.__getitem__)
            y = area.bottom - area.h * curve.peak / most
            canvas.element("circle", cx=x[top], cy=y, r="3.5", fill=PAPER, **style)
    y = area.bottom + 30
    for name, curve in sorted(curves.items(), key=lambda item: -item[1].peak):
        canvas.rect(Rect(area.x, y - 9, 18, 4), radius=2, fill=colours[name])
        canvas.text(area.x + 26, y - 3, name, size=12)
        canvas.text(area.x + 250, y - 3, size_text(curve.peak), size=12, mono=True, anchor="end", colour=INK)
        y += 20
    return canvas.save(path, max(canvas.right, area.right) + MARGIN, y + 4, title, "memory over calls, by plan")


def _scale(canvas: Canvas, area: Rect, most: float) -> None:
    """Lines at round numbers of bytes."""
    for value in ticks(most, 6):
        y = area.bottom - area.h * value / most
        canvas.path(f"M{number(area.x)} {number(y)}H{number(area.right)}", stroke=RULE, stroke_width="0.7")
        canvas.text(area.x - 8, y + 4, size_text(int(value)), size=11, colour=MUTED, anchor="end")


def _phases(canvas: Canvas, begins: Mapping[str, float]) -> None:
    """A line where each phase begins, and its name above, where there is room for it."""
    for (phase, at), end in zip(begins.items(), [*begins.values(), AREA.right][1:], strict=True):
        canvas.path(f"M{number(at)} {number(AREA.y - 8)}V{number(AREA.bottom)}", stroke=FAINT, stroke_dasharray="4 3")
        if end - at > width(phase, 11) + 10:
            canvas.text(at + 5, AREA.y - 3, phase, size=11, colour=MUTED)


def starts(phases: Sequence[str]) -> list[int]:
    """The calls at which the phases begin, in the order of :data:`PHASES`: so that the fewest calls lie on the wrong
    side, for some are moved ahead, or later."""

    def start(before: Sequence[str], behind: Sequence[str]) -> int:
        right = best = sum(phase in behind for phase in phases)
        at = 0
        for i, phase in enumerate(phases):
            right += (phase in before) - (phase in behind)
            if right > best:
                best, at = right, i + 1
        return at if any(phase in behind for phase in phases) else len(phases)

    return [0, *(start(PHASES[:i], PHASES[i:]) for i in range(1, len(PHASES)))]


def places(phases: Sequence[str]) -> list[float]:
    """The place of each call between 0 and 1: the calls of a phase are spread over its room."""
    found: list[float] = []
    for phase, (first, end) in zip(PHASES, pairwise([*starts(phases), len(phases)]), strict=True):
        left, right = ROOM[phase]
        found += [left + (right - left) * (i + 0.5) / (end - first) for i in range(max(end - first, 0))]
    return found


def _steps(x: Sequence[float], below: Sequence[float], above: Sequence[float], area: Rect, most: float) -> str:
    """The outline between two curves, in steps."""
    half = area.w / max(len(x), 1) / 2
    forth = [(at + side, value) for at, value in zip(x, above, strict=True) for side in (-half, half)]
    back = [(at + side, value) for at, value in zip(x, below, strict=True) for side in (-half, half)][::-1]
    return polygon((at, area.bottom - area.h * value / most) for at, value in [*forth, *back])
