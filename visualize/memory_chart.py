"""Memory over the calls of a program: a stack of areas, one a category."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from shardfx.ir.text.printer import size_text

from .style import AXIS_COLOURS, FAINT, HOST, INK, MUTED, PAPER, RULE, width
from .svg import Canvas, Rect, number, polygon, ticks

PHASES = ("forward", "backward", "update")
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


def _steps(x: Sequence[float], below: Sequence[float], above: Sequence[float], area: Rect, most: float) -> str:
    """The outline between two curves, in steps."""
    half = area.w / max(len(x), 1) / 2
    forth = [(at + side, value) for at, value in zip(x, above, strict=True) for side in (-half, half)]
    back = [(at + side, value) for at, value in zip(x, below, strict=True) for side in (-half, half)][::-1]
    return polygon((at, area.bottom - area.h * value / most) for at, value in [*forth, *back])
