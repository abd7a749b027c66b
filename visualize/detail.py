"""Level of detail: the finest picture of a graph with at most so many boxes, and its edges.

    every op                       a small graph
    ops, with views hidden         a view or transpose is drawn as part of the op that uses it
    modules closed, deepest first  communication stays outside of its module,
                                   or else is a line of the closed module
    slices of the program          for a graph without modules

Small modules without a matrix product (norms, activations) are closed first, where everything does not fit easily.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

import networkx as nx

from shardfx.ir.cost.traffic import Traffic, traffic
from shardfx.ir.graph import Graph, InputKind, Node, OutputKind, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.sends import is_comm
from shardfx.ir.ops.traits import base_name, is_view
from shardfx.ir.text.printer import size_text

from .boxes import Box, BoxBuilder, BoxKind, BoxLine, Detail, Edge, Lane, Picture
from .folding import ENDS, FoldedGraph, ModuleTree, fold, view_hosts
from .style import TIMES

RESULTS = (OutputKind.RESULT, OutputKind.LOSS, OutputKind.GUARD, OutputKind.OVERFLOW, OutputKind.ROWS)
ALL_OPS = 48
"""The most boxes for which every single op is drawn."""
ALL_MODULES = 90
"""The most boxes for which all modules are drawn open, those without heavy ops (norms, activations) too."""
SLICES = 40
"""The most boxes a lane of a graph without modules is drawn as."""
WRAPPER = 0.6
"""The share of all boxes from which a top-level module is not drawn itself, as it adds no information."""


def show(graph: Graph, limit: int = 300) -> Picture:
    """The finest picture of ``graph`` that has at most ``limit`` boxes."""
    folded = fold(graph)
    host = view_hosts(folded)
    deepest = max(map(_depth, folded.roots.values()), default=0)
    closing = [Detail(depth=depth, comm=comm) for depth in range(deepest, 0, -1) for comm in (True, False)]
    for level in [Detail(views=True, quiet=False), Detail(quiet=False), Detail(), *closing]:
        most = min(limit, ALL_OPS if level.views else limit if level.quiet else ALL_MODULES)
        builder = BoxBuilder(folded, level, {} if level.views else host)
        lanes = builder.lanes()
        if sum(1 for lane in lanes for _ in lane.walk()) <= 2 * most:  # wrappers and ends may still come and go
            picture = _assemble(builder, lanes)
            if picture.size <= most:
                return picture
    ends = sum(inp.kind in ENDS for inp in graph.inputs) + sum(end.kind in RESULTS for end in graph.outputs)
    slices = max(1, min(SLICES, (limit - ends) // max(1, len(folded.roots))))
    builder = BoxBuilder(folded, Detail(quiet=False, depth=1, comm=False, slices=slices), host)
    return _assemble(builder, builder.lanes())


def _depth(module: ModuleTree) -> int:
    return 1 + max((_depth(child) for child in module.children if isinstance(child, ModuleTree)), default=-1)


def _assemble(builder: BoxBuilder, lanes: list[Lane]) -> Picture:
    """The picture of one level of detail."""
    _unwrap(lanes)
    for lane in lanes:
        if builder.level.slices is None:
            lane.boxes = _untangle(lane.boxes, builder.graph, builder.order)
        for box in lane.boxes:
            _name(box, "")
            _mark_loops(box, builder.graph.loop_axes, ())
    return _connect(builder.graph, lanes)


def _mark_loops(box: Box, axes: Mapping[Node, tuple[str, ...]], around: tuple[str, ...]) -> None:
    """Mark the outermost boxes that are entirely in loops with the axes of these."""
    inside = [node for leaf in box.leaves() for node in leaf.nodes]
    shared = [axis for axis in axes.get(inside[0], ()) if all(axis in axes.get(node, ()) for node in inside)]
    box.loop_axes = tuple(axis for axis in shared if axis not in around)
    for child in box.children:
        _mark_loops(child, axes, (*around, *box.loop_axes))


def _unwrap(lanes: list[Lane]) -> None:
    """Remove the boxes around nearly everything: the model itself, the wrapper around it."""
    while True:
        total = sum(1 for lane in lanes for _ in lane.walk())
        inside: Counter[str] = Counter()
        for box in (box for lane in lanes for box in lane.boxes if _is_wrapper(box)):
            inside[box.path] += sum(1 for _ in box.walk())
        wrappers = {path for path, number in inside.items() if number > WRAPPER * total}
        if not wrappers:
            return
        for lane in lanes:
            outer = [(box, box.kind is BoxKind.OPEN and box.path in wrappers) for box in lane.boxes]
            lane.boxes = [inner for box, wraps in outer for inner in (box.children if wraps else [box])]


def _is_wrapper(box: Box) -> bool:
    """Whether a box may be nothing but a name around other modules."""
    block = box.kind is not BoxKind.OPEN or box.count > 1 or box.path.rpartition(".")[2].isdigit()
    return not block and any(child.path != box.path for child in box.children)


def _name(box: Box, around: str) -> None:
    """Set a box's title: the module relative to the one around it, the op without its namespace."""

    def seen(path: str) -> str:
        return "" if path == around else path[len(around) + 1 :] if around and path.startswith(around + ".") else path

    if box.kind in (BoxKind.OPEN, BoxKind.CLOSED):
        ops = len(box.inside)
        box.title, box.label = box.title or seen(box.label or box.path) or f"{ops} op{'s' * (ops > 1)}", ""
    else:
        box.title, box.label = base_name(box.main), seen(box.label)
    for child in box.children:
        _name(child, box.path)


