"""The layout of a picture: a lane for each phase, modules in modules, matching blocks at the same height.

Each module is laid out on its own, then as one box in its parent's layout. A line that crosses the border of a module
does so at a *port*: inside, a point on the upper or lower border; outside, a place on the side of the module's box.
All lines that come from one box share a port (or all that go to one, where communication gathers many values). So
boxes never overlap, and a level's time does not depend on the size of the rest.

All is laid out in flow direction, downwards. Backward is then flipped, so that it flows up, and each block's backward
is moved beside its forward: lines of values that are kept for backward stay short.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import pygraphviz

from shardfx.ir.graph import Phase, Value

from .boxes import Box, BoxKind, Edge, Lane, Picture
from .svg import Point, Rect

HEADER = 26.0
PAD = 14.0
STACK = 8.0
"""The offset of the cards behind a folded block."""
LARGE = 60
HURRY = "splines=line nslimit=2 nslimit1=2 mclimit=.3"
GAP, RANK_GAP = 22.0, 26.0
LANE_GAP = 90.0
LANE_PAD = 24.0
LANE_HEADER = 52.0


class BoxSize(NamedTuple):
    """The size of a leaf box: its body, and behind it (seen along the flow) the tags of its outgoing values."""

    width: float
    body: float
    tags: float = 0.0


@dataclass(eq=False)
class PlacedBox:
    """The position of a box: ``rect`` in all, ``body`` without its tags or the cards behind it."""

    box: Box
    rect: Rect
    body: Rect


@dataclass(eq=False)
class DotBox:
    """A box for Graphviz. ``ins`` and ``outs`` are places on its upper and lower side where lines may end."""

    width: float
    height: float
    ins: Sequence[float] = ()
    outs: Sequence[float] = ()
    rank: str = ""
    """``source`` or ``sink``: on the upper or lower border of the level."""
    x: float = 0.0
    y: float = 0.0


@dataclass(eq=False)
class Wire:
    """A line in one level: from a child or (None) the level's entry, to a child or the level's exit."""

    tail: Box | None
    head: Box | None
    port: Box
    """Lines with the same port are one where they cross a border."""
    values: dict[Value, None] = field(default_factory=dict)
    targets: list[Box] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    """The control points of a cubic spline."""
    arrow: bool = False
    """Whether it ends at a leaf, with an arrow head."""
    start: tuple[DotBox, int | None] = field(init=False)
    """The item and the number of its lower port, if it has ports; ``end`` that of the upper one."""
    end: tuple[DotBox, int | None] = field(init=False)


@dataclass(eq=False)
class LaneLayout:
    """One lane, laid out: all its boxes, outer ones first, and those of them that are in no other."""

    phase: Phase
    rect: Rect
    spots: list[PlacedBox]
    top: list[PlacedBox]
    wires: list[Wire]

    def move(self, to: Callable[[float, float, float], Point]) -> None:
        """Move all that is in it; ``to`` maps the x, y and height of a rectangle (0 for a point) to its new corner."""
        for spot in self.spots:
            rect, body = spot.rect, spot.body
            spot.rect = Rect(*to(rect.x, rect.y, rect.h), rect.w, rect.h)
            spot.body = Rect(*to(body.x, body.y, body.h), body.w, body.h)
        for wire in self.wires:
            wire.points = [to(x, y, 0.0) for x, y in wire.points]


class Crossing(NamedTuple):
    """Values that go from a box in one lane to a box in another."""

    source: PlacedBox
    target: PlacedBox
    edges: list[Edge]


class PictureLayout(NamedTuple):
    """Lanes side by side, the edges between them, and the size of all, in pixels."""

    lanes: list[LaneLayout]
    crossings: list[Crossing]
    width: float
    height: float


def lay_out(picture: Picture, measure: Callable[[Box], BoxSize]) -> PictureLayout:
    """Place all boxes and lines of a picture."""
    lanes = [_LevelPlanner(lane, measure).lane() for lane in picture.lanes]
    for lane in lanes:
        if lane.phase is Phase.BACKWARD:
            lane.move(lambda x, y, h, high=lane.rect.h: (x, high - y - h))  # type: ignore[misc]
    if len(lanes) > 1:
        _align(lanes[0], lanes[1])
    inside = max((spot.rect.bottom for lane in lanes for spot in lane.top), default=0.0)
    left = 0.0
    for lane in lanes:
        width = max(lane.rect.w, 180.0)
        dx = left + LANE_PAD + (width - lane.rect.w) / 2
        lane.move(lambda x, y, h, dx=dx: (x + dx, y + LANE_HEADER))  # type: ignore[misc]
        lane.rect = Rect(left, 0, width + 2 * LANE_PAD, inside + LANE_HEADER + LANE_PAD)
        left += lane.rect.w + LANE_GAP
    top = {inner: spot for lane in lanes for spot in lane.top for inner in spot.box.walk()}
    bundles: dict[tuple[PlacedBox, PlacedBox], list[Edge]] = {}
    for edge in picture.crossing:
        bundles.setdefault((top[edge.source], top[edge.target]), []).append(edge)
    crossings = [Crossing(*ends, edges) for ends, edges in bundles.items()]
    return PictureLayout(lanes, crossings, max(0.0, left - LANE_GAP), max((lane.rect.h for lane in lanes), default=0.0))


def _align(left: LaneLayout, right: LaneLayout) -> None:
    """Insert room between boxes so that the boxes of a module in both lanes are at the same height."""
    pairs = []
    mine, others = _once(left), _once(right)
    for spot in mine:
        mate = max((other for other in others if _related(spot, other)), key=lambda other: other.rect.h, default=None)
        if mate and spot is max((s for s in mine if _related(s, mate)), key=lambda s: s.rect.h):
            pairs.append((spot, mate))
    reached = (-1.0, -1.0)
    for a, b in sorted(pairs, key=lambda pair: pair[0].rect.middle):
        starts = _free_height(left, a.rect.y), _free_height(right, b.rect.y)
        if starts[0] > reached[0] and starts[1] > reached[1]:  # else the two lanes have an order of their own here
            room = b.rect.middle - a.rect.middle
            lane, start, by = (left, starts[0] - 2, room) if room > 0 else (right, starts[1] - 2, -room)
            lane.move(lambda x, y, h, start=start, by=by: (x, y + by * (y >= start)))  # type: ignore[misc]
            reached = a.rect.y, b.rect.y


def _once(lane: LaneLayout) -> list[PlacedBox]:
    """The boxes of modules that are drawn as one box in the lane."""
    parts = Counter(spot.box.members for spot in lane.top)
    return [spot for spot in lane.top if spot.box.members and parts[spot.box.members] == 1]


def _related(a: PlacedBox, b: PlacedBox) -> bool:
    return not set(a.box.members).isdisjoint(b.box.members)


def _free_height(lane: LaneLayout, y: float) -> float:
    """The nearest height above ``y`` without a box."""
    while above := [spot.rect.y for spot in lane.top if spot.rect.y < y < spot.rect.bottom]:
        y = min(above)
    return y


# ---- one lane ---------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Level:
    """The laid-out inside of a module or lane, its upper left corner at (0, 0)."""

    width: float
    height: float
    items: dict[Box, DotBox]
    inner: dict[Box, _Level]
    wires: list[Wire]
    ins: list[float]
    outs: list[float]
    in_ports: list[Box]
    out_ports: list[Box]
    before: float
    """The room between the module's border and its inside, at the side where data comes in."""
    after: float


