"""Modules that a program leaves and comes back to are drawn in pieces, so that all edges can point one way.

A module that is used three times, or whose communication is drawn beside it, would be before and after
something at once. :func:`untangle` cuts such boxes, and only those, into as few pieces as data flow asks for.
"""

from __future__ import annotations

from dataclasses import replace

import networkx as nx

from shardfx.ir.graph import Node
from shardfx.ir.ops.traits import is_view

from .boxes import Box, Kind
from .flow import Flow


def untangle(boxes: list[Box], flow: Flow, order: dict[Node, int]) -> list[Box]:
    """The same boxes, those on a cycle cut into pieces; at every depth."""
    item_of = {node: box for box in boxes for leaf in box.leaves() for node in leaf.nodes}
    graph = nx.DiGraph()
    graph.add_nodes_from(boxes)
    for node, box in item_of.items():
        for source in _sources(flow, node, item_of):
            if item_of[source] is not box:
                graph.add_edge(item_of[source], box)
    pieces: dict[Box, list[Box]] = {}
    for cycle in nx.strongly_connected_components(graph):
        if len(cycle) > 1:
            pieces.update(_cut(cycle, item_of, flow, order))
    result = [piece for box in boxes for piece in pieces.get(box, [box])]
    for box in result:
        if box.kind is Kind.OPEN:
            box.children = untangle(box.children, flow, order)
    return result


def _sources(flow: Flow, node: Node, among: dict[Node, Box]) -> list[Node]:
    return [value.node for value in flow.operands[node] if value.node is not None and value.node in among]


def _cut(cycle: set[Box], item_of: dict[Node, Box], flow: Flow, order: dict[Node, int]) -> dict[Box, list[Box]]:
    """Cut each box of a cycle by how often the data has left it and come back."""
    nodes = sorted((node for box in cycle for leaf in box.leaves() for node in leaf.nodes), key=order.__getitem__)
    returns: dict[Node, dict[Box, int]] = {}
    parts: dict[Box, dict[int, set[Node]]] = {box: {} for box in cycle}
    for node in nodes:
        own = item_of[node]
        seen: dict[Box, int] = {}
        depth = 0
        for source in _sources(flow, node, item_of):
            for box, times in returns.get(source, {}).items():
                seen[box] = max(seen.get(box, 0), times)
                if box is own:
                    depth = max(depth, times + (item_of[source] is not own))
        seen[own] = depth
        returns[node] = seen
        parts[own].setdefault(depth, set()).add(node)
    return {
        box: [piece for depth in sorted(by_depth) for piece in _restrict(box, by_depth[depth], flow)]
        for box, by_depth in parts.items()
        if len(by_depth) > 1
    }


def _restrict(box: Box, nodes: set[Node], flow: Flow) -> list[Box]:
    """The part of a box that holds ``nodes``; a module of which one op is left is drawn as that op."""
    if box.kind is not Kind.OPEN:
        kept = [node for node in box.nodes if node in nodes]
        if len(kept) == len(box.nodes):
            return [box]
        inside = [node for node in box.inside if flow.shown[node] in nodes]
        if len(kept) == 1 and box.count == 1:
            kind = Kind.VIEW if is_view(kept[0]) else Kind.OP
            return [replace(box, kind=kind, nodes=kept, inside=[], title="", label=box.path)]
        return [replace(box, nodes=kept, inside=inside)]
    children = [
        piece
        for child in box.children
        if any(node in nodes for leaf in child.leaves() for node in leaf.nodes)
        for piece in _restrict(child, nodes, flow)
    ]
    if len(children) == 1 and box.count == 1:
        children[0].label = children[0].label or box.path
        return children
    return [replace(box, children=children)]
