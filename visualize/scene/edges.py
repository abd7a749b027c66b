"""The edges between boxes, and what is written in the boxes: parameters, gradients, closed communication."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from shardfx.ir.cost.traffic import traffic
from shardfx.ir.graph import Graph, Input, InputKind, Node, OutputKind, Phase, Value
from shardfx.ir.ops.sends import is_comm
from shardfx.ir.text.printer import size_text

from .boxes import TIMES, Box, BoxLine, Edge, Kind, Lane, Picture
from .flow import Flow
from .fold import ENDS

RESULTS = (OutputKind.RESULT, OutputKind.LOSS, OutputKind.GUARD)


def wire(flow: Flow, lanes: list[Lane]) -> Picture:
    """Boxes for the arguments and results, all edges, and the lines and tags of the boxes."""
    graph = flow.graph
    lane_of = {lane.phase: lane for lane in lanes}
    box_of = {node: leaf for lane in lanes for box in lane.boxes for leaf in box.leaves() for node in leaf.nodes}
    inputs = {given.value: given for given in graph.inputs}
    ends: dict[Value, Box] = {}
    for given in graph.inputs:
        users = flow.users.get(given.value, [])
        if given.kind in ENDS and users:
            box = Box(Kind.INPUT, users[0].phase, title=given.name, tags=[given.value])
            box.note = given.kind.value
            ends[given.value] = box
            lane_of[users[0].phase].boxes.insert(len(ends) - 1, box)
    edges: dict[tuple[Box, Box], list[Value]] = {}
    leaving: dict[Box, dict[Value, None]] = {}
    for node, operands in flow.operands.items():
        target = box_of[node]
        for value in operands:
            source = ends.get(value) if value.node is None else box_of[value.node]
            if source is None:
                _add_line(target, node, inputs[value])
            elif source is not target:
                edges.setdefault((source, target), []).append(value)
                if source.phase is target.phase:
                    leaving.setdefault(source, {})[value] = None
    for value in flow.leaving:
        if value.node is not None:
            leaving.setdefault(box_of[value.node], {})[value] = None
    _outputs(flow, lane_of, box_of, edges, leaving)
    for lane in lanes:
        for box in lane.boxes:
            for leaf in box.leaves():
                if leaf.kind is not Kind.INPUT:
                    leaf.tags = [value for node in leaf.nodes for value in node.outs if value in leaving.get(leaf, ())]
                if leaf.kind is Kind.CLOSED:
                    leaf.lines[:0] = comm_lines(leaf.inside, graph)
    made = [Edge(source, target, values) for (source, target), values in edges.items()]
    for lane in lanes:
        lane.edges = [e for e in made if e.source.phase is lane.phase is e.target.phase]
    crossing = [e for e in made if e.source.phase is not e.target.phase]
    return Picture(graph, lanes, crossing, flow.copies)


def _outputs(
    flow: Flow,
    lane_of: dict[Phase, Lane],
    box_of: dict[Node, Box],
    edges: dict[tuple[Box, Box], list[Value]],
    leaving: dict[Box, dict[Value, None]],
) -> None:
    written: set[Value] = set()
    for output in flow.graph.outputs:
        value = flow.drawn(output.value)
        if value.node is None or value in written:
            continue
        box = box_of[value.node]
        if output.kind in RESULTS:
            end = Box(Kind.OUTPUT, value.node.phase, title=output.name, note=output.kind.value)
            lane_of[value.node.phase].boxes.append(end)
            edges.setdefault((box, end), []).append(value)
            leaving.setdefault(box, {})[value] = None
        elif output.value is value:
            name = _short(output.name, box.path if box.kind is Kind.CLOSED else value.node.where.module)
            box.lines.append(BoxLine("out", f"{'grad' if output.kind is OutputKind.GRADIENT else 'new'} {name}", value))
            written.add(value)


def _add_line(box: Box, node: Node, given: Input) -> None:
    if any(line.value is given.value for line in box.lines):
        return
    name = _short(given.name, box.path if box.kind is Kind.CLOSED else node.where.module)
    if given.kind is InputKind.CONSTANT:
        name = f"constant {name}"
    box.lines.append(BoxLine("in", name, given.value))


def _short(name: str, module: str) -> str:
    """The name of a parameter as seen from the module that uses it."""
    if module and name.startswith(module + "."):
        return name[len(module) + 1 :]
    return ".".join(name.split(".")[-2:])


def comm_lines(nodes: Iterable[Node], graph: Graph) -> list[BoxLine]:
    """The communication in a closed module, a line for each kind and axes."""
    calls: Counter[tuple[str, tuple[str, ...]]] = Counter()
    sent: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for node in nodes:
        if is_comm(node):
            one = traffic(node, graph.mesh)
            calls[one.name, one.axes] += one.turns
            sent[one.name, one.axes] += int(one.total)
    return [
        BoxLine("comm", f"{number} {TIMES} {name}  {size_text(sent[name, axes])}", axes=axes)
        for (name, axes), number in calls.items()
    ]