class _LevelPlanner:
    """Lays out one lane, level by level; titles of a lane that will be flipped go to the other side."""

    def __init__(self, lane: Lane, measure: Callable[[Box], BoxSize]) -> None:
        self.phase, self.boxes, self.measure = lane.phase, lane.boxes, measure
        self.up = lane.phase is Phase.BACKWARD
        self.parent: dict[Box, Box | None] = dict.fromkeys(lane.boxes)
        for outer in lane.walk():
            self.parent.update(dict.fromkeys(outer.children, outer))
        self.wires: dict[Box | None, dict[tuple[Box | None, Box | None, Box], Wire]] = {}
        for edge in lane.edges:
            self._split(edge)

    def lane(self) -> LaneLayout:
        """The lane, modules in modules; its upper left corner is (0, 0)."""
        level = self._level(None, self.boxes)
        lane = LaneLayout(self.phase, Rect(0, 0, level.width, level.height), [], [], [])
        self._collect(level, 0, 0, lane)
        lane.top = [spot for spot in lane.spots if self.parent[spot.box] is None]
        return lane

    def _chain(self, box: Box) -> list[Box | None]:
        """A box and all around it, up to None for the lane."""
        chain: list[Box | None] = [box]
        while (last := chain[-1]) is not None:
            chain.append(self.parent[last])
        return chain

    def _split(self, edge: Edge) -> None:
        """Split an edge into its wires, one in every level that it passes."""
        up, down = self._chain(edge.source), self._chain(edge.target)
        common = next(level for level in up[1:] if level in down[1:])
        out, into = up[: up.index(common)], down[: down.index(common)]
        steps = [(level, inner, None) for inner, level in pairwise(out)] + [(common, out[-1], into[-1])]
        gathers = edge.target.kind is BoxKind.COMM and len(edge.target.main.operands) > 1
        port = edge.target if gathers else edge.source
        for level, tail, head in [*steps, *((level, None, inner) for inner, level in pairwise(into))]:
            wire = self.wires.setdefault(level, {}).setdefault((tail, head, port), Wire(tail, head, port))
            wire.values.update(dict.fromkeys(edge.values))
            wire.targets.append(edge.target)

    def _level(self, owner: Box | None, children: Sequence[Box]) -> _Level:
        inner = {box: self._level(box, box.children) for box in children if box.kind is BoxKind.OPEN}
        items = {box: self._item(box, inner.get(box)) for box in children}
        wires = list(self.wires.get(owner, {}).values())
        entries = {wire.port: DotBox(1, 1, rank="source") for wire in wires if wire.tail is None}
        exits = {wire.port: DotBox(1, 1, rank="sink") for wire in wires if wire.head is None}
        for wire in wires:
            tail = entries[wire.port] if wire.tail is None else items[wire.tail]
            head = exits[wire.port] if wire.head is None else items[wire.head]
            wire.start = tail, inner[wire.tail].out_ports.index(wire.port) if wire.tail in inner else None
            wire.end = head, inner[wire.head].in_ports.index(wire.port) if wire.head in inner else None
        width, height = _place([*items.values(), *entries.values(), *exits.values()], wires)
        before, after = _room(bool(entries), titled=not self.up), _room(bool(exits), titled=self.up)
        stack = STACK if owner is not None and owner.count > 1 else 0.0
        low, high = (stack, 0.0) if self.up else (0.0, stack)
        for wire in wires:
            first, *middle, last = wire.points
            start = _straight(first, -before - low) if wire.tail is None else [first]
            end = _straight(last, height + after + high) if wire.head is None else [last]
            wire.points = [*start, *middle, *end[::-1]]
            wire.arrow = wire.head is not None and wire.head not in inner
        ins, outs = ([item.x + 0.5 for item in ends.values()] for ends in (entries, exits))
        return _Level(width, height, items, inner, wires, ins, outs, [*entries], [*exits], before, after)

    def _item(self, box: Box, level: _Level | None) -> DotBox:
        size = self.measure(box)
        if level is None:
            return DotBox(size.width, size.body + size.tags)
        stack = STACK if box.count > 1 else 0.0
        body = float(math.ceil(max(level.width + 2 * PAD, size.width)))
        shift = (body - level.width) / 2
        ins, outs = ([x + shift for x in ports] for ports in (level.ins, level.outs))
        return DotBox(body + stack, math.ceil(level.height + level.before + level.after) + stack, ins, outs)

    def _collect(self, level: _Level, x: float, y: float, lane: LaneLayout) -> None:
        """Gather the contents of a level, moved to its place in the lane."""
        for box, item in level.items.items():
            rect = Rect(x + item.x, y + item.y, item.width, item.height)
            inside = level.inner.get(box)
            if inside is None:
                lane.spots.append(PlacedBox(box, rect, Rect(rect.x, rect.y, rect.w, self.measure(box).body)))
                continue
            stack = STACK if box.count > 1 else 0.0
            body = Rect(rect.x, rect.y + (stack if self.up else 0), rect.w - stack, rect.h - stack)
            lane.spots.append(PlacedBox(box, rect, body))
            self._collect(inside, rect.x + (body.w - inside.width) / 2, body.y + inside.before, lane)
        for wire in level.wires:
            wire.points = [(px + x, py + y) for px, py in wire.points]
            lane.wires.append(wire)