# ---- a module on a cycle is split ---------------------------------------------------------------------------


def _untangle(boxes: list[Box], graph: FoldedGraph, order: dict[Node, int]) -> list[Box]:
    """Split boxes on a cycle, at every depth, into as few as data flow asks for, so that all edges point one way.

    A module that is used three times, or whose communication is drawn beside it, would be before and after
    something at once.
    """
    item_of = {node: box for box in boxes for leaf in box.leaves() for node in leaf.nodes}
    links = nx.DiGraph()
    links.add_nodes_from(boxes)
    for node, box in item_of.items():
        sources = (item_of[source] for source in _sources(graph, node, item_of))
        links.add_edges_from((source, box) for source in sources if source is not box)
    parts: dict[Box, list[Box]] = {}
    for cycle in nx.strongly_connected_components(links):
        if len(cycle) > 1:
            parts.update(_split(cycle, item_of, graph, order))
    result = [part for box in boxes for part in parts.get(box, [box])]
    for box in result:
        if box.kind is BoxKind.OPEN:
            box.children = _untangle(box.children, graph, order)
    return result


def _sources(graph: FoldedGraph, node: Node, among: dict[Node, Box]) -> list[Node]:
    return [value.node for value in graph.operands[node] if value.node is not None and value.node in among]


def _split(
    cycle: set[Box], item_of: dict[Node, Box], graph: FoldedGraph, order: dict[Node, int]
) -> dict[Box, list[Box]]:
    """Split each box of a cycle by the number of times that data has left it and come back."""
    nodes = sorted((node for box in cycle for leaf in box.leaves() for node in leaf.nodes), key=order.__getitem__)
    returns: dict[Node, dict[Box, int]] = {}
    parts: dict[Box, dict[int, set[Node]]] = {box: {} for box in cycle}
    for node in nodes:
        own = item_of[node]
        seen: dict[Box, int] = {}
        depth = 0
        for source in _sources(graph, node, item_of):
            for box, times in returns.get(source, {}).items():
                seen[box] = max(seen.get(box, 0), times)
                if box is own:
                    depth = max(depth, times + (item_of[source] is not own))
        seen[own] = depth
        returns[node] = seen
        parts[own].setdefault(depth, set()).add(node)
    several = {box: sorted(by_depth.items()) for box, by_depth in parts.items() if len(by_depth) > 1}
    return {box: [part for _, own in split for part in _restrict(box, own, graph)] for box, split in several.items()}


def _restrict(box: Box, nodes: set[Node], graph: FoldedGraph) -> list[Box]:
    """The part of a box with ``nodes``; a module of which one op is left is drawn as that op."""
    if box.kind is not BoxKind.OPEN:
        kept = [node for node in box.nodes if node in nodes]
        if len(kept) == len(box.nodes):
            return [box]
        inside = [node for node in box.inside if graph.shown(node) in nodes]
        if len(kept) == 1 and box.count == 1:
            kind = BoxKind.VIEW if is_view(kept[0]) else BoxKind.OP
            return [replace(box, kind=kind, nodes=kept, inside=[], title="", label=box.path)]
        return [replace(box, nodes=kept, inside=inside)]
    with_nodes = (child for child in box.children if any(nodes & {*leaf.nodes} for leaf in child.leaves()))
    children = [part for child in with_nodes for part in _restrict(child, nodes, graph)]
    if len(children) == 1 and box.count == 1:
        children[0].label = children[0].label or box.path
        return children
    return [replace(box, children=children)]


