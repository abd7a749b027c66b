"""The innermost boxes: ops, views, closed modules, communication, inputs and outputs; and the tooltips of all boxes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shardfx.ir.cost.traffic import over_loop, traffic
from shardfx.ir.graph import Node, Phase, Value, op_name
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.sends import is_comm
from shardfx.ir.ops.traits import base_name, is_heavy, is_own
from shardfx.ir.text.printer import size_text

from .boxes import Box, BoxKind, BoxLine
from .layout import STACK, BoxSize, PlacedBox
from .style import FAINT, HOST, INK, MUTED, PAPER, RULE, TIMES, Run, axis_colour, placement, shorten, type_text, width
from .svg import Canvas, Rect, number, polygon

TITLE, SMALL = 12.5, 10.5
ROW = {TITLE: 18.0, SMALL: 14.5}
TAG = 17.0
SIDE = 11.0
ABOVE = 5.0
MOST_LINES = 4
MOST_TAGS = 3
MOST_OPS = 24


class TextRow(NamedTuple):
    """One line of text in a box, in runs of one style each."""

    runs: list[Run]
    size: float = SMALL
    mono: bool = False

    @property
    def width(self) -> float:
        """An upper bound of its width, in pixels."""
        return width(self.runs, self.size, mono=self.mono)


def rows(box: Box, mesh: Mesh) -> list[TextRow]:
    """The text in a box."""
    if box.kind is BoxKind.COMM:
        one = traffic(box.main, mesh)
        ink = PAPER if one.nbytes else axis_colour(mesh, one.axes[0]) if one.axes else INK
        several = f" of {len(box.main.outs)}" if len(box.main.outs) > 1 else ""
        name = "".join([one.name + several, *(f"  {text}" for text, _ in badges(box, mesh))])
        sent = " ".join(one.axes) + (f"  {size_text(one.nbytes)}" if one.nbytes else "")
        lines = ("".join(run.text for run in _line(line, mesh)) for line in box.lines[:MOST_TAGS])
        first = [TextRow([Run(name, ink, True)], TITLE), TextRow([Run(sent, ink)])]
        return [*first, *(TextRow([Run(line, ink)], mono=True) for line in lines)]
    ink = PAPER if box.kind is BoxKind.MEMORY else INK
    if box.kind in (BoxKind.INPUT, BoxKind.OUTPUT):
        title = [Run(box.title, ink, True)]
    elif box.kind is BoxKind.VIEW:
        title = [Run(f"{box.label}  {box.title}".strip(), MUTED)]
    elif box.label:
        title = [Run(shorten(box.label, 28), ink, True), Run("  " + shorten(box.title, 30), MUTED)]
    else:
        title = [Run(shorten(box.title, 34), ink, True)]
    title += [Run(f"  {text}", colour if box.loop_axes else MUTED, True) for text, colour in badges(box, mesh)]
    found = [TextRow(title, SMALL if box.kind is BoxKind.VIEW else TITLE)]
    if box.kind is BoxKind.CLOSED:
        found += [TextRow([Run(text, MUTED)]) for text in _summary(box)]
    most = MOST_LINES + sum(line.role == "comm" for line in box.lines)
    shown = box.lines if len(box.lines) <= most else box.lines[: most - 1]
    found += [TextRow(_line(line, mesh), mono=True) for line in shown]
    if len(shown) < len(box.lines):
        found.append(TextRow([Run(f"and {len(box.lines) - len(shown)} more", MUTED)]))
    return found


def badges(box: Box, mesh: Mesh) -> list[tuple[str, str]]:
    """The badges of a box: its number of equal blocks, and its loops; each with its colour."""
    blocks = [(f"{TIMES} {box.count}" + ("  in a row" if box.chained and box.kind is BoxKind.OPEN else ""), INK)]
    loops = [(f"{TIMES} {mesh[axis].size} iterations", axis_colour(mesh, axis)) for axis in box.loop_axes]
    return [*(blocks if box.count > 1 else ()), *loops]


def badge_width(text: str) -> float:
    """The width of a badge with a text, in pixels."""
    return width(text, 11.5, bold=True) + 16


def _summary(box: Box) -> list[str]:
    """The number of ops in a closed module, and the most frequent."""
    counts = Counter(base_name(node) for node in box.inside if not is_own(node))
    main = [f"{name} {TIMES} {n}" if n > 1 else name for name, n in counts.most_common(3)]
    total = len(box.inside)
    ops = [] if box.title.startswith(str(total)) else [f"{total} ops" if total > 1 else "1 op"]
    return [*ops, shorten(", ".join(main) + (" …" if len(counts) > 3 else ""), 46)]


def _line(line: BoxLine, mesh: Mesh) -> list[Run]:
    if line.role == "comm":
        over = [Run(f"{axis} ", axis_colour(mesh, axis), True) for axis in line.axes]
        return [*over, Run(line.text, axis_colour(mesh, line.axes[0]) if line.axes else INK)]
    sign = Run("→ " if line.role == "out" else "", MUTED)
    return [sign, Run(shorten(line.text, 30) + "  ", MUTED), *(placement(line.value, mesh) if line.value else [])]


def _tags(box: Box, mesh: Mesh) -> list[list[Run]]:
    """The placements of the values that leave a box, each once."""
    found = {tuple(run.text for run in runs): runs for runs in (placement(value, mesh) for value in box.tags)}
    shown = list(found.values())
    if len(shown) > MOST_TAGS:
        shown = [*shown[: MOST_TAGS - 1], [Run(f"and {len(shown) - MOST_TAGS + 1} more", MUTED)]]
    return shown


def measure(box: Box, mesh: Mesh) -> BoxSize:
    """The size that a box needs; of a module that is drawn open, the width of its title."""
    if box.kind is BoxKind.OPEN:
        title = width(box.title, TITLE, bold=True) + 24
        return BoxSize(title + sum(badge_width(text) + 6 for text, _ in badges(box, mesh)), 0)
    written = rows(box, mesh)
    marks = [width(runs, SMALL, mono=True) for runs in _tags(box, mesh)]
    side = SIDE + (16 if box.kind is BoxKind.COMM else 6 if box.kind in (BoxKind.INPUT, BoxKind.OUTPUT) else 0)
    wide = max([row.width + 2 * side for row in written] + [mark + 14 for mark in marks])
    stack = STACK if box.count > 1 else 0.0
    body = sum(ROW[row.size] for row in written) + 2 * ABOVE + (-4 if box.kind is BoxKind.VIEW else 0)
    return BoxSize(max(wide, 64.0) + stack, body + stack, len(marks) * TAG + (3 if marks else 0))


def draw_leaf(canvas: Canvas, spot: PlacedBox, mesh: Mesh) -> None:
    """Draw a box and, behind it along the flow, the tags of the values that leave it."""
    box, written = spot.box, rows(spot.box, mesh)
    stack = STACK if box.count > 1 else 0.0
    room = spot.body.w - stack
    wide = min(room, max(row.width for row in written) + 2 * SIDE + (32 if box.kind is BoxKind.COMM else 12))
    body = Rect(spot.body.x + (room - wide) / 2, spot.body.y, wide, spot.body.h - stack)
    _shape(canvas, box, body, mesh)
    y = body.y + ABOVE - (2 if box.kind is BoxKind.VIEW else 0)
    for row in written:
        height = ROW[row.size]
        canvas.text(body.centre, y + height * 0.72, row.runs, size=row.size, mono=row.mono, anchor="middle")
        y += height
    y = spot.rect.y if box.phase is Phase.BACKWARD else spot.body.bottom + 3
    for runs in _tags(box, mesh):
        wide = width(runs, SMALL, mono=True) + 10
        tag = Rect(spot.rect.centre - wide / 2, y, wide, TAG - 2)
        canvas.rect(tag, 4, fill=PAPER, stroke="#e2e8f0")
        canvas.text(spot.rect.centre, y + 11.2, runs, size=SMALL, mono=True, anchor="middle")
        y += TAG


def _shape(canvas: Canvas, box: Box, body: Rect, mesh: Mesh) -> None:
    if box.kind is BoxKind.COMM:
        one = traffic(box.main, mesh)
        comm_shape(canvas, body, one.name, [axis_colour(mesh, axis) for axis in one.axes], hollow=not one.nbytes)
    elif box.kind is BoxKind.MEMORY:
        canvas.rect(body, 3, fill=HOST, class_="f")
    elif box.kind is BoxKind.VIEW:
        canvas.rect(body, body.h / 2, fill="#f1f5f9", stroke=RULE, class_="f", stroke_dasharray="3 2")
    elif box.kind in (BoxKind.INPUT, BoxKind.OUTPUT):
        canvas.rect(body, body.h / 2, fill="#e2e8f0", stroke=FAINT, class_="f")
    else:
        draw_stack(canvas, box, body, 7, RULE)
        heavy = box.kind is BoxKind.OP and any(map(is_heavy, box.nodes))
        fill = "#dbe4f0" if heavy else "#eef2f7" if box.kind is BoxKind.CLOSED else PAPER
        canvas.rect(body, 7, fill=fill, stroke=FAINT if heavy else RULE, class_="f")


def draw_stack(canvas: Canvas, box: Box, body: Rect, radius: float, colour: str) -> None:
    """Draw the cards behind a folded box."""
    for i in (2, 1) if box.count > 1 else ():
        behind = Rect(body.x + i * STACK / 2, body.y + i * STACK / 2, body.w, body.h)
        canvas.rect(behind, radius, fill=PAPER, stroke=colour)


def comm_shape(canvas: Canvas, body: Rect, name: str, colours: Sequence[str], *, hollow: bool = False) -> None:
    """The outline of a comm op, in the colours of its axes; hollow if nothing is sent."""
    x, y, r, b = body.x, body.y, body.right, body.bottom
    m, slant = body.middle, 12.0
    corners = {
        "all-gather": [(x + slant, y), (r - slant, y), (r, b), (x, b)],
        "reduce-scatter": [(x, y), (r, y), (r - slant, b), (x + slant, b)],
        "all-to-all": [(x + slant, y), (r, y), (r - slant, b), (x, b)],
        "slice": [(x, y), (r - slant, y), (r, m), (r - slant, b), (x, b)],
    }.get(name, [(x + slant, y), (r - slant, y), (r, m), (r - slant, b), (x + slant, b), (x, m)])
    first, *more = colours or [MUTED]
    fill, line = (PAPER, first) if hollow else (_gradient(canvas, colours) if more else first, PAPER)
    canvas.path(polygon(corners), fill=fill, class_="f", stroke=line, stroke_width="1.5", stroke_linejoin="round")


def _gradient(canvas: Canvas, colours: Sequence[str]) -> str:
    """Define a fill of several colours side by side."""
    name = "g" + "".join(colours).replace("#", "")
    if not any(f'id="{name}"' in part for part in canvas.parts):
        stops = "".join(
            f'<stop offset="{number(100 * at / len(colours))}%" stop-color="{colour}"/>'
            for i, colour in enumerate(colours)
            for at in (i, i + 1)
        )
        canvas.parts.append(f'<defs><linearGradient id="{name}">{stops}</linearGradient></defs>')
    return f"url(#{name})"


# ---- tooltips -----------------------------------------------------------------------------------------------


def box_text(box: Box, mesh: Mesh) -> str:
    """The tooltip of a box: its source, its reasons, and the ops in it."""
    if box.kind in (BoxKind.INPUT, BoxKind.OUTPUT):
        return "\n".join([f"{box.note} {box.title}", *(type_text(value) for value in box.tags)])
    lines = []
    if box.kind in (BoxKind.OPEN, BoxKind.CLOSED):
        nodes = box.inside if box.kind is BoxKind.CLOSED else [node for leaf in box.leaves() for node in leaf.nodes]
        lines.append(
            f"{box.path or box.title}: {len(nodes)} ops"
            + (f", drawn once for {box.count} equal blocks" if box.count > 1 else "")
            + "".join(f", done in each of the {mesh[axis].size} iterations of {axis}" for axis in box.loop_axes)
        )
        counts = Counter(op_name(node.op) for node in nodes).most_common(12)
        lines.append(", ".join(f"{number} {TIMES} {name}" if number > 1 else name for name, number in counts))
        lines += _source(nodes[0]) if nodes else []
        lines += ["", *_ops(box.nodes, mesh)] if box.kind is BoxKind.CLOSED else []
    else:
        lines += [*_ops(box.nodes, mesh), "", *_source(box.main)]
    return "\n".join([*lines, *_reasons(box.nodes)]).strip()


def wire_text(values: Sequence[Value], targets: Iterable[Box]) -> str:
    """The tooltip of a line: its values, their source and where they go."""
    lines = []
    for value in values[:MOST_OPS]:
        lines.append(f"%{value.name}  {type_text(value)}")
        lines.append(f"  from {op_name(value.node.op)}  {value.node.where}" if value.node else "  an input")
        if value.node is not None and value.node.why:
            lines.append(f"  why: {value.node.why}")
    goals = Counter(f"{target.label} {target.title}".strip() for target in targets)
    to = f"to {', '.join(list(goals)[:6])}" + (" …" if len(goals) > 6 else "")
    return "\n".join([*lines, *_more(values), to])


def _more(items: Sequence[object]) -> list[str]:
    return [f"… and {len(items) - MOST_OPS} more"] if len(items) > MOST_OPS else []


def _ops(nodes: Sequence[Node], mesh: Mesh) -> list[str]:
    lines = []
    for node in nodes[:MOST_OPS]:
        results = ", ".join(f"%{value.name} {type_text(value)}" for value in node.outs)
        lines.append(f"{op_name(node.op)} → {results}")
        if is_comm(node):
            one = traffic(node, mesh)
            often = f", {one.iterations} times" if one.iterations > 1 else ""
            members = f"{mesh.extent(one.axes)} {'iterations' if over_loop(node, mesh) else 'ranks'}"
            reduce = f", {node.kwargs['reduce']}" if node.kwargs.get("reduce") else ""
            over = f"  over {', '.join(one.axes)} ({members}){reduce}"
            lines.append(f"{over}: {size_text(one.nbytes)} sent per rank{often}")
    return [*lines, *_more(nodes)]


def _source(node: Node) -> list[str]:
    lines = [f"at {node.where}" if str(node.where) else "", f"  {node.where.code.strip()}" if node.where.code else ""]
    return [line for line in [*lines, stage_text(node.at) if node.at else ""] if line]


def stage_text(at: Sequence[int]) -> str:
    """``stage 2``, ``stages 0, 3``."""
    return f"stage{'s' * (len(at) > 1)} {', '.join(map(str, at))}"


def _reasons(nodes: Sequence[Node]) -> list[str]:
    """The remarks of passes on the nodes: why, which pass made them, and its own notes."""
    lines = [f"why: {why}" for why in list(dict.fromkeys(node.why for node in nodes if node.why))[:6]]
    makers = dict.fromkeys(node.made_by for node in nodes if node.made_by)
    remarks = dict.fromkeys(f"{key}={value}" for node in nodes for key, value in node.attrs.items())
    lines += [f"made by pass {', '.join(makers)}"] if makers else []
    return lines + ([f"remarks: {', '.join(list(remarks)[:6])}"] if remarks else [])