def _room(ports: bool, *, titled: bool) -> float:
    """The padding between a border and the inside; next to a port there is room already."""
    if ports:
        return 12.0 if titled else 2.0
    return PAD + HEADER if titled else PAD


def _straight(point: Point, y: float) -> list[Point]:
    """The control points of a vertical line from ``y`` to ``point``."""
    px, py = point
    return [(px, y), (px, y + (py - y) / 3), (px, y + 2 * (py - y) / 3), point]


# ---- Graphviz -------------------------------------------------------------------------------------------------


def _place(items: Sequence[DotBox], wires: Sequence[Wire]) -> tuple[float, float]:
    """Set the upper left corner of every item and the points of every wire by Graphviz' dot; gives width and height.

    Small levels get its curved lines; from :data:`LARGE` boxes on it is told to hurry.
    """
    names = {item: f"n{i}" for i, item in enumerate(items)}
    drawn = pygraphviz.AGraph(string=_source(names, wires)).draw(format="json0", prog="dot")
    found = json.loads(drawn)
    for node in (each for each in found.get("objects", ()) if "pos" in each):  # the others are subgraphs
        item = items[int(node["name"][1:])]
        x, y = map(float, node["pos"].split(","))
        item.x, item.y = x - item.width / 2, -y - item.height / 2
    for edge in found.get("edges", ()):
        points = [tuple(map(float, p.split(","))) for p in edge["pos"].split() if p[0] not in "es"]
        wire = wires[int(edge["class"])]
        wire.points = [(x, -y) for x, y in points]
        _snap(wire)
    corners = [p for wire in wires for p in wire.points]
    corners += [p for item in items for p in ((item.x, item.y), (item.x + item.width, item.y + item.height))]
    (left, top), (right, bottom) = (tuple(map(by, zip(*corners, strict=True))) for by in (min, max))
    for item in items:
        item.x, item.y = item.x - left, item.y - top
    for wire in wires:
        wire.points = [(x - left, y - top) for x, y in wire.points]
    return right - left, bottom - top


