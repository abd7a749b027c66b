"""Draw a graph: modules as boxes in boxes, forward and backward side by side, placements in the colours of the axes."""

from __future__ import annotations

import math

from shardfx.ir.graph import Phase, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops import comm
from shardfx.ir.text.printer import size_text
from shardfx.visualize.layout.arrange import plan
from shardfx.visualize.layout.dot import Point
from shardfx.visualize.layout.geometry import Arrangement, Crossing, Rect, Spot, Wire
from shardfx.visualize.layout.nested import STACK
from shardfx.visualize.scene.boxes import Box, Kind, Picture

from .leaf_box import TITLE, badge_width, badges, draw_leaf, measure
from .legend import draw_header
from .style import FAINT, MUTED, PAGE, PAPER, RULE, Run, axis_colour, stage_text, width
from .svg import Canvas, document, number, spline
from .tooltips import box_text, wire_text

MARGIN = 32.0
LANES = {
    Phase.FORWARD: ("Forward", "↓", "#e9f0fa", "#3b5b8c"),
    Phase.BACKWARD: ("Backward", "↑", "#faf0ea", "#94552f"),
    Phase.UPDATE: ("Update", "↓", "#ecf5ee", "#3f6f4d"),
}
SHADES = (PAPER, "#f7f9fc", PAPER, "#f7f9fc")


def picture_svg(picture: Picture, title: str, *, header: bool = True) -> str:
    """The text of the SVG file of a picture."""
    mesh = picture.graph.mesh
    made = plan(picture, lambda box: measure(box, mesh))
    body = Canvas()
    for crossing in made.crossings:
        _crossing(body, crossing)
    canvas = Canvas()
    wide = max(made.width, 760.0) if header else made.width
    top = draw_header(canvas, picture, title, MARGIN, wide) if header else MARGIN
    _lanes(body, made, mesh)
    _kept(body, made, picture)
    left = MARGIN + (wide - made.width) / 2
    total = Rect(0, 0, wide + 2 * MARGIN, top + made.height + MARGIN)
    page = Canvas()
    page.rect(total, 14, fill=PAGE, stroke="#d8dee8")
    page.parts += canvas.parts
    page.parts.append(f'<g transform="translate({number(left)} {number(top)})">')
    page.parts += body.parts
    page.parts.append("</g>")
    graph = picture.graph
    described = f"{len(graph.nodes)} ops on {mesh!r}, drawn as {picture.size} boxes"
    return document(page, total.w, total.h, title, described)


def _lanes(canvas: Canvas, made: Arrangement, mesh: Mesh) -> None:
    depth: dict[Box, int] = {}
    within: dict[Box, set[tuple[int, ...]]] = {}
    for lane in made.lanes:
        name, arrow, fill, ink = LANES[lane.phase]
        panel = Canvas()
        panel.rect(lane.rect, 16, fill=fill)
        panel.text(lane.rect.x + 24, lane.rect.y + 32, [Run(f"{arrow} {name}", ink, True)], size=15)
        canvas.parts[:0] = panel.parts
        for spot in lane.spots:
            if spot.box.kind is Kind.OPEN:
                depth.update(dict.fromkeys(spot.box.children, depth.get(spot.box, 0) + 1))
                within.update(dict.fromkeys(spot.box.children, stages_of(spot.box)))
                _container(canvas, spot, depth.get(spot.box, 0), mesh)
        for wire in lane.wires:
            _wire(canvas, wire, mesh)
        for spot in lane.spots:
            if spot.box.kind is Kind.OPEN:
                around = within.get(spot.box, set())
                _container_title(canvas, spot, depth.get(spot.box, 0), mesh, around)
            else:
                with canvas.group("b", box_text(spot.box, mesh)):
                    draw_leaf(canvas, spot, mesh)


def _container(canvas: Canvas, spot: Spot, depth: int, mesh: Mesh) -> None:
    body = spot.body
    with canvas.group("b", box_text(spot.box, mesh)):
        for i in (2, 1) if spot.box.count > 1 else ():
            behind = Rect(body.x + i * STACK / 2, body.y + i * STACK / 2, body.w, body.h)
            canvas.rect(behind, 11, fill=PAPER, stroke=FAINT)
        folded = spot.box.count > 1
        fill = SHADES[min(depth, len(SHADES) - 1)]
        canvas.rect(body, 10, fill=fill, stroke="#64748b" if folded else RULE, class_="f")


def stages_of(box: Box) -> set[tuple[int, ...]]:
    """The stages in which what is in a box is done, but for what goes from one to another."""
    return {node.at for leaf in box.leaves() for node in leaf.nodes if node.op is not comm.send} - {()}


