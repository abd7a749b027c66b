"""The boxes of one level of detail, from the tree of modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import networkx as nx

from shardfx.ir.graph import Node, Phase
from shardfx.ir.ops.sends import is_comm
from shardfx.ir.ops.traits import base_name, is_heavy, is_own, is_view

from .boxes import Box, Kind, Lane
from .flow import Flow
from .fold import Module

QUIET = 48
"""The most ops of a module that is closed because no op in it is heavy."""
SNIPPET = 5
"""From so many ops on, what a few lines of a module's own code make is one box."""


@dataclass(frozen=True)
class Detail:
    """Are views boxes of their own, from which depth on are modules closed, does communication stay outside of them."""

    views: bool = False
    quiet: bool = True
    """Modules without a matrix product, convolution or attention are closed."""
    depth: int | None = None
    comm: bool = True
    slices: int | None = None


class SceneBuilder:
    """Makes the boxes of one level of detail."""

    def __init__(self, flow: Flow, level: Detail, host: dict[Node, Node]) -> None:
        self.flow = flow
        self.level = level
        self.host = host
        self.guests: dict[Node, list[Node]] = {}
        for guest, node in host.items():
            self.guests.setdefault(node, []).append(guest)
        self.order = {node: i for i, node in enumerate(flow.operands)}

    def at_least(self) -> int:
        """A lower bound of the number of boxes, found quickly."""

        def count(module: Module, depth: int) -> int:
            if self._closes(depth) or self._quiet(module, depth):
                return 1 + (len(self._own_comm(module)) if self.level.comm else 0)
            parts = (count(c, depth + 1) if isinstance(c, Module) else c not in self.host for c in module.children)
            return sum(parts)

        return sum(count(lane.root, 0) for lane in self.flow.lanes)

    def _closes(self, depth: int) -> bool:
        return self.level.depth is not None and depth >= self.level.depth

    def _quiet(self, module: Module, depth: int) -> bool:
        """Whether a module is closed because nothing in it is heavy."""
        few = self.level.quiet and depth > 0 and module.count == 1 and len(module.nodes) <= QUIET
        return few and not any(is_heavy(node) for node in module.nodes)

    def lanes(self) -> list[Lane]:
        """The boxes of every lane, no edges yet."""
        lanes = []
        for folded in self.flow.lanes:
            boxes = self.contents(folded.root, 0, folded.phase)
            if self.level.slices is not None and len(boxes) > self.level.slices:
                boxes = self.slices(boxes, folded.phase)
            lanes.append(Lane(folded.phase, boxes))
        return lanes

    def contents(self, module: Module, depth: int, phase: Phase) -> list[Box]:
        """The boxes for what is inside a module."""
        boxes: list[Box] = []
        snippet = self.snippets(module) if self.level.quiet else {}
        for child in module.children:
            if isinstance(child, Node):
                if child in snippet:
                    if child is snippet[child][0]:
                        boxes.append(self.snippet(snippet[child], module))
                elif child not in self.host:
                    boxes.append(self.leaf(child))
            else:
                boxes.extend(self.module(child, depth + 1, phase))
        return boxes

    def snippets(self, module: Module) -> dict[Node, list[Node]]:
        """Own ops of a module that hang together, are many, and none of them heavy: what a few lines of code make."""
        own = [node for node in module.children if isinstance(node, Node) and node not in self.host]
        light = {node for node in own if not is_heavy(node) and not is_own(node)}
        graph = nx.Graph()
        for node in light:
            sources = {self.host.get(v.node, v.node) for v in self.flow.operands[node] if v.node is not None}
            graph.add_edges_from((node, source) for source in sources & light)
        parts = [sorted(part, key=self.order.__getitem__) for part in nx.connected_components(graph)]
        return {node: part for part in parts if len(part) >= SNIPPET for node in part}

    def snippet(self, nodes: list[Node], module: Module) -> Box:
        """A closed box for a stretch of a module's ops, titled by the line of code that most of them come from."""
        every = self._with_guests(nodes)
        code = Counter(node.where.code.strip() for node in nodes if node.where.code).most_common(1)
        box = Box(Kind.CLOSED, nodes[0].phase, every, module.path, title=code[0][0] if code else "", inside=every)
        box.title = box.title or base_name(nodes[-1])
        return box

    def _with_guests(self, nodes: list[Node]) -> list[Node]:
        return sorted([*nodes, *(g for node in nodes for g in self.guests.get(node, ()))], key=self.order.__getitem__)

    def module(self, module: Module, depth: int, phase: Phase) -> list[Box]:
        """The boxes for a module: itself, or what is inside where that says as much."""
        if self._closes(depth) or self._quiet(module, depth):
            return self.closed(module, phase)
        inside = self.contents(module, depth, phase)
        if not inside:
            return []
        if module.count == 1:
            ops = [box for box in inside if box.kind is not Kind.COMM]
            if len(inside) == 1 and inside[0].kind is Kind.OPEN:
                return inside
            plain = all(box.kind not in (Kind.OPEN, Kind.CLOSED) for box in inside)
            if plain and len(ops) <= 1 and self._passed_through(inside):
                for box in ops:
                    box.label = box.label or module.path
                return inside
        return [self._open(module, inside, phase)]

    def _passed_through(self, boxes: list[Box]) -> bool:
        """Whether these can stand without a box around them: ops and communication in the middle of the flow.

        Communication at an end of it (the sum of a gradient, the gathering of a parameter) would get lost outside.
        """
        for box in boxes:
            if box.kind is Kind.COMM:
                node = box.nodes[-1]
                users = [user for value in node.outs for user in self.flow.users.get(value, ())]
                into = any(value.node is not None and value.node.phase is node.phase for value in node.operands)
                if not into or not any(user.phase is node.phase for user in users):
                    return False
        return True

    def _open(self, module: Module, inside: list[Box], phase: Phase) -> Box:
        box = Box(Kind.OPEN, phase, path=module.path, label=module.label, children=inside, count=module.count)
        box.members = module.members
        box.loops = module in self.flow.loops
        return box

    def closed(self, module: Module, phase: Phase) -> list[Box]:
        """A module as one box, and its communication beside it."""
        comm = self._own_comm(module) if self.level.comm else []
        outside = set(comm)
        nodes = [node for node in _drawn(module) if node not in outside and node not in self.host]
        boxes = [self.leaf(node) for node in comm]
        if nodes:
            every = self._with_guests(nodes)
            hidden = [node for node in module.nodes if node not in outside]
            if len(nodes) == 1 and module.count == 1:
                boxes.insert(0, self.leaf(nodes[0]))
                boxes[0].label = module.path
            else:
                boxes.insert(
                    0, Box(Kind.CLOSED, phase, every, module.path, module.members, label=module.label, inside=hidden)
                )
        if len(boxes) > 1 and (module.count > 1 or not self._passed_through(boxes)):
            return [self._open(module, boxes, phase)]
        if boxes:
            boxes[0].count = module.count
            boxes[0].loops = module in self.flow.loops
        return boxes

    def _own_comm(self, module: Module) -> list[Node]:
        """The communication in a module that is not in a folded block in it."""
        found = []
        for child in module.children:
            if isinstance(child, Node):
                if is_comm(child):
                    found.append(child)
            elif child.count == 1:
                found.extend(self._own_comm(child))
        return found

    def leaf(self, node: Node) -> Box:
        """One op, with the views that are drawn as part of it."""
        nodes = self._with_guests([node])
        kind = Kind.OP
        if is_own(node):
            kind = Kind.COMM if is_comm(node) else Kind.MEMORY
        elif is_view(node):
            kind = Kind.VIEW
        path = self.flow.home[node]
        return Box(kind, node.phase, nodes, path, (path,) if path else ())

    def slices(self, boxes: list[Box], phase: Phase) -> list[Box]:
        """Boxes of one level joined to ``level.slices`` boxes, in program order, so that no cycle comes about."""
        count = self.level.slices or 1
        leaves = sorted((leaf for box in boxes for leaf in box.leaves()), key=lambda b: self.order[b.nodes[0]])
        per = -(-len(leaves) // count)
        result = []
        for at in range(0, len(leaves), per):
            part = leaves[at : at + per]
            nodes = [node for box in part for node in box.nodes]
            inside = [node for box in part for node in (box.inside or box.nodes)]
            lines = sorted(node.where.line for node in inside if node.where.line)
            title = f"lines {lines[0]} … {lines[-1]}" if lines else f"part {at // per + 1} of {count}"
            result.append(Box(Kind.CLOSED, phase, nodes, title=title, inside=inside))
        return result


def _drawn(module: Module) -> Iterator[Node]:
    """The nodes of a module that are not in a copy of a folded block."""
    for child in module.children:
        if isinstance(child, Node):
            yield child
        else:
            yield from _drawn(child)
