"""Tiles of an image and what ranks send one another of them: a panel for each exchange, and margins by layer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from shardfx.ir.graph import Graph, Node, Phase, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.shards import RowExchange
from shardfx.ir.text.printer import size_text
from shardfx.visualize.layout.geometry import Rect

from .style import AXIS_COLOURS, FAINT, INK, MUTED, PAPER, RULE, shorten, type_text, width
from .svg import Canvas, document, number

MARGIN, GAP, TOP = 24.0, 36.0, 78.0
PANEL, HEAD, FIRST = 210.0, 46.0, 320.0
"""How large the pictures of exchanges are, what stands above each, and how large that of the input is."""
ACROSS = 4
SMALL, TEXT = 10.5, 12.0
BAR = 260.0


class Sending(NamedTuple):
    """Rows that one rank sends another: first row and count of each of the dims, and their bytes."""

    source: int
    target: int
    box: tuple[tuple[int, int], ...]
    nbytes: int


class Margin(NamedTuple):
    """How far a layer's places reach on the image, in rows; ``note`` in the place of a number."""

    layer: str
    rows: float
    note: str = ""


def sendings(node: Node, mesh: Mesh) -> list[Sending]:
    """Who sends what to whom in an exchange of rows, among the ranks that stand first on all other axes."""
    value, dims = node.operands[0], tuple(dim for dim, _ in node.kwargs["rows"])
    source, target = value.spec, node.outs[0].spec
    assert source is not None and target is not None
    found = []
    for start in shown_ranks(value, mesh):
        if any(start[axis] for dim in dims for axis in source.dims[dim].axes):
            continue
        exchange = RowExchange(source, target, value.shape, mesh, start, dims)
        rest = [n for d, n in enumerate(source.local_shape(value.shape, mesh, start)) if d not in dims]
        for i, j in itertools.permutations(range(len(exchange.members)), 2):
            box = exchange.sends(i)[j]
            if box is not None:
                nbytes = math.prod([*rest, *(length for _, length in box)]) * value.type.dtype.itemsize
                found.append(Sending(mesh.rank(exchange.members[i]), mesh.rank(exchange.members[j]), box, nbytes))
    return found


def shown_ranks(value: Value, mesh: Mesh) -> list[dict[str, int]]:
    """Where the ranks stand that hold different tiles of a sample's channel: the first along all other axes."""
    assert value.spec is not None
    axes = [axis for cut in value.spec.dims[2:] for axis in cut.axes]
    return mesh.along({axis.name: 0 for axis in mesh.space}, axes)


