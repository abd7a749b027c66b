"""How the innermost boxes look: ops, views, closed modules, communication, inputs and outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shardfx.ir.cost.traffic import traffic
from shardfx.ir.graph import Phase
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.traits import base_name, is_heavy, is_own
from shardfx.ir.text.printer import size_text
from shardfx.visualize.layout.geometry import Rect, Size, Spot
from shardfx.visualize.layout.nested import STACK
from shardfx.visualize.scene.boxes import TIMES, Box, BoxLine, Kind

from .style import FAINT, HOST, INK, MUTED, PAPER, RULE, Run, axis_colour, placement, plain, shorten, width
from .svg import Canvas, number

TITLE, SMALL = 12.5, 10.5
ROW = {TITLE: 18.0, SMALL: 14.5}
TAG = 17.0
SIDE = 11.0
ABOVE = 5.0
MOST_LINES = 4
MOST_TAGS = 3


@dataclass(frozen=True)
class Row:
    """One line of text in a box, in runs of one style each."""

    runs: list[Run]
    size: float = SMALL
    mono: bool = False

    @property
    def width(self) -> float:
        """How wide it is at most, in pixels."""
        return sum(width(run.text, self.size, mono=self.mono, bold=run.bold) for run in self.runs)


def rows(box: Box, mesh: Mesh) -> list[Row]:
    """What is written in a box."""
    ink = PAPER if box.kind in (Kind.COMM, Kind.MEMORY) else INK
    if box.kind is Kind.COMM:
        one = traffic(box.main, mesh)
        ink = PAPER if one.nbytes else axis_colour(mesh, one.axes[0]) if one.axes else INK
        axes = " ".join(one.axes)
        parts = len(box.main.outs)
        several = f" of {parts}" if parts > 1 else ""
        sent = f"{axes}  {size_text(one.nbytes)}" if one.nbytes else axes
        plain_lines = [Row([Run(plain(_line(line, mesh)), ink)], mono=True) for line in box.lines[:MOST_TAGS]]
        name = "".join([one.name + several, *(f"  {text}" for text, _ in badges(box, mesh))])
        return [Row([Run(name, ink, True)], TITLE), Row([Run(sent, ink)]), *plain_lines]
    title = [Run(shorten(box.title, 34), ink, True)]
    if box.label:
        title = [Run(shorten(box.label, 28), ink, True), Run("  " + shorten(box.title, 30), MUTED)]
    if box.kind in (Kind.INPUT, Kind.OUTPUT):
        title = [Run(box.title, ink, True)]
    elif box.kind is Kind.VIEW:
        title = [Run(f"{box.label}  {box.title}".strip(), MUTED)]
    title += [Run(f"  {text}", colour if box.turns else MUTED, True) for text, colour in badges(box, mesh)]
    found = [Row(title, SMALL if box.kind is Kind.VIEW else TITLE)]
    if box.kind is Kind.CLOSED:
        found += [Row([Run(text, MUTED)]) for text in summary(box)]
    most = MOST_LINES + sum(line.role == "comm" for line in box.lines)
    shown = box.lines if len(box.lines) <= most else box.lines[: most - 1]
    found += [Row(_line(line, mesh), mono=True) for line in shown]
    if len(shown) < len(box.lines):
        found.append(Row([Run(f"and {len(box.lines) - len(shown)} more", MUTED)]))
    return found


def badges(box: Box, mesh: Mesh) -> list[tuple[str, str]]:
    """How often there is what a box stands for, and how often it is done; each with its colour."""
    blocks = [(f"{TIMES} {box.count}" + ("  in a row" if box.loops and box.kind is Kind.OPEN else ""), INK)]
    turns = [(f"{TIMES} {mesh[axis].size} turns", axis_colour(mesh, axis)) for axis in box.turns]
    return [*(blocks if box.count > 1 else ()), *turns]


def badge_width(text: str) -> float:
    """How wide a badge with a text is, in pixels."""
    return width(text, 11.5, bold=True) + 16


def summary(box: Box) -> list[str]:
    """How many ops a closed module has, and which are the most."""
    counts = Counter(base_name(node) for node in box.inside if not is_own(node))
    main = [f"{name} {TIMES} {n}" if n > 1 else name for name, n in counts.most_common(3)]
    total = len(box.inside)
    number = [] if box.title.startswith(str(total)) else [f"{total} ops" if total > 1 else "1 op"]
    return [*number, shorten(", ".join(main) + (" …" if len(counts) > 3 else ""), 46)]


def _line(line: BoxLine, mesh: Mesh) -> list[Run]:
    if line.role == "comm":
        over = [Run(f"{axis} ", axis_colour(mesh, axis), True) for axis in line.axes]
        return [*over, Run(line.text, axis_colour(mesh, line.axes[0]) if line.axes else INK)]
    sign = Run("→ " if line.role == "out" else "", MUTED)
    return [sign, Run(shorten(line.text, 30) + "  ", MUTED), *(placement(line.value, mesh) if line.value else [])]


def tags(box: Box, mesh: Mesh) -> list[list[Run]]:
    """The placements of what leaves a box, each once."""
    found = {plain(runs): runs for runs in (placement(value, mesh) for value in box.tags)}
    shown = list(found.values())
    if len(shown) > MOST_TAGS:
        shown = [*shown[: MOST_TAGS - 1], [Run(f"and {len(shown) - MOST_TAGS + 1} more", MUTED)]]
    return shown


def measure(box: Box, mesh: Mesh) -> Size:
    """The size that a box needs; of a module that is drawn open, the width of its title."""
    if box.kind is Kind.OPEN:
        title = width(box.title, TITLE, bold=True) + 24
        return Size(title + sum(badge_width(text) + 6 for text, _ in badges(box, mesh)), 0)
    written = rows(box, mesh)
    marks = [sum(width(run.text, SMALL, mono=True) for run in runs) for runs in tags(box, mesh)]
    side = SIDE + (16 if box.kind is Kind.COMM else 6 if box.kind in (Kind.INPUT, Kind.OUTPUT) else 0)
    wide = max([row.width + 2 * side for row in written] + [mark + 14 for mark in marks])
    stack = STACK if box.count > 1 else 0.0
    body = sum(ROW[row.size] for row in written) + 2 * ABOVE + (-4 if box.kind is Kind.VIEW else 0)
    return Size(max(wide, 64.0) + stack, body + stack, len(marks) * TAG + (3 if marks else 0))


def draw_leaf(canvas: Canvas, spot: Spot, mesh: Mesh) -> None:
    """Draw a box and, behind it along the flow, the tags of what leaves it."""
    box = spot.box
    stack = STACK if box.count > 1 else 0.0
    body = Rect(spot.body.x, spot.body.y, spot.body.w - stack, spot.body.h - stack)
    written = rows(box, mesh)
    marks = tags(box, mesh)
    widest = max(row.width for row in written) + 2 * SIDE + (32 if box.kind is Kind.COMM else 12)
    if widest < body.w:
        body = Rect(body.x + (body.w - widest) / 2, body.y, widest, body.h)
    _shape(canvas, box, body, mesh)
    y = body.y + ABOVE - (2 if box.kind is Kind.VIEW else 0)
    for row in written:
        height = ROW[row.size]
        centre = body.x + body.w / 2
        canvas.text(centre, y + height * 0.72, row.runs, size=row.size, mono=row.mono, anchor="middle")
        y += height
    up = box.phase is Phase.BACKWARD
    y = spot.rect.y if up else spot.body.bottom + 3
    for runs in marks:
        _tag(canvas, spot.rect.x + spot.rect.w / 2, y, runs)
        y += TAG


def _tag(canvas: Canvas, centre: float, y: float, runs: Sequence[Run]) -> None:
    wide = sum(width(run.text, SMALL, mono=True) for run in runs) + 10
    canvas.rect(Rect(centre - wide / 2, y, wide, TAG - 2), 4, fill=PAPER, stroke="#e2e8f0")
    canvas.text(centre, y + 11.2, runs, size=SMALL, mono=True, anchor="middle")


def _shape(canvas: Canvas, box: Box, body: Rect, mesh: Mesh) -> None:
    if box.kind is Kind.COMM:
        one = traffic(box.main, mesh)
        comm_shape(canvas, body, one.name, one.axes, mesh, hollow=not one.nbytes)
    elif box.kind is Kind.MEMORY:
        canvas.rect(body, 3, fill=HOST, class_="f")
    elif box.kind is Kind.VIEW:
        canvas.rect(body, body.h / 2, fill="#f1f5f9", stroke=RULE, class_="f", stroke_dasharray="3 2")
    elif box.kind in (Kind.INPUT, Kind.OUTPUT):
        canvas.rect(body, body.h / 2, fill="#e2e8f0", stroke=FAINT, class_="f")
    else:
        for i in (2, 1) if box.count > 1 else ():
            behind = Rect(body.x + i * STACK / 2, body.y + i * STACK / 2, body.w, body.h)
            canvas.rect(behind, 7, fill=PAPER, stroke=RULE)
        heavy = box.kind is Kind.OP and any(map(is_heavy, box.nodes))
        fill = "#dbe4f0" if heavy else "#eef2f7" if box.kind is Kind.CLOSED else PAPER
        canvas.rect(body, 7, fill=fill, stroke="#94a3b8" if heavy else RULE, class_="f")


def comm_shape(canvas: Canvas, body: Rect, name: str, axes: Sequence[str], mesh: Mesh, *, hollow: bool = False) -> None:
    """The outline of a comm op, in the colours of its axes; hollow if nothing is sent."""
    x, y, r, b = body.x, body.y, body.right, body.bottom
    m, slant = body.middle, 12.0
    corners = {
        "all-gather": [(x + slant, y), (r - slant, y), (r, b), (x, b)],
        "reduce-scatter": [(x, y), (r, y), (r - slant, b), (x + slant, b)],
        "all-to-all": [(x + slant, y), (r, y), (r - slant, b), (x, b)],
        "slice": [(x, y), (r - slant, y), (r, m), (r - slant, b), (x, b)],
    }.get(name, [(x + slant, y), (r - slant, y), (r, m), (r - slant, b), (x + slant, b), (x, m)])
    d = "M" + "L".join(f"{number(px)} {number(py)}" for px, py in corners) + "Z"
    colours = [axis_colour(mesh, axis) for axis in axes] or [MUTED]
    fill = colours[0]
    if len(colours) > 1:
        fill = f"url(#{gradient(canvas, colours)})"
    if hollow:
        canvas.path(d, fill=PAPER, class_="f", stroke=colours[0], stroke_width="1.5", stroke_linejoin="round")
        return
    canvas.path(d, fill=fill, class_="f", stroke=PAPER, stroke_width="1.5", stroke_linejoin="round")


def gradient(canvas: Canvas, colours: Sequence[str]) -> str:
    """Define a fill of several colours side by side; gives its id."""
    name = "g" + "".join(colours).replace("#", "")
    if not any(f'id="{name}"' in part for part in canvas.parts):
        stops = "".join(
            f'<stop offset="{number(100 * at / len(colours))}%" stop-color="{colour}"/>'
            for i, colour in enumerate(colours)
            for at in (i, i + 1)
        )
        canvas.parts.append(f'<defs><linearGradient id="{name}">{stops}</linearGradient></defs>')
    return name
