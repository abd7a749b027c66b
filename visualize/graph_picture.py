"""Pictures of graphs: modules as boxes in boxes, forward and backward side by side, axes in their colours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from shardfx.ir.graph import Graph, Phase, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops import comm
from shardfx.ir.text.printer import size_text

from .boxes import Box, BoxKind, Picture
from .detail import show
from .layout import Crossing, PictureLayout, PlacedBox, lay_out
from .leaf_boxes import TITLE, badge_width, badges, box_text, draw_leaf, draw_stack, measure, stage_text, wire_text
from .legend import draw_header
from .style import FAINT, MUTED, PAGE, PAPER, RULE, Run, axis_colour, width
from .svg import Canvas, Point, Rect, number, polygon, save, spline

MARGIN = 32.0
LANES = {
    Phase.FORWARD: ("Forward", "↓", "#e9f0fa", "#3b5b8c"),
    Phase.BACKWARD: ("Backward", "↑", "#faf0ea", "#94552f"),
    Phase.UPDATE: ("Update", "↓", "#ecf5ee", "#3f6f4d"),
}
SHADES = (PAPER, "#f7f9fc")


def draw_graph(graph: Graph, path: str | Path, title: str = "", *, boxes: int = 300, header: bool = True) -> Path:
    """Draw ``graph`` as one SVG file.

    Args:
        path: where to write the file; its folder is made.
        title: the heading of the picture.
        boxes: the most boxes that are drawn; of a larger graph, modules are drawn closed.
        header: whether title and legend stand above the picture; without them it fits on a page with text.

    Returns:
        The path of the file.
    """
    return save(path, picture_svg(show(graph, boxes), title or "graph", header=header))


def draw_folder(graphs: Mapping[str, Graph], folder: str | Path) -> list[Path]:
    """Draw ``before``, ``after`` and the graphs between as ``before.svg``, ``after.svg``, ``01-<name>.svg``, ...

    Args:
        graphs: the graphs by name, in order; a name other than ``before`` and ``after`` is that of a pass.

    Returns:
        The paths of the files, in the same order.
    """
    paths = []
    passes = 0
    for name, graph in graphs.items():
        file, title = name, name.capitalize()
        if name not in ("before", "after"):
            passes += 1
            file, title = f"{passes:02}-{name}", f"After pass {passes}: {name}"
        paths.append(draw_graph(graph, Path(folder) / f"{file}.svg", title))
    return paths


def picture_svg(picture: Picture, title: str, *, header: bool = True) -> str:
    """The text of the SVG file of a picture."""
    graph = picture.graph
    made = lay_out(picture, lambda box: measure(box, graph.mesh))
    page, head, body = Canvas(), Canvas(), Canvas()
    wide = max(made.width, 760.0) if header else made.width
    top = draw_header(head, picture, title, MARGIN, wide) if header else MARGIN
    _lanes(body, made, graph.mesh)
    _kept(body, made, picture)
    left = MARGIN + (wide - made.width) / 2
    total = Rect(0, 0, wide + 2 * MARGIN, top + made.height + MARGIN)
    page.rect(total, 14, fill=PAGE, stroke="#d8dee8")
    page.parts += [*head.parts, f'<g transform="translate({number(left)} {number(top)})">', *body.parts, "</g>"]
    described = f"{len(graph.nodes)} ops on {graph.mesh!r}, drawn as {picture.size} boxes"
    return page.document(total.w, total.h, title, described)


def _lanes(canvas: Canvas, made: PictureLayout, mesh: Mesh) -> None:
    for lane in reversed(made.lanes):
        name, arrow, fill, ink = LANES[lane.phase]
        canvas.rect(lane.rect, 16, fill=fill)
        canvas.text(lane.rect.x + 24, lane.rect.y + 32, [Run(f"{arrow} {name}", ink, True)], size=15)
    for crossing in made.crossings:
        _crossing(canvas, crossing)
    shade: dict[Box, str] = {}
    around: dict[Box, set[tuple[int, ...]]] = {}
    for lane in made.lanes:
        modules = [spot for spot in lane.spots if spot.box.kind is BoxKind.OPEN]
        for spot in modules:
            inner = SHADES[1] if shade.setdefault(spot.box, SHADES[0]) == SHADES[0] else SHADES[0]
            shade.update(dict.fromkeys(spot.box.children, inner))
            around.update(dict.fromkeys(spot.box.children, _stages(spot.box)))
            folded = spot.box.count > 1
            with canvas.group("b", box_text(spot.box, mesh)):
                draw_stack(canvas, spot.box, spot.body, 11, FAINT)
                canvas.rect(spot.body, 10, fill=shade[spot.box], stroke=MUTED if folded else RULE, class_="f")
        for wire in lane.wires:
            with canvas.group("w", wire_text([*wire.values], wire.targets)):
                colour = _stroke(canvas, spline(wire.points), [*wire.values], mesh)
                if wire.arrow:
                    _arrow(canvas, wire.points, colour)
        for spot in lane.spots:
            if spot.box.kind is BoxKind.OPEN:
                _module_title(canvas, spot, shade[spot.box], mesh, around.get(spot.box, set()))
            else:
                with canvas.group("b", box_text(spot.box, mesh)):
                    draw_leaf(canvas, spot, mesh)


def _stages(box: Box) -> set[tuple[int, ...]]:
    """The stages of the ops in a box, except those that send from one to another."""
    return {node.at for leaf in box.leaves() for node in leaf.nodes if node.op is not comm.send} - {()}


def _module_title(canvas: Canvas, spot: PlacedBox, halo: str, mesh: Mesh, around: set[tuple[int, ...]]) -> None:
    """A module's name, its badges, and its stage, unless the module ``around`` it is all of that stage."""
    box, body = spot.box, spot.body
    y = body.y + 19
    canvas.text(body.x + 12, y, box.title, size=TITLE, bold=True, halo=halo)
    left = body.x + 20 + width(box.title, TITLE, bold=True)
    for text, colour in badges(box, mesh):
        badge = Rect(left, y - 14, badge_width(text), 19)
        canvas.rect(badge, 9.5, fill=colour)
        canvas.text(badge.centre, y, text, size=11.5, bold=True, colour=PAPER, anchor="middle")
        left += badge.w + 6
    stages = _stages(box)
    if len(stages) == 1 and stages != around:
        canvas.text(body.right - 12, y, stage_text(stages.pop()), size=11.5, colour=MUTED, anchor="end", halo=halo)


