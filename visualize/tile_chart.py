"""The tiles of an image and the halo exchanges between ranks: a panel for each, and receptive fields by layer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardfx.ir.graph import Graph, Node, Phase, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.shards import RowExchange
from shardfx.ir.text.printer import size_text

from .style import FAINT, MUTED, PAPER, RULE, colour_of, shorten, type_text, width
from .svg import Canvas, Rect, polygon, polyline

MARGIN, GAP, TOP = 24.0, 36.0, 78.0
PANEL, HEAD, FIRST = 210.0, 46.0, 320.0
"""The sizes of a panel of an exchange, of the text above it, and of the panel of the input."""
ACROSS = 4
SMALL, TEXT = 10.5, 12.0
BAR = 260.0

Span = tuple[int, int]
"""First row and number of rows."""


class HaloMessage(NamedTuple):
    """Rows that one rank sends another: a span of each of the dims, and their bytes."""

    source: int
    target: int
    box: tuple[Span, ...]
    nbytes: int


class LayerMargin(NamedTuple):
    """The receptive field of a layer on the image: rows on each side; or ``note`` instead."""

    layer: str
    rows: float
    note: str = ""


def messages(node: Node, mesh: Mesh) -> list[HaloMessage]:
    """The messages of a halo exchange, among the ranks that are first on all other axes."""
    value, dims = node.operands[0], tuple(dim for dim, _ in node.kwargs["rows"])
    source, target = value.spec, node.outs[0].spec
    assert source is not None and target is not None
    found = []
    for start in _shown_ranks(value, mesh):
        if any(start[axis] for dim in dims for axis in source.dims[dim].axes):
            continue
        exchange = RowExchange(source, target, value.shape, mesh, start, dims)
        rest = [n for d, n in enumerate(source.local_shape(value.shape, mesh, start)) if d not in dims]
        for i, j in itertools.permutations(range(len(exchange.members)), 2):
            if (box := exchange.sends(i)[j]) is not None:
                nbytes = math.prod([*rest, *(length for _, length in box)]) * value.type.dtype.itemsize
                source_rank, target_rank = (mesh.rank(exchange.members[each]) for each in (i, j))
                found.append(HaloMessage(source_rank, target_rank, box, nbytes))
    return found


def _shown_ranks(value: Value, mesh: Mesh) -> list[dict[str, int]]:
    """The coordinates of ranks with different tiles of a sample's channel: the first along all other axes."""
    assert value.spec is not None
    axes = [axis for dim in value.spec.dims[2:] for axis in dim.axes]
    return mesh.along({axis.name: 0 for axis in mesh.space}, axes)


def draw_tiles(graph: Graph, name: str, margins: Sequence[LayerMargin], path: str | Path) -> Path:
    """Draw the tiles of an input, and each halo exchange of a planned graph, as one SVG file.

    Args:
        graph: planned.
        name: the input.
        margins: by layer.
        path: where to write the file; its folder is made.
    """
    canvas, mesh, image = Canvas(), graph.mesh, graph.input(name).value
    nodes = [node for node in graph.nodes if str(node.op) == "comm.halo"]
    moved = {node: sent for node in nodes if (sent := messages(node, mesh))}  # others take a part of what they have
    total = sum(each.nbytes for sent in moved.values() for each in sent)
    said = f"{len(moved)} halo exchanges, {size_text(total)} in all, of one group of tiles"
    canvas.text(MARGIN, 34, f"Tiles of {name} : {type_text(image)}", size=17, bold=True)
    canvas.text(MARGIN, 57, said, size=12.5, colour=MUTED)
    _Panel(image, mesh, MARGIN, TOP, FIRST).draw(canvas, {}, detailed=True)
    _margins(canvas, margins, MARGIN + FIRST + 2 * GAP, TOP)
    y = canvas.bottom + GAP
    for phase in Phase:
        own = [(node, sent) for node, sent in moved.items() if node.phase is phase]
        if own:
            canvas.text(MARGIN, y + 12, phase.value.capitalize(), size=14, bold=True)
            y += 30
        for row in (own[i : i + ACROSS] for i in range(0, len(own), ACROSS)):
            left = (MARGIN + i * (PANEL + GAP) for i in range(len(row)))
            y = GAP + max(_exchange(canvas, mesh, *each, x, y) for each, x in zip(row, left, strict=True))
    return canvas.save(path, canvas.right + MARGIN, y, f"Tiles of {name}", f"{said}, on {mesh}")


def _exchange(canvas: Canvas, mesh: Mesh, node: Node, sent: Sequence[HaloMessage], x: float, y: float) -> float:
    """The panel of one exchange; gives where it ends."""
    value = node.operands[0]
    panel = _Panel(value, mesh, x, y + HEAD, PANEL)
    canvas.text(x, y + 12, shorten(node.where.module or str(node.where) or node.phase.value, 30), size=TEXT, bold=True)
    canvas.text(x, y + 28, shorten(type_text(value), 38), size=SMALL, mono=True)
    nbytes = size_text(sum(each.nbytes for each in sent))
    canvas.text(x, y + 41, f"{nbytes} in {len(sent)} messages", size=SMALL, colour=MUTED)
    panel.draw(canvas, {mesh.rank(at): panel.box(node.outs[0], at) for at in _shown_ranks(value, mesh)})
    for each in sent:
        _arrow(canvas, panel, each, max(other.nbytes for other in sent))
    return panel.area.bottom


