"""Where a partial sum is reduced: at once, or behind linear ops where that moves fewer bytes.

``dq @ wq' + dk @ wk' + dv @ wv'`` are three partial sums over tp: adding them before reducing sends a third.
A value that is made partial may stay so (its consumers compute on the partial sums) or be reduced where it is
made. Staying costs nothing at the value itself, but something at every value further on where it ends. The
cheapest choice is a minimum cut between "stays partial" and "is reduced", solved exactly, per mesh axis.

    %3 = mm(%1, %2) : [64, 512] +{tp}     %3 = mm(%1, %2) : [64, 512] +{tp}
    %4 = mm(%5, %6) : [64, 512] +{tp}     %4 = mm(%5, %6) : [64, 512] +{tp}
    %7 = add(AR(%3), AR(%4))         ->   %7 = add(%3, %4) : [64, 512] +{tp},  AR(%7) for what follows
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import networkx as nx

from shardfx.ir.cut import Cut, without
from shardfx.ir.graph import Graph, Node, Value
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.spec import Spec

from .fixpoint import Propagation

Partial = dict[str, tuple[str, frozenset[int]]]


@dataclass
class Partials:
    """Chooses where to reduce; ``cuts`` and ``partial`` are the nodes' strategies so far, changed in place."""

    graph: Graph
    state: Propagation
    cuts: dict[Node, dict[str, Cut]]
    partial: dict[Node, Partial] = field(default_factory=dict)
    users: dict[Value, list[Node]] = field(default_factory=dict)
    outputs: set[Value] = field(default_factory=set)

    def run(self) -> None:
        self.users = self.graph.users()
        self.outputs = {output.value for output in self.graph.outputs}
        for axis in self.graph.mesh.space:
            if axis.size > 1:
                self._axis(axis.name)

    def _axis(self, axis: str) -> None:
        """Find the values that may be partial over ``axis``, and cut the graph that they form."""
        reach: dict[Value, str] = {}
        passing: dict[Node, frozenset[int]] = {}
        for node in self.graph.nodes:
            rule = self.state.rules[node]
            group = self._group(node, rule, axis, reach)
            if group is not None:
                passing[node] = group
                kind = reach[node.operands[min(group)]]
                for value in node.outs:
                    reach[value] = kind
                continue
            if any(axis in cut.axes for cut in self.cuts[node].values()):
                made = self.state.strategy(node, self.cuts[node], self.partial.get(node))
                for value, spec in zip(node.outs, made.results, strict=True):
                    kind = dict(spec.partial).get(axis, "")
                    if kind:
                        reach[value] = kind
        if not reach:
            return
        for node, group in self._stay(axis, reach, passing):
            kind = reach[node.operands[min(group)]]
            self.cuts[node] = {
                f: c for f, cut in self.cuts[node].items() if (c := without(cut, axis, self.graph.mesh)).axes
            }
            self.partial.setdefault(node, {})[axis] = (kind, group)

    def _group(self, node: Node, rule: ShardingRule, axis: str, reach: dict[Value, str]) -> frozenset[int] | None:
        """The operands over which the node is linear, if all of them and no others may be partial over ``axis``."""
        operands = node.operands
        group = frozenset(i for i, v in enumerate(operands) if v in reach)
        if not group or group not in rule.linear:
            return None
        kinds = {reach[operands[i]] for i in group}
        if len(kinds) > 1 or (kinds - {"sum", "avg"} and not rule.moves_only):
            return None
        using = {f for f, cut in self.cuts[node].items() if axis in cut.axes}
        for i, dims in enumerate(rule.operands):
            if i not in group and any(f in using for dim in dims for f in dim):
                return None
        missing = [f for f in using if any(f not in present for present in rule.result_factors)]
        return None if missing else group

    def _stay(
        self, axis: str, reach: dict[Value, str], passing: dict[Node, frozenset[int]]
    ) -> list[tuple[Node, frozenset[int]]]:
        """The nodes that compute on partial sums, by a minimum cut of each connected part."""
        flow = nx.DiGraph()
        for value in reach:
            maker = value.node
            cost = self._seconds(value, axis, reach[value])
            if maker in passing:
                source = maker.operands[min(passing[maker])]
                add_capacity(flow, source, value, cost)
                flow.add_edge(value, source)  # it can stay partial only if what it is made of does
            else:
                add_capacity(flow, "partial", value, cost)
            is_end = value in self.outputs or value in self.state.closed
            if is_end or any(node not in passing for node in self.users[value]):
                flow.add_edge(value, "reduced")
        for node, group in passing.items():
            values = list(dict.fromkeys(node.operands[i] for i in group))
            for a, b in pairwise(values):
                flow.add_edge(a, b)
                flow.add_edge(b, a)
        chosen: list[tuple[Node, frozenset[int]]] = []
        ends = ("partial", "reduced")
        for part in nx.weakly_connected_components(flow.subgraph([n for n in flow if n not in ends])):
            if not any(v.node in passing for v in part):
                continue
            piece = flow.subgraph({*part, *ends}).copy()
            if "partial" not in piece or "reduced" not in piece:
                continue
            _, (stays, _) = nx.minimum_cut(piece, "partial", "reduced", flow_func=nx.algorithms.flow.dinitz)
            chosen += [
                (node, passing[node])
                for node in {n for v in part if v in stays for n in self.users[v]}
                if node in passing and all(node.operands[i] in stays for i in passing[node])
            ]
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        return sorted(chosen, key=lambda pair: order[pair[0]])

    def _seconds(self, value: Value, axis: str, kind: str) -> float:
        """The time to reduce a value over ``axis`` to what it is held as."""
        held = self.state.spec_of(value)
        dims = tuple(without(cut, axis, self.graph.mesh) for cut in held.dims)
        return self.state.planner.seconds(value.type, Spec(dims, ((axis, kind),)), held)


def add_capacity(flow: nx.DiGraph, a: object, b: object, seconds: float) -> None:
    """An edge of at least this capacity; an integer, so that the cut is exact."""
    capacity = int(seconds * 1e12)
    if flow.has_edge(a, b):
        capacity += flow[a][b].get("capacity", 0)
    flow.add_edge(a, b, capacity=capacity)