# ---- edges, and what is written in boxes --------------------------------------------------------------------


def _connect(folded: FoldedGraph, lanes: list[Lane]) -> Picture:
    """Boxes for the arguments and results, all edges, and the lines and tags of the boxes."""
    graph, inputs = folded.graph, folded.inputs
    lane_of = {lane.phase: lane for lane in lanes}
    box_of = {node: leaf for lane in lanes for box in lane.boxes for leaf in box.leaves() for node in leaf.nodes}
    ends: dict[Value, Box] = {}
    for inp in graph.inputs:
        users = folded.users.get(inp.value, [])
        if inp.kind in ENDS and users:
            kind, phase = BoxKind.INPUT, users[0].phase
            ends[inp.value] = box = Box(kind, phase, title=inp.name, note=inp.kind.value, tags=[inp.value])
            lane_of[phase].boxes.insert(len(ends) - 1, box)
    edges: dict[tuple[Box, Box], list[Value]] = {}
    leaving: dict[Box, set[Value]] = {}
    for node, operands in folded.operands.items():
        target = box_of[node]
        for value in operands:
            source = ends.get(value) if value.node is None else box_of[value.node]
            if source is None:
                if all(line.value is not value for line in target.lines):
                    constant = "constant " if inputs[value].kind is InputKind.CONSTANT else ""
                    target.lines.append(BoxLine("in", constant + _short(inputs[value].name, target, node), value))
            elif source is not target:
                edges.setdefault((source, target), []).append(value)
                if source.phase is target.phase:
                    leaving.setdefault(source, set()).add(value)
    for value in folded.leaving:
        if value.node is not None:
            leaving.setdefault(box_of[value.node], set()).add(value)
    written: set[Value] = set()
    for output in graph.outputs:
        value = folded.shown_value(output.value)
        if value.node is None or value in written:
            continue
        box = box_of[value.node]
        if output.kind in RESULTS:
            end = Box(BoxKind.OUTPUT, value.node.phase, title=output.name, note=output.kind.value)
            lane_of[value.node.phase].boxes.append(end)
            edges.setdefault((box, end), []).append(value)
            leaving.setdefault(box, set()).add(value)
        elif output.value is value:
            sign = "grad" if output.kind is OutputKind.GRADIENT else "new"
            box.lines.append(BoxLine("out", f"{sign} {_short(output.name, box, value.node)}", value))
            written.add(value)
    for leaf in (leaf for lane in lanes for leaf in lane.walk()):
        if leaf.kind not in (BoxKind.INPUT, BoxKind.OPEN):
            leaf.tags = [value for node in leaf.nodes for value in node.outs if value in leaving.get(leaf, ())]
        if leaf.kind is BoxKind.CLOSED:
            leaf.lines[:0] = _comm_lines(leaf.inside, graph.mesh)
    made = [Edge(source, target, values) for (source, target), values in edges.items()]
    for lane in lanes:
        lane.edges = [e for e in made if e.source.phase is lane.phase is e.target.phase]
    return Picture(graph, lanes, [e for e in made if e.source.phase is not e.target.phase], folded.copies)


def _short(name: str, box: Box, node: Node) -> str:
    """The name of a parameter relative to the module that uses it."""
    module = box.path if box.kind is BoxKind.CLOSED else node.where.module
    if module and name.startswith(module + "."):
        return name[len(module) + 1 :]
    return ".".join(name.split(".")[-2:])


def _comm_lines(nodes: Iterable[Node], mesh: Mesh) -> list[BoxLine]:
    """The communication in a closed module, a line for each kind and axes."""
    sent: dict[tuple[str, tuple[str, ...]], list[Traffic]] = {}
    for one in (traffic(node, mesh) for node in nodes if is_comm(node)):
        sent.setdefault((one.name, one.axes), []).append(one)
    lines = []
    for (name, axes), every in sent.items():
        total = size_text(sum(one.total for one in every))
        lines.append(BoxLine("comm", f"{sum(one.iterations for one in every)} {TIMES} {name}  {total}", axes=axes))
    return lines