class _Panel:
    """The last two sharded dims of a value as a rectangle, and its tiles on it."""

    def __init__(self, value: Value, mesh: Mesh, x: float, y: float, size: float) -> None:
        assert value.spec is not None
        sharded = [dim for dim, each in enumerate(value.spec.dims) if each.axes and dim > 1]
        others = [dim for dim in range(value.type.ndim) if dim not in sharded]
        self.dims = sorted([*sharded, *others[::-1]][:2]) if value.type.ndim > 1 else [0, 0]
        self.value, self.mesh = value, mesh
        high, wide = (value.shape[dim] for dim in self.dims)
        scale = size / max(high, wide, 1)
        self.area = Rect(x, y, max(wide * scale, size / 6), max(high * scale, size / 6))
        self.tiles = {mesh.rank(at): self.box(value, at) for at in _shown_ranks(value, mesh)}

    def box(self, value: Value, at: Mapping[str, int]) -> tuple[Span, ...]:
        """The spans of the two dims that a rank has."""
        assert value.spec is not None
        return tuple(value.spec.dims[dim].span(value.shape[dim], self.mesh, at) for dim in self.dims)

    def rect(self, box: Sequence[Span]) -> Rect:
        """Spans of the two dims as they lie in the picture."""
        high, wide = (self.value.shape[dim] or 1 for dim in self.dims)
        (top, rows), (left, columns) = box
        down, across = self.area.h / high, self.area.w / wide
        return Rect(self.area.x + left * across, self.area.y + top * down, columns * across, rows * down)

    def draw(self, canvas: Canvas, needs: Mapping[int, tuple[Span, ...]], *, detailed: bool = False) -> None:
        """Each rank's tile in its colour, and its tile with the halo (``needs``) dashed."""
        canvas.rect(self.area, fill=PAPER, stroke=RULE)
        tile: dict[str, Any] = {"fill_opacity": "0.16", "stroke_width": "1"}
        halo: dict[str, Any] = {"fill": "none", "stroke_width": "1.4", "stroke_dasharray": "5 3"}
        for word, boxes, style in (("has", self.tiles, tile), ("needs", needs, halo)):
            for rank, ((top, high), (left, wide)) in boxes.items():
                said = f"rank {rank} {word} rows {top} to {top + high - 1}, columns {left} to {left + wide - 1}"
                with canvas.group("b", said):
                    canvas.rect(self.rect(boxes[rank]), **{"fill": colour_of(rank), "stroke": colour_of(rank), **style})
        for rank, ((top, high), (left, wide)) in self.tiles.items():
            rect = self.rect(self.tiles[rank])
            size, colour = 15 if detailed else TEXT, colour_of(rank)
            canvas.text(rect.centre, rect.middle + 4, str(rank), size=size, bold=True, colour=colour, anchor="middle")
            if detailed and rect.w > 90:
                text = f"{top}:{top + high}, {left}:{left + wide}"
                canvas.text(rect.centre, rect.middle + 20, text, size=SMALL, colour=MUTED, anchor="middle")


def _arrow(canvas: Canvas, panel: _Panel, sent: HaloMessage, most: int) -> None:
    """From one tile towards another; with the bytes of a message beside it, unless it is a corner's."""
    a, b = (panel.rect(panel.tiles[rank]) for rank in (sent.source, sent.target))
    far = math.dist((a.centre, a.middle), (b.centre, b.middle)) or 1.0
    dx, dy = (b.centre - a.centre) / far, (b.middle - a.middle) / far

    def beside(share: float) -> tuple[float, float]:
        return a.centre + dx * far * share - dy * 7, a.middle + dy * far * share + dx * 7

    (x0, y0), (x1, y1) = beside(0.24), beside(0.76)
    colour, thick = colour_of(sent.source), 0.8 + 1.6 * sent.nbytes / max(most, 1)
    said = ", ".join(f"{start} to {start + length - 1}" for start, length in sent.box)
    with canvas.group("w", f"rank {sent.source} to rank {sent.target}: {size_text(sent.nbytes)}, rows {said}"):
        canvas.path(polyline([(x0, y0), (x1, y1)]), stroke=colour, stroke_width=thick, fill="none")
        angle = math.atan2(dy, dx)
        tips = [(x1 + 6 * math.cos(angle + by), y1 + 6 * math.sin(angle + by)) for by in (2.6, -2.6)]
        canvas.path(polygon([(x1, y1), *tips]), fill=colour)
    level = abs(dx) > abs(dy)
    room = min(a.h, b.h) > 60 if level else min(a.w, b.w) > 100
    if min(abs(dx), abs(dy)) < 0.1 and far > 60 and room:
        x, y = (x0 + x1) / 2 - dy * 6, (y0 + y1) / 2 + dx * 11
        anchor = "middle" if level else "end" if dy > 0 else "start"
        canvas.text(x, y + 3, size_text(sent.nbytes), size=9, colour=colour, anchor=anchor, halo=PAPER)


def _margins(canvas: Canvas, margins: Sequence[LayerMargin], x: float, y: float) -> None:
    """The receptive field of each layer, as bars."""
    if not margins:
        return
    canvas.text(x, y + 12, "Receptive field of each layer: rows of the image on each side", size=TEXT, bold=True)
    names = max(width(shorten(each.layer, 34), SMALL) for each in margins) + 14
    most = max(each.rows for each in margins) or 1.0
    for i, each in enumerate(margins):
        line = y + 32 + i * 17
        bar = Rect(x + names, line - 9, BAR * each.rows / most, 11)
        canvas.text(x, line, shorten(each.layer, 34), size=SMALL)
        if not each.note:
            canvas.rect(bar, 2, fill=FAINT)
        right = bar.x if each.note else bar.right + 6
        canvas.text(right, line, each.note or f"{each.rows:g}", size=SMALL, colour=MUTED)