def _snap(wire: Wire) -> None:
    """Move the ends of a wire to exactly where they were asked to be: dot rounds."""
    for end, near, (item, port) in ((0, 1, wire.start), (-1, -2, wire.end)):
        ports = item.ins if end else item.outs
        x = item.x + (item.width / 2 if port is None else ports[port])
        dx = x - wire.points[end][0]
        wire.points[end] = (x, item.y if end else item.y + item.height)
        wire.points[near] = (wire.points[near][0] + dx, wire.points[near][1])


def _source(items: Mapping[DotBox, str], wires: Sequence[Wire]) -> str:
    speed = HURRY if len(items) > LARGE else "splines=true"
    packed = "" if any(item.rank for item in items) else 'pack=12 packmode="array_ut"'
    lines = [f"digraph {{ graph [nodesep={GAP / 72:.3f} ranksep={RANK_GAP / 72:.3f} {speed} {packed}]"]
    lines.append('node [shape=box fixedsize=true label=""] edge [dir=none]')
    for i, (item, name) in enumerate(items.items()):
        size = f"width={item.width / 72:.4f} height={item.height / 72:.4f}"
        shape = f"shape=plain fixedsize=false label=<{_table(item)}>" if item.ins or item.outs else size
        lines.append(f"{name} [sortv={len(items) - i} {shape}]")
    for rank in ("source", "sink"):
        if members := [name for item, name in items.items() if item.rank == rank]:
            lines.append(f"{{rank={rank} {' '.join(members)}}}")
    for i, wire in enumerate(wires):
        (tail, out), (head, into) = wire.start, wire.end
        start = items[tail] + ("" if out is None else f":o{out}")
        end = items[head] + ("" if into is None else f":i{into}")
        lines.append(f"{start}:s -> {end}:n [class={i}]")
    return "\n".join([*lines, "}"])


_TABLE = '<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="0" CELLPADDING="0">'


def _table(item: DotBox) -> str:
    """A table of the item's size whose first and last row have a cell of one point for every port."""
    total = round(item.width)

    def row(places: Sequence[float], prefix: str) -> str:
        cells, at = [], 0
        for i in sorted(range(len(places)), key=lambda i: places[i]):
            x = min(max(round(places[i]), at + 1), total - 1)
            cells += [_cell(x - at, 1), _cell(1, 1, f'PORT="{prefix}{i}"')]
            at = x + 1
        cells.append(_cell(max(total - at, 1), 1))
        return f"<TR><TD>{_TABLE}<TR>{''.join(cells)}</TR></TABLE></TD></TR>"

    middle = f"<TR>{_cell(total, max(round(item.height) - 2, 1))}</TR>"
    return f"{_TABLE}{row(item.ins, 'i')}{middle}{row(item.outs, 'o')}</TABLE>"


def _cell(width: int, height: int, port: str = "") -> str:
    return f'<TD FIXEDSIZE="TRUE" WIDTH="{width}" HEIGHT="{height}" {port}></TD>'
