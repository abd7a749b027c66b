"""One lane's layout: each module on its own, then as one box in its parent's layout.

A line that crosses the border of a module does so at a *port*: inside, a point on the upper or lower border; outside,
a place on the side of the module's box. All lines that come from one box share a port (or all that go to one, where
communication gathers up many values). So boxes never overlap, and a level's time does not depend on the size of the
rest. All is in flow direction, downwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import networkx as nx

from shardfx.ir.graph import Phase, Value
from shardfx.visualize.scene.boxes import Box, Edge, Kind, Lane

from .dot import DotBox, DotEdge, Point, place
from .geometry import LanePlan, Rect, Size, Spot, Wire

HEADER = 26.0
PAD = 14.0
STACK = 8.0
"""How far the cards behind a folded block look out."""
PART_GAP = 24.0


@dataclass(eq=False)
class _Line:
    """A line in one level: from a child or (None) the level's entry, to a child or the level's exit."""

    tail: Box | None
    head: Box | None
    port: Box
    """Lines with the same port are one where they cross a border."""
    values: dict[Value, None] = field(default_factory=dict)
    targets: list[Box] = field(default_factory=list)


@dataclass(eq=False)
class _Level:
    """The inside of a module or lane, laid out, its upper left corner at (0, 0)."""

    width: float
    height: float
    items: dict[Box, DotBox]
    inner: dict[Box, _Level]
    wires: list[Wire]
    ins: dict[Box, float]
    outs: dict[Box, float]
    before: float
    """The room between the module's border and its inside, at the side where data comes in."""
    after: float


class LaneLayout:
    """Lays out one lane, flowing down; ``up`` says that it will be turned over, so that titles go to the other side."""

    def __init__(self, lane: Lane, measure: Callable[[Box], Size]) -> None:
        self.lane = lane
        self.up = lane.phase is Phase.BACKWARD
        self.measure = measure
        self.parent: dict[Box, Box | None] = {}
        for box in lane.boxes:
            self.parent[box] = None
            for outer in box.walk():
                self.parent.update(dict.fromkeys(outer.children, outer))
        self.lines: dict[Box | None, dict[tuple[Box | None, Box | None, Box], _Line]] = {}
        for edge in lane.edges:
            self._lift(edge)

    def plan(self) -> LanePlan:
        """Lay the lane out, modules in modules; its upper left corner is (0, 0)."""
        level = self._level(None, self.lane.boxes)
        lane = LanePlan(self.lane.phase, Rect(0, 0, level.width, level.height), [], [], [])
        self._collect(level, 0, 0, lane)
        lane.top = [spot for spot in lane.spots if self.parent[spot.box] is None]
        return lane

    def _chain(self, box: Box) -> list[Box | None]:
        """A box and all around it, up to None for the lane."""
        chain: list[Box | None] = [box]
        while (last := chain[-1]) is not None:
            chain.append(self.parent[last])
        return chain

    def _lift(self, edge: Edge) -> None:
        """Split an edge into its lines, one in every level that it passes."""
        up, down = self._chain(edge.source), self._chain(edge.target)
        common = next(level for level in up[1:] if level in down[1:])
        out, into = up[: up.index(common)], down[: down.index(common)]
        for inner, level in pairwise(out):
            self._line(level, inner, None, edge)
        self._line(common, out[-1], into[-1], edge)
        for inner, level in pairwise(into):
            self._line(level, None, inner, edge)

    def _line(self, level: Box | None, tail: Box | None, head: Box | None, edge: Edge) -> None:
        lines = self.lines.setdefault(level, {})
        port = edge.target if _gathers(edge.target) else edge.source
        line = lines.setdefault((tail, head, port), _Line(tail, head, port))
        line.values.update(dict.fromkeys(edge.values))
        line.targets.append(edge.target)

    def _level(self, owner: Box | None, children: Sequence[Box]) -> _Level:
        inner = {box: self._level(box, box.children) for box in children if box.kind is Kind.OPEN}
        items = {box: self._item(box, inner.get(box)) for box in children}
        lines = list(self.lines.get(owner, {}).values())
        entries = {line.port: DotBox(1, 1, rank="source") for line in lines if line.tail is None}
        exits = {line.port: DotBox(1, 1, rank="sink") for line in lines if line.head is None}
        links = []
        for line in lines:
            tail = entries[line.port] if line.tail is None else items[line.tail]
            head = exits[line.port] if line.head is None else items[line.head]
            link = DotEdge(tail, head)
            if line.tail in inner:
                link.tail_port = list(inner[line.tail].outs).index(line.port)
            if line.head in inner:
                link.head_port = list(inner[line.head].ins).index(line.port)
            links.append(link)
        width, height = place_parts([*items.values(), *entries.values(), *exits.values()], links)
        before, after = self._room(bool(entries), titled=not self.up), self._room(bool(exits), titled=self.up)
        stack = STACK if owner is not None and owner.count > 1 else 0.0
        low, high = (stack, 0.0) if self.up else (0.0, stack)
        wires = []
        for line, link in zip(lines, links, strict=True):
            points = link.points
            if line.tail is None:
                points = [*straight(points[0], -before - low), *points[1:]]
            if line.head is None:
                points = [*points[:-1], *straight(points[-1], height + after + high)[::-1]]
            arrow = line.head is not None and line.head not in inner
            wires.append(Wire(points, line.targets, list(line.values), arrow))
        ins = {source: item.x + 0.5 for source, item in entries.items()}
        outs = {source: item.x + 0.5 for source, item in exits.items()}
        return _Level(width, height, items, inner, wires, ins, outs, before, after)

    def _room(self, ports: bool, *, titled: bool) -> float:
        """How far the inside stays from the border; next to a port there is room already."""
        if ports:
            return 12.0 if titled else 2.0
        return PAD + HEADER if titled else PAD

    def _item(self, box: Box, level: _Level | None) -> DotBox:
        size = self.measure(box)
        if level is None:
            return DotBox(size.width, size.body + size.tags)
        stack = STACK if box.count > 1 else 0.0
        body = float(math.ceil(max(level.width + 2 * PAD, size.width)))
        shift = (body - level.width) / 2
        ins, outs = ([x + shift for x in ports.values()] for ports in (level.ins, level.outs))
        return DotBox(body + stack, math.ceil(level.height + level.before + level.after) + stack, ins, outs)

    def _collect(self, level: _Level, x: float, y: float, lane: LanePlan) -> None:
        """Gather what is in a level, moved to its place in the lane."""
        for box, item in level.items.items():
            rect = Rect(x + item.x, y + item.y, item.width, item.height)
            if box not in level.inner:
                lane.spots.append(Spot(box, rect, Rect(rect.x, rect.y, rect.w, self.measure(box).body)))
                continue
            inside = level.inner[box]
            stack = STACK if box.count > 1 else 0.0
            body = Rect(rect.x, rect.y + (stack if self.up else 0), rect.w - stack, rect.h - stack)
            lane.spots.append(Spot(box, rect, body))
            self._collect(inside, rect.x + (body.w - inside.width) / 2, body.y + inside.before, lane)
        for wire in level.wires:
            wire.points = [(px + x, py + y) for px, py in wire.points]
            lane.wires.append(wire)