def draw_tiles(graph: Graph, name: str, margins: Sequence[Margin], path: str | Path) -> Path:
    """Draw the tiles of an input, and each exchange of rows of a planned graph, as one SVG file.

    Args:
        graph: planned.
        name: the input.
        margins: by layer, as they are to stand in the picture.
        path: where to write the file; its folder is made.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tiles_svg(graph, name, margins), encoding="utf-8")
    return path


def tiles_svg(graph: Graph, name: str, margins: Sequence[Margin]) -> str:
    """The picture as SVG text (see :func:`draw_tiles`)."""
    canvas, mesh, image = Canvas(), graph.mesh, graph.input(name).value
    nodes = [node for node in graph.nodes if str(node.op) == "comm.halo"]
    moved = {node: sent for node in nodes if (sent := sendings(node, mesh))}  # others take a part of what they have
    total = sum(each.nbytes for sent in moved.values() for each in sent)
    said = f"{len(moved)} exchanges of rows, {size_text(total)} in all, of one group of tiles"
    canvas.text(MARGIN, 34, f"Tiles of {name} : {type_text(image)}", size=17, bold=True)
    canvas.text(MARGIN, 57, said, size=12.5, colour=MUTED)
    _tiles(canvas, Field(image, mesh, MARGIN, TOP, FIRST), {}, True)
    _margins(canvas, margins, MARGIN + FIRST + 2 * GAP, TOP)
    y = canvas.bottom + GAP
    for phase in Phase:
        own = {node: sent for node, sent in moved.items() if node.phase is phase}
        if own:
            y = _phase(canvas, mesh, phase, own, y)
    return document(canvas, canvas.right + MARGIN, y, f"Tiles of {name}", f"{said}, on {mesh}")


def _phase(canvas: Canvas, mesh: Mesh, phase: Phase, moved: Mapping[Node, Sequence[Sending]], y: float) -> float:
    """The exchanges of a phase, some in a row; gives where they end."""
    canvas.text(MARGIN, y + 12, phase.value.capitalize(), size=14, bold=True)
    y += 30
    for row in _rows(moved):
        fields = []
        for i, (node, sent) in enumerate(row):
            field = Field(node.operands[0], mesh, MARGIN + i * (PANEL + GAP), y + HEAD, PANEL)
            where = node.where.module or str(node.where) or phase.value
            canvas.text(field.area.x, y + 12, shorten(where, 30), size=TEXT, bold=True)
            canvas.text(field.area.x, y + 28, shorten(f"{type_text(node.operands[0])}", 38), size=SMALL, mono=True)
            most = max((each.nbytes for each in sent), default=0)
            nbytes = size_text(sum(each.nbytes for each in sent))
            canvas.text(field.area.x, y + 41, f"{nbytes} in {len(sent)} messages", size=SMALL, colour=MUTED)
            needs = {mesh.rank(at): field.box(node.outs[0], at) for at in shown_ranks(node.operands[0], mesh)}
            _tiles(canvas, field, needs, False)
            for each in sent:
                _arrow(canvas, field, each, most)
            fields.append(field)
        y = max(field.area.bottom for field in fields) + GAP
    return y


def _rows(moved: Mapping[Node, Sequence[Sending]]) -> Iterator[list[tuple[Node, Sequence[Sending]]]]:
    entries = list(moved.items())
    return (entries[i : i + ACROSS] for i in range(0, len(entries), ACROSS))


class Field:
    """Where a value's last two cut dims lie in the picture, and its tiles on it."""

    def __init__(self, value: Value, mesh: Mesh, x: float, y: float, size: float) -> None:
        assert value.spec is not None
        cut = [dim for dim, each in enumerate(value.spec.dims) if each.axes and dim > 1]
        others = [dim for dim in range(value.type.ndim) if dim not in cut]
        self.dims = sorted([*cut, *others[::-1]][:2]) if value.type.ndim > 1 else [0, 0]
        self.value, self.mesh = value, mesh
        high, wide = (value.shape[dim] for dim in self.dims)
        scale = size / max(high, wide, 1)
        self.area = Rect(x, y, max(wide * scale, size / 6), max(high * scale, size / 6))
        self.held = {mesh.rank(at): self.box(value, at) for at in shown_ranks(value, mesh)}

    def box(self, value: Value, at: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
        """First row and count that a rank holds of the two dims."""
        assert value.spec is not None
        return tuple(value.spec.dims[dim].span(value.shape[dim], self.mesh, at) for dim in self.dims)

    def rect(self, box: Sequence[tuple[int, int]]) -> Rect:
        """Rows as they lie in the picture."""
        high, wide = (self.value.shape[dim] or 1 for dim in self.dims)
        (top, rows), (left, columns) = box
        down, across = self.area.h / high, self.area.w / wide
        return Rect(self.area.x + left * across, self.area.y + top * down, columns * across, rows * down)


def colour_of(rank: int) -> str:
    """The colour of a rank; from the ninth on colours come again."""
    return AXIS_COLOURS[rank % len(AXIS_COLOURS)]


def _tiles(canvas: Canvas, field: Field, needs: Mapping[int, tuple[tuple[int, int], ...]], rows: bool) -> None:
    """Each rank's tile in its colour, and within dashes what it has after the exchange."""
    canvas.rect(field.area, fill=PAPER, stroke=RULE)
    for rank, box in field.held.items():
        tile = field.rect(box)
        (top, high), (left, wide) = box
        text = f"rows {top} to {top + high - 1}, columns {left} to {left + wide - 1}"
        with canvas.group("b", f"rank {rank} has {text}"):
            canvas.rect(tile, fill=colour_of(rank), fill_opacity="0.16", stroke=colour_of(rank), stroke_width="1")
    for rank, box in needs.items():
        (top, high), (left, wide) = box
        text = f"rank {rank} needs rows {top} to {top + high - 1}, columns {left} to {left + wide - 1}"
        with canvas.group("b", text):
            dashes, thick = "5 3", "1.4"
            held = field.rect(box)
            canvas.rect(held, fill="none", stroke=colour_of(rank), stroke_dasharray=dashes, stroke_width=thick)
    for rank, box in field.held.items():
        tile = field.rect(box)
        x, y = tile.x + tile.w / 2, tile.middle
        canvas.text(x, y + 4, str(rank), size=15 if rows else TEXT, bold=True, colour=colour_of(rank), anchor="middle")
        if rows and tile.w > 90:
            (top, high), (left, wide) = box
            said = f"{top}:{top + high}, {left}:{left + wide}"
            canvas.text(x, y + 20, said, size=SMALL, colour=MUTED, anchor="middle")


def _arrow(canvas: Canvas, field: Field, sent: Sending, most: int) -> None:
    """From the tile of the one towards that of the other; the bytes of what is no corner stand beside it."""
    a, b = (field.rect(field.held[rank]) for rank in (sent.source, sent.target))
    (x0, y0), (x1, y1) = ((r.x + r.w / 2, r.middle) for r in (a, b))
    far = math.hypot(x1 - x0, y1 - y0) or 1.0
    dx, dy = (x1 - x0) / far, (y1 - y0) / far
    side = 7.0
    x0, y0 = x0 + dx * far * 0.24 - dy * side, y0 + dy * far * 0.24 + dx * side
    x1, y1 = x1 - dx * far * 0.24 - dy * side, y1 - dy * far * 0.24 + dx * side
    thick = 0.8 + 1.6 * sent.nbytes / max(most, 1)
    colour = colour_of(sent.source)
    said = ", ".join(f"{start} to {start + length - 1}" for start, length in sent.box)
    with canvas.group("w", f"rank {sent.source} to rank {sent.target}: {size_text(sent.nbytes)}, rows {said}"):
        line = f"M{number(x0)} {number(y0)}L{number(x1)} {number(y1)}"
        canvas.path(line, stroke=colour, stroke_width=thick, fill="none")
        tip = f"M{number(x1)} {number(y1)}"
        for turn in (2.6, -2.6):
            u, v = dx * math.cos(turn) - dy * math.sin(turn), dx * math.sin(turn) + dy * math.cos(turn)
            tip += f"L{number(x1 + 6 * u)} {number(y1 + 6 * v)}"
        canvas.path(tip + "Z", fill=colour)
    room = min(a.h, b.h) > 60 if abs(dx) > abs(dy) else min(a.w, b.w) > 100
    if min(abs(dx), abs(dy)) < 0.1 and far > 60 and room:
        x, y = (x0 + x1) / 2 - dy * 6, (y0 + y1) / 2 + dx * 11
        anchor = "middle" if abs(dx) > abs(dy) else ("end" if -dy < 0 else "start")
        canvas.text(x, y + 3, size_text(sent.nbytes), size=9, colour=colour, anchor=anchor, halo=PAPER)


def _margins(canvas: Canvas, margins: Sequence[Margin], x: float, y: float) -> None:
    """How far the places of each layer reach, as bars."""
    if not margins:
        return
    said = "How far a place of each layer reaches: rows of the image on each side"
    canvas.text(x, y + 12, said, size=TEXT, bold=True)
    names = max(width(shorten(each.layer, 34), SMALL) for each in margins) + 14
    most = max(each.rows for each in margins) or 1.0
    for i, each in enumerate(margins):
        line = y + 32 + i * 17
        canvas.text(x, line, shorten(each.layer, 34), size=SMALL, colour=INK)
        if each.note:
            canvas.text(x + names, line, each.note, size=SMALL, colour=MUTED)
            continue
        bar = Rect(x + names, line - 9, BAR * each.rows / most, 11)
        canvas.rect(bar, 2, fill=FAINT)
        canvas.text(bar.right + 6, line, f"{each.rows:g}", size=SMALL, colour=MUTED)