def _container_title(canvas: Canvas, spot: Spot, depth: int, mesh: Mesh, around: set[tuple[int, ...]]) -> None:
    """A module's name, how often it is there, and its stage, where the module ``around`` it is not all of one."""
    box, body = spot.box, spot.body
    halo = SHADES[min(depth, len(SHADES) - 1)]
    y = body.y + 19
    canvas.text(body.x + 12, y, box.title, size=TITLE, bold=True, halo=halo)
    left = body.x + 20 + width(box.title, TITLE, bold=True)
    for text, colour in badges(box, mesh):
        wide = badge_width(text)
        badge = Rect(left, y - 14, wide, 19)
        canvas.rect(badge, 9.5, fill=colour)
        canvas.text(badge.x + wide / 2, y, text, size=11.5, bold=True, colour=PAPER, anchor="middle")
        left += wide + 6
    stages = stages_of(box)
    if len(stages) == 1 and stages != around:
        canvas.text(body.right - 12, y, stage_text(stages.pop()), size=11.5, colour=MUTED, anchor="end", halo=halo)


def _wire(canvas: Canvas, wire: Wire, mesh: Mesh) -> None:
    with canvas.group("w", wire_text(wire.values, wire.targets)):
        colour = stroke(canvas, spline(wire.points), wire.values, mesh)
        if wire.arrow:
            arrow(canvas, wire.points, colour)


def stroke(canvas: Canvas, d: str, values: list[Value], mesh: Mesh) -> str:
    """Draw a line in the colours of the axes that cut its values, broken where they are partial sums."""
    specs = [value.spec for value in values if value.spec is not None]
    partial = mesh.sort(axis for spec in specs for axis in spec.partial_axes)
    axes = mesh.sort(axis for spec in specs for axis in (*spec.axes, *spec.partial_axes))
    colours = [axis_colour(mesh, axis) for axis in axes] or [FAINT]
    wide = "1.9" if axes else "1.4"
    dash, space = 7, 5 if partial else 0
    period = dash * len(colours) + space
    for i, colour in enumerate(colours):
        plain = len(colours) == 1 and not space
        canvas.path(
            d,
            fill="none",
            stroke=colour,
            stroke_width=wide,
            class_="l",
            stroke_dasharray=None if plain else f"{dash} {period - dash}",
            stroke_dashoffset=None if plain or not i else str(-dash * i),
        )
    return colours[0]


def arrow(canvas: Canvas, points: list[Point], colour: str) -> None:
    """An arrow head at the end of a line."""
    (x, y) = points[-1]
    back = next((p for p in reversed(points[:-1]) if math.dist(p, (x, y)) > 0.5), (x, y - 1))
    length = math.dist(back, (x, y))
    dx, dy = (x - back[0]) / length, (y - back[1]) / length
    corners = [(x, y), (x - 6 * dx - 3 * dy, y - 6 * dy + 3 * dx), (x - 6 * dx + 3 * dy, y - 6 * dy - 3 * dx)]
    d = "M" + "L".join(f"{number(px)} {number(py)}" for px, py in corners) + "Z"
    canvas.path(d, fill=colour, stroke=colour, stroke_width="0.8", stroke_linejoin="round")


def _crossing(canvas: Canvas, crossing: Crossing) -> None:
    """A dotted line between lanes."""
    a, b = crossing.source.rect, crossing.target.rect
    start, end = (a.right, a.middle), (b.x, b.middle)
    reach = max(40.0, (end[0] - start[0]) * 0.45)
    points = [start, (start[0] + reach, start[1]), (end[0] - reach, end[1]), end]
    values = list(dict.fromkeys(value for edge in crossing.edges for value in edge.values))
    with canvas.group("w k", wire_text(values, [edge.target for edge in crossing.edges])):
        canvas.path(spline(points), fill="none", stroke=MUTED, stroke_width="1.4", stroke_dasharray="2 4", class_="l")
        arrow(canvas, points, FAINT)


def _kept(canvas: Canvas, made: Arrangement, picture: Picture) -> None:
    """In the gap between the lanes, how much each module keeps for its own backward."""
    for crossing in made.crossings:
        a, b = crossing.source, crossing.target
        if not (a.box.kind is b.box.kind is Kind.OPEN and set(a.box.members) & set(b.box.members)):
            continue
        values = dict.fromkeys(value for edge in crossing.edges for value in edge.values)
        kept = [(value, picture.copies[value.node]) for value in values if value.node is not None]
        total = sum(value.local_bytes(picture.graph.mesh) * copies for value, copies in kept)
        middle = (made.lanes[0].rect.right + made.lanes[1].rect.x) / 2
        y = (a.rect.middle + b.rect.middle) / 2
        number_kept = f"{sum(copies for _, copies in kept):,} kept"
        canvas.text(middle, y - 7, number_kept, size=11, colour=MUTED, anchor="middle", halo=PAGE)
        canvas.text(middle, y + 15, size_text(total), size=11, colour=MUTED, anchor="middle", halo=PAGE)
