"""Boxes of a graph's picture, at one level of detail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

import networkx as nx

from shardfx.ir.graph import Graph, Node, Phase, Value
from shardfx.ir.ops.sends import is_comm
from shardfx.ir.ops.traits import base_name, is_heavy, is_own, is_view

from .folding import FoldedGraph, ModuleTree

QUIET = 48
"""The most ops of a module that is closed because no op in it is heavy."""
SNIPPET = 5
"""The fewest light ops of a module's own code that are joined in one box."""


class BoxKind(Enum):
    """The kind of thing that a box represents."""

    OP = "op"
    VIEW = "view"
    COMM = "comm"
    MEMORY = "memory"
    CLOSED = "closed"
    """A module, or a slice of the program, whose ops are not drawn one by one."""
    INPUT = "input"
    OUTPUT = "output"
    OPEN = "open"
    """A module that is drawn with its contents."""


@dataclass(eq=False)
class BoxLine:
    """A line of text in a box: an operand such as a parameter, a gradient, communication in a closed module."""

    role: str
    """``in``, ``out`` or ``comm``."""
    text: str
    value: Value | None = None
    axes: tuple[str, ...] = ()


@dataclass(eq=False)
class Box:
    """An op, a module or an input, as it is drawn."""

    kind: BoxKind
    phase: Phase
    nodes: list[Node] = field(default_factory=list)
    """The nodes that are drawn as this box, in program order."""
    path: str = ""
    """The module that the box stands for, or lies in."""
    members: tuple[str, ...] = ()
    """The paths of all modules that it stands for: more than one if it is folded."""
    title: str = ""
    label: str = ""
    """Written before the title: the module, where a module of one op is drawn as that op."""
    note: str = ""
    children: list[Box] = field(default_factory=list)
    count: int = 1
    """The number of equal blocks that the box stands for."""
    loop_axes: tuple[str, ...] = ()
    """The loop axes over which all that is in it is iterated, except those of a box around it."""
    chained: bool = False
    """The result of one of these blocks is the input of the next."""
    inside: list[Node] = field(default_factory=list)
    """All nodes that a closed module stands for, with the copies of folded blocks in it."""
    lines: list[BoxLine] = field(default_factory=list)
    tags: list[Value] = field(default_factory=list)
    """The values that leave the box."""

    @property
    def main(self) -> Node:
        """The op that a box is named after: others in it are views."""
        return next((node for node in reversed(self.nodes) if not is_view(node)), self.nodes[-1])

    def leaves(self) -> Iterator[Box]:
        """The boxes in it, possibly itself, that are not an open module."""
        return (box for box in self.walk() if box.kind is not BoxKind.OPEN)

    def walk(self) -> Iterator[Box]:
        """Itself and all boxes in it, outer ones first."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(eq=False)
class Edge:
    """An edge between two leaf boxes, for values that flow along it."""

    source: Box
    target: Box
    values: list[Value]


@dataclass(eq=False)
class Lane:
    """The boxes and edges of one phase."""

    phase: Phase
    boxes: list[Box]
    edges: list[Edge] = field(default_factory=list)

    def walk(self) -> Iterator[Box]:
        """All its boxes, outer ones first."""
        return (inner for box in self.boxes for inner in box.walk())


@dataclass(eq=False)
class Picture:
    """The picture of a graph: lanes of boxes and edges."""

    graph: Graph
    lanes: list[Lane]
    crossing: list[Edge]
    """Edges between lanes: values that are kept for backward, the seed of the gradients."""
    copies: Counter[Node]
    """The number of nodes of the graph that a drawn node stands for."""

    @property
    def size(self) -> int:
        """The number of boxes."""
        return sum(1 for _ in self.boxes())

    def boxes(self) -> Iterator[Box]:
        """All boxes of all lanes, outer ones first."""
        return (box for lane in self.lanes for box in lane.walk())


@dataclass(frozen=True)
class Detail:
    """A level of detail: are views boxes of their own, at which depth are modules closed, is communication outside?"""

    views: bool = False
    quiet: bool = True
    """Modules without a matrix product, convolution or attention are closed."""
    depth: int | None = None
    comm: bool = True
    slices: int | None = None


class BoxBuilder:
    """Builds the boxes of one level of detail."""

    def __init__(self, graph: FoldedGraph, level: Detail, host: dict[Node, Node]) -> None:
        self.graph, self.level, self.host = graph, level, host
        self.guests: dict[Node, list[Node]] = {}
        for guest, node in host.items():
            self.guests.setdefault(node, []).append(guest)
        self.order = {node: i for i, node in enumerate(graph.operands)}

    def lanes(self) -> list[Lane]:
        """The boxes of every phase, without edges."""
        lanes = []
        for phase, root in self.graph.roots.items():
            boxes = self._contents(root, 0, phase)
            if self.level.slices is not None and len(boxes) > self.level.slices:
                boxes = self._slices(boxes, phase, self.level.slices)
            lanes.append(Lane(phase, boxes))
        return lanes

    def _contents(self, module: ModuleTree, depth: int, phase: Phase) -> list[Box]:
        """The boxes for the contents of a module."""
        boxes: list[Box] = []
        snippet = self._snippets(module) if self.level.quiet else {}
        for child in module.children:
            if isinstance(child, ModuleTree):
                boxes.extend(self._module(child, depth + 1, phase))
            elif child in snippet:
                if child is snippet[child][0]:
                    boxes.append(self._snippet(snippet[child], module))
            elif child not in self.host:
                boxes.append(self._leaf(child))
        return boxes

    def _snippets(self, module: ModuleTree) -> dict[Node, list[Node]]:
        """Own ops of a module that are connected, many, and none of them heavy: what a few lines of code compute."""
        own = [node for node in module.children if isinstance(node, Node) and node not in self.host]
        light = {node for node in own if not is_heavy(node) and not is_own(node)}
        graph = nx.Graph()
        for node in light:
            sources = {self.host.get(v.node, v.node) for v in self.graph.operands[node] if v.node is not None}
            graph.add_edges_from((node, source) for source in sources & light)
        parts = [sorted(part, key=self.order.__getitem__) for part in nx.connected_components(graph)]
        return {node: part for part in parts if len(part) >= SNIPPET for node in part}

    def _snippet(self, nodes: list[Node], module: ModuleTree) -> Box:
        """A closed box for some of a module's ops, titled by the line of code that most of them come from."""
        every = self._with_guests(nodes)
        code = Counter(node.where.code.strip() for node in nodes if node.where.code).most_common(1)
        title = code[0][0] if code and code[0][0] else base_name(nodes[-1])
        return Box(BoxKind.CLOSED, nodes[0].phase, every, module.path, title=title, inside=every)

    def _with_guests(self, nodes: list[Node]) -> list[Node]:
        return sorted([*nodes, *(g for node in nodes for g in self.guests.get(node, ()))], key=self.order.__getitem__)

    def _module(self, module: ModuleTree, depth: int, phase: Phase) -> list[Box]:
        """The boxes for a module: itself, or its contents where they say as much."""
        light = depth > 0 and module.count == 1 and len(module.nodes) <= QUIET and not any(map(is_heavy, module.nodes))
        if (self.level.depth is not None and depth >= self.level.depth) or (self.level.quiet and light):
            return self._closed(module, phase)
        inside = self._contents(module, depth, phase)
        if inside and module.count == 1:
            ops = [box for box in inside if box.kind is not BoxKind.COMM]
            if len(inside) == 1 and inside[0].kind is BoxKind.OPEN:
                return inside
            plain = all(box.kind not in (BoxKind.OPEN, BoxKind.CLOSED) for box in inside)
            if plain and len(ops) <= 1 and self._passed_through(inside):
                for box in ops:
                    box.label = box.label or module.path
                return inside
        return [self._open(module, inside, phase)] if inside else []

    def _passed_through(self, boxes: list[Box]) -> bool:
        """Whether these can stand without a box around them: ops and communication in the middle of the flow.

        Communication at an end of it (the sum of a gradient, the gathering of a parameter) would get lost outside.
        """
        for node in (box.nodes[-1] for box in boxes if box.kind is BoxKind.COMM):
            users = [user for value in node.outs for user in self.graph.users.get(value, ())]
            into = any(value.node is not None and value.node.phase is node.phase for value in node.operands)
            if not into or not any(user.phase is node.phase for user in users):
                return False
        return True

    def _open(self, module: ModuleTree, inside: list[Box], phase: Phase) -> Box:
        names = {"path": module.path, "members": module.members, "label": module.label}
        chained = module in self.graph.chained
        return Box(BoxKind.OPEN, phase, children=inside, count=module.count, chained=chained, **names)  # type: ignore[arg-type]

    def _closed(self, module: ModuleTree, phase: Phase) -> list[Box]:
        """A module as one box, and its communication beside it."""
        comm = self._own_comm(module) if self.level.comm else []
        outside = set(comm)
        nodes = [node for node in module.drawn() if node not in outside and node not in self.host]
        boxes = [self._leaf(node) for node in comm]
        if len(nodes) == 1 and module.count == 1:
            boxes.insert(0, self._leaf(nodes[0]))
            boxes[0].label = module.path
        elif nodes:
            hidden = [node for node in module.nodes if node not in outside]
            names = module.path, module.members
            closed = Box(BoxKind.CLOSED, phase, self._with_guests(nodes), *names, label=module.label, inside=hidden)
            boxes.insert(0, closed)
        if len(boxes) > 1 and (module.count > 1 or not self._passed_through(boxes)):
            return [self._open(module, boxes, phase)]
        if boxes:
            boxes[0].count = module.count
            boxes[0].chained = module in self.graph.chained
        return boxes

    def _own_comm(self, module: ModuleTree) -> list[Node]:
        """The communication in a module that is not in a folded block in it."""
        found = []
        for child in module.children:
            if isinstance(child, Node):
                found += [child] if is_comm(child) else []
            elif child.count == 1:
                found += self._own_comm(child)
        return found

    def _leaf(self, node: Node) -> Box:
        """One op, with the views that are drawn as part of it."""
        kind = BoxKind.VIEW if is_view(node) else BoxKind.OP
        if is_own(node):
            kind = BoxKind.COMM if is_comm(node) else BoxKind.MEMORY
        path = self.graph.home[node]
        return Box(kind, node.phase, self._with_guests([node]), path, (path,) if path else ())

    def _slices(self, boxes: list[Box], phase: Phase, count: int) -> list[Box]:
        """Boxes of one level joined to ``count`` boxes, in program order, so that there is no cycle."""
        leaves = sorted((leaf for box in boxes for leaf in box.leaves()), key=lambda b: self.order[b.nodes[0]])
        per = -(-len(leaves) // count)
        result = []
        for at in range(0, len(leaves), per):
            part = leaves[at : at + per]
            nodes = [node for box in part for node in box.nodes]
            inside = [node for box in part for node in (box.inside or box.nodes)]
            lines = sorted(node.where.line for node in inside if node.where.line)
            title = f"lines {lines[0]} … {lines[-1]}" if lines else f"part {at // per + 1} of {count}"
            result.append(Box(BoxKind.CLOSED, phase, nodes, title=title, inside=inside))
        return result
