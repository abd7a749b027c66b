"""Trial placements of nodes of a graph, before they are written, and their costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from shardfx.ir.cost.node_cost import NodeCosts
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Node, Strategy, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.redistribute import Redistribution
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.rules.strategy import FactorShardings, factor_shardings, partial_operands
from shardfx.ir.shards import has_rows
from shardfx.ir.spec import Spec
from shardfx.passes.base import PassContext


class PlacementCosts:
    """The cost model of placements of a graph, in which every node has a strategy: the mesh's links, and costs of nodes
    on the target machine."""

    def __init__(self, graph: Graph, context: PassContext) -> None:
        self.graph, self.context, self.users = graph, context, graph.users()
        self.prices = NodeCosts(graph.mesh, context.rules)
        self.outputs: dict[Value, list[Spec]] = {}
        """The placements in which values leave the program."""
        for output, spec in graph.output_specs().items():
            self.outputs.setdefault(output.value, []).append(spec)
        links = {axis.name: replace(axis.link, latency=0.0) for axis in graph.mesh.axes}
        self.bucketed = Redistribution(graph.mesh.with_links(links), context.planner.each)
        """Costs over links without latency, as outputs are bucketed with others."""

    def seconds(self, node: Node) -> float:
        """The time to compute a node."""
        return self.prices.of(node).seconds(self.context.machine, self.graph.mesh)


@dataclass
class TrialPlacement:
    """Trial strategies of some nodes in the place of those in the graph."""

    costs: PlacementCosts
    changed: dict[Node, Strategy] = field(default_factory=dict)

    @property
    def mesh(self) -> Mesh:
        """The mesh of the graph."""
        return self.costs.graph.mesh

    def copy(self) -> TrialPlacement:
        """A copy to be changed."""
        return TrialPlacement(self.costs, dict(self.changed))

    def strategy(self, node: Node) -> Strategy:
        """The strategy of a node."""
        made = self.changed.get(node, node.strategy)
        assert made is not None
        return made

    def spec(self, value: Value) -> Spec:
        """The placement in which a value is computed."""
        if value.node is None or value.node not in self.changed:
            assert value.spec is not None
            return value.spec
        return self.changed[value.node].results[value.node.outs.index(value)]

    def needs(self, value: Value) -> list[Spec]:
        """The distinct placements in which a value is used."""
        found = dict.fromkeys(self.costs.outputs.get(value, ()))
        for user in dict.fromkeys(self.costs.users[value]):
            pairs = zip(user.operands, self.strategy(user).operands, strict=True)
            found |= dict.fromkeys(need for operand, need in pairs if operand is value)
        return list(found)

    def moves(self, value: Value) -> list[Spec]:
        """The needed placements that require communication, without those covered by another one."""
        made, found = self.spec(value), list[Spec]()
        for need in self.needs(value):
            if not any(has_rows(other, need, value.shape, self.mesh) for other in (made, *found)):
                found = [*(other for other in found if not has_rows(need, other, value.shape, self.mesh)), need]
        return found

    def exchanges(self, value: Value) -> list[Spec]:
        """The halo exchanges among the moves of a value."""
        if not any(sharding.rows is not None for need in self.needs(value) for sharding in need.dims):
            return []
        return [need for need in self.moves(value) if any(sharding.rows is not None for sharding in need.dims)]

    def seconds(self, values: Iterable[Value], nodes: Iterable[Node]) -> float:
        """The time to move the values, and to compute the nodes."""
        costs, found = self.costs, 0.0
        for value in values:
            made = self.spec(value)
            for need in self.moves(value):
                planner = costs.bucketed if need in costs.outputs.get(value, ()) else costs.context.planner
                found += planner.seconds(value.type, made, need)
        return found + sum(costs.seconds(replace(node, strategy=self.strategy(node))) for node in nodes)

    def total(self) -> float:
        """The time of all values and nodes of the graph."""
        return self.seconds(self.costs.graph.values(), self.costs.graph.nodes)

    def rule(self, node: Node) -> ShardingRule:
        """The rule of a node's op."""
        return self.costs.context.cache.rule(node)

    def shardings(self, node: Node) -> FactorShardings:
        """The shardings of the factors of a node's rule."""
        return factor_shardings(self.rule(node), replace(node, strategy=self.strategy(node)), self.mesh)

    def shard(self, node: Node, shardings: FactorShardings) -> Strategy | None:
        """The strategy of a node with these factor shardings; None if its rule does not allow them."""
        shardings = {factor: sharding for factor, sharding in shardings.items() if sharding.axes}
        try:
            return self.costs.context.cache.strategy(self.rule(node), shardings, partial_operands(self.strategy(node)))
        except Error:  # a factor that must be in tiles, or an axis twice in one placement
            return None

    def write(self) -> bool:
        """Write the trial to the graph; returns whether that changes anything."""
        for node, made in self.changed.items():
            node.strategy = made
            for value, spec in zip(node.outs, made.results, strict=True):
                value.spec = spec
        return bool(self.changed)