def _gathers(box: Box) -> bool:
    """Whether a box is communication of several values from many places."""
    return box.kind is Kind.COMM and len(box.main.operands) > 1


def straight(point: Point, y: float) -> list[Point]:
    """The control points of a vertical line from ``y`` to ``point``."""
    px, py = point
    return [(px, y), (px, y + (py - y) / 3), (px, y + 2 * (py - y) / 3), point]


def place_parts(items: Sequence[DotBox], links: Sequence[DotEdge]) -> tuple[float, float]:
    """Place the items of a level; what hangs together with nothing else is put in columns beside the rest."""
    graph = nx.Graph()
    graph.add_nodes_from(items)
    graph.add_edges_from((link.tail, link.head) for link in links)
    parts = [set(part) for part in nx.connected_components(graph)]
    bound: set[DotBox] = set().union(*(part for part in parts if any(item.rank for item in part)))
    groups = [bound] if bound else []
    groups += [part for part in parts if not part & bound]
    sizes = []
    for group in groups:
        own = [link for link in links if link.tail in group]
        members = [item for item in items if item in group]
        place(members, own)
        sizes.append(_to_origin(members, own))
    if len(groups) == 1:
        return sizes[0]
    area = sum(w * h for w, h in sizes)
    limit = max(math.sqrt(area), *(h for _, h in sizes))
    x = y = column = width = height = 0.0
    for group, (w, h) in zip(groups, sizes, strict=True):
        if y and y + h > limit:
            x, y, column = x + column + PART_GAP, 0.0, 0.0
        _shift([i for i in items if i in group], [k for k in links if k.tail in group], x, y)
        width, height, column = max(width, x + w), max(height, y + h), max(column, w)
        y += h + PART_GAP
    return width, height


def _to_origin(items: Sequence[DotBox], links: Sequence[DotEdge]) -> tuple[float, float]:
    """Move all so that the upper left corner is (0, 0), and say how large it is."""
    points = [p for link in links for p in link.points]
    xs = [x for item in items for x in (item.x, item.x + item.width)] + [x for x, _ in points]
    ys = [y for item in items for y in (item.y, item.y + item.height)] + [y for _, y in points]
    left, top = min(xs), min(ys)
    _shift(items, links, -left, -top)
    return max(xs) - left, max(ys) - top


def _shift(items: Sequence[DotBox], links: Sequence[DotEdge], dx: float, dy: float) -> None:
    for item in items:
        item.x, item.y = item.x + dx, item.y + dy
    for link in links:
        link.points = [(x + dx, y + dy) for x, y in link.points]