def _stroke(canvas: Canvas, d: str, values: list[Value], mesh: Mesh) -> str:
    """Draw a line in the colours of the axes that shard its values, broken where they are partial sums."""
    specs = [value.spec for value in values if value.spec is not None]
    partial = mesh.sort(axis for spec in specs for axis in spec.partial_axes)
    axes = mesh.sort(axis for spec in specs for axis in (*spec.axes, *spec.partial_axes))
    colours = [axis_colour(mesh, axis) for axis in axes] or [FAINT]
    dash, space = 7, 5 if partial else 0
    period = dash * len(colours) + space
    for i, colour in enumerate(colours):
        plain = len(colours) == 1 and not space
        canvas.path(
            d,
            fill="none",
            stroke=colour,
            stroke_width="1.9" if axes else "1.4",
            class_="l",
            stroke_dasharray=None if plain else f"{dash} {period - dash}",
            stroke_dashoffset=None if plain or not i else str(-dash * i),
        )
    return colours[0]


def _arrow(canvas: Canvas, points: list[Point], colour: str) -> None:
    """An arrow head at the end of a line."""
    (x, y) = points[-1]
    back = next((p for p in reversed(points[:-1]) if math.dist(p, (x, y)) > 0.5), (x, y - 1))
    length = math.dist(back, (x, y))
    dx, dy = (x - back[0]) / length, (y - back[1]) / length
    corners = [(x, y), (x - 6 * dx - 3 * dy, y - 6 * dy + 3 * dx), (x - 6 * dx + 3 * dy, y - 6 * dy - 3 * dx)]
    canvas.path(polygon(corners), fill=colour, stroke=colour, stroke_width="0.8", stroke_linejoin="round")


def _crossing(canvas: Canvas, crossing: Crossing) -> None:
    """A dotted line between lanes."""
    a, b = crossing.source.rect, crossing.target.rect
    start, end = (a.right, a.middle), (b.x, b.middle)
    reach = max(40.0, (end[0] - start[0]) * 0.45)
    points = [start, (start[0] + reach, start[1]), (end[0] - reach, end[1]), end]
    values = list(dict.fromkeys(value for edge in crossing.edges for value in edge.values))
    with canvas.group("w k", wire_text(values, [edge.target for edge in crossing.edges])):
        canvas.path(spline(points), fill="none", stroke=MUTED, stroke_width="1.4", stroke_dasharray="2 4", class_="l")
        _arrow(canvas, points, FAINT)


def _kept(canvas: Canvas, made: PictureLayout, picture: Picture) -> None:
    """Draw the bytes that each module keeps for its own backward, in the gap between the lanes."""
    for a, b, edges in made.crossings:
        if not (a.box.kind is b.box.kind is BoxKind.OPEN and set(a.box.members) & set(b.box.members)):
            continue
        values = dict.fromkeys(value for edge in edges for value in edge.values)
        kept = [(value, picture.copies[value.node]) for value in values if value.node is not None]
        total = sum(value.local_bytes(picture.graph.mesh) * copies for value, copies in kept)
        middle = (made.lanes[0].rect.right + made.lanes[1].rect.x) / 2
        y = (a.rect.middle + b.rect.middle) / 2
        for text, below in ((f"{sum(copies for _, copies in kept):,} kept", -7), (size_text(total), 15)):
            canvas.text(middle, y + below, text, size=11, colour=MUTED, anchor="middle", halo=PAGE)
