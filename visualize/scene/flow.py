"""Who feeds whom among the nodes that are drawn, once equal blocks are folded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardfx.ir.cost.traffic import Turns
from shardfx.ir.graph import Graph, Node, Phase, Value
from shardfx.ir.ops.traits import is_own, is_view

from .fold import ENDS, Folded, Module, fold
from .module_of import homes


@dataclass(eq=False)
class Flow:
    """The folded lanes of a graph, and the data that flows between the nodes that are drawn."""

    graph: Graph
    lanes: list[Folded]
    home: dict[Node, str]
    operands: dict[Node, list[Value]] = field(default_factory=dict)
    """What goes into a drawn node, each value once. What a copy of its block gets is an operand too."""
    users: dict[Value, list[Node]] = field(default_factory=dict)
    leaving: set[Value] = field(default_factory=set)
    """Values that one copy of a block hands to the next."""
    shown: dict[Node, Node] = field(default_factory=dict)
    """For every node of the graph the one that is drawn in its stead (mostly itself)."""
    copies: Counter[Node] = field(default_factory=Counter)
    """For how many nodes of the graph a drawn node stands."""
    turns: Mapping[Node, tuple[str, ...]] = field(default_factory=dict)
    """Of what is done once for each turn: the axes of its turns."""
    loops: set[Module] = field(default_factory=set)
    """Folded blocks whose result feeds their next copy."""

    def drawn(self, value: Value) -> Value:
        """The value that is drawn for ``value``: one of the first copy of its block."""
        if value.node is None:
            return value
        node = self.shown[value.node]
        return value if node is value.node else node.results[value.index] or value

    def lane(self, node: Node) -> Folded:
        """The lane in which a node is drawn: that of its phase."""
        return next(lane for lane in self.lanes if lane.phase is node.phase)

    def folds(self, node: Node) -> tuple[Module, ...]:
        """The folded blocks around a node, outermost first."""
        return tuple(module for module, _ in self.lane(node).turns.get(node, ()))


def flow(graph: Graph) -> Flow:
    """Fold every lane of ``graph`` and find what flows."""
    home = homes(graph)
    lanes = [fold(graph, phase, home) for phase in Phase]
    made = Flow(graph, [lane for lane in lanes if lane.root.nodes], home, turns=Turns.of(graph).axes)
    ends = {given.value for given in graph.inputs if given.kind in ENDS}
    seen: set[tuple[Value, Node]] = set()
    for node in graph.nodes:
        lane = made.lane(node)
        target = made.shown[node] = lane.drawn(node)
        made.copies[target] += 1
        into = made.operands.setdefault(target, [])
        for value in node.operands:
            if value.node is None and target is not node and value not in ends:
                continue  # a copy has its own parameters
            shown = made.drawn(value)
            if value.node is not None and value.node.phase is node.phase and lane.carried(value.node, node):
                made.leaving.add(shown)
                made.loops.update(set(made.folds(value.node)) & set(made.folds(node)))
            elif (shown, target) not in seen:
                seen.add((shown, target))
                into.append(shown)
                made.users.setdefault(shown, []).append(target)
    return made


def hosts(flow: Flow) -> dict[Node, Node]:
    """For every view that can be drawn as part of another op, that op: its one user, or else what it looks at."""
    found: dict[Node, Node] = {}
    nodes = list(flow.operands)
    for node in reversed(nodes):
        if is_view(node) and not any(value in flow.leaving for value in node.outs):
            users = {user for value in node.outs for user in flow.users.get(value, ()) if user.phase is node.phase}
            into = {found.get(user, user) for user in users}
            if len(into) == 1 and _may_host(flow, node, *into):
                found[node] = into.pop()
    for node in nodes:
        source = flow.operands[node][0].node if is_view(node) and node not in found and flow.operands[node] else None
        if source is not None and source.phase is node.phase:
            host = found.get(source, source)
            if _may_host(flow, node, host):
                found[node] = host
    return found


def _may_host(flow: Flow, node: Node, host: Node) -> bool:
    return not is_own(host) and not is_view(host) and flow.folds(node) == flow.folds(host)
