"""sum-placement: where a partial sum is reduced, at once or behind linear ops where that moves fewer bytes.

``dq @ wq' + dk @ wk' + dv @ wv'`` are three partial sums over tp: adding them before reducing sends a third.
A value that is made partial may stay so (its consumers compute on the partial sums) or be reduced where it is
made. Staying costs nothing at the value itself, but something at every value further on where it ends. The
cheapest choice is a minimum sharding between "stays partial" and "is reduced", solved exactly, per mesh axis.

    %3 = mm(%1, %2) : [64, 512] +{tp}     %3 = mm(%1, %2) : [64, 512] +{tp}
    %4 = mm(%5, %6) : [64, 512] +{tp}     %4 = mm(%5, %6) : [64, 512] +{tp}
    %7 = add(AR(%3), AR(%4))         ->   %7 = add(%3, %4) : [64, 512] +{tp},  AR(%7) for what follows

A node that says ``sums_behind`` is passed by what goes nowhere else, whatever that sends: a gradient that is computed
in bf16 is reduced behind its cast to f32 (see :mod:`shardfx.ir.capture.canonical.mixed_precision`). On the way it is
added, moved, and multiplied by what no input of the model goes into: what is multiplied by the batch is no gradient of
a parameter yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

import networkx as nx

from shardfx.ir.dim_sharding import without
from shardfx.ir.graph import Graph, InputKind, Node, Value, op_name
from shardfx.ir.rules.as_placed import SUMS_BEHIND
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.rules.strategy import factor_shardings, partial_operands
from shardfx.ir.spec import Spec
from shardfx.passes.base import SHARDED, Context, Pass
from shardfx.passes.finite import keeps_terms_finite, sure_facts
from shardfx.passes.finite_results import Sure

from .propagate import scattered

NEVER = 1e6
"""Seconds that no reduction takes: what costs so much is reduced elsewhere, if it can be."""


@dataclass(frozen=True)
class SumPlacement(Pass):
    """Carry partial sums through linear ops where that sends less than reducing them at once."""

    name: ClassVar[str] = "sum-placement"
    requires: ClassVar[frozenset[str]] = frozenset({SHARDED})

    def run(self, graph: Graph, context: Context) -> bool:
        return _Sums(graph, context).run()


@dataclass
class _Sums:
    """Chooses where to reduce, one mesh axis after the other, and writes it on the nodes."""

    graph: Graph
    context: Context
    users: dict[Value, list[Node]] = field(default_factory=dict)
    rules: dict[Node, ShardingRule] = field(default_factory=dict)
    reduced: dict[Value, Spec] = field(default_factory=dict)
    """What a partial value is needed as, once it is reduced."""
    facts: dict[Value, Sure] = field(default_factory=dict)
    ends: set[Value] = field(default_factory=set)
    """Values that are reduced in any case: outputs, and those with a hint."""
    late: set[Node] = field(default_factory=set)
    """Nodes that say ``sums_behind``."""
    of_batch: set[Value] = field(default_factory=set)
    """Values that an input of the model goes into."""

    def run(self) -> bool:
        self.users = self.graph.users()
        self.rules = {node: self.context.cache.rule(node) for node in self.graph.nodes}
        self.facts = sure_facts(self.graph, self.rules.__getitem__)
        self.reduced = {value: self._needed(value) for value in self.graph.values()}
        self.ends = {output.value for output in self.graph.outputs}
        self.ends |= {value for value in self.graph.values() if value.hint is not None}
        self.late = {node for node in self.graph.nodes if node.attrs.get(SUMS_BEHIND)}
        self.of_batch = _of_batch(self.graph) if self.late else set()
        changed = [self._axis(axis.name) for axis in self.graph.mesh.axes if axis.size > 1 or axis.loop]
        self._report_early()
        return any(changed)

    def _needed(self, value: Value) -> Spec:
        """How a value is held when it is reduced: as its hint says; as it is made, but sharded as the first user that
        wants its partial sum scattered; or, where it is whole, as all its users want it."""
        made = value.spec
        assert made is not None
        if value.hint is not None:
            return value.hint
        if made.partial:
            for user in self.users[value]:
                assert user.strategy is not None
                for operand, need in zip(user.operands, user.strategy.operands, strict=True):
                    if operand is value and scattered(made, need.dims) != made.dims:
                        return Spec(scattered(made, need.dims))
            return made.reduced()
        wanted = {spec for user in self.users[value] for spec in _needs(user, value)}
        return wanted.pop() if len(wanted) == 1 and not made.axes else made

    def _axis(self, axis: str) -> bool:
        """Find the values that may be partial over ``axis``, and shard the graph that they form."""
        reach: dict[Value, str] = {}
        passing: dict[Node, frozenset[int]] = {}
        joining: dict[Node, frozenset[int]] = {}
        for node in self.graph.nodes:
            made = node.strategy
            assert made is not None
            group = self._group(node, axis, reach)
            if group is not None:
                passing[node] = group
                kind = reach[node.operands[min(group)]]
                made_partial = self.rules[node].passes(kind, group) or ()
                reach.update((value, kind) for value in node.outs if value.index in made_partial)
                continue
            if any(axis in axes for _, axes in made.shardings):
                joining.update(self._joined(node, axis, reach))
                for value, spec in zip(node.outs, made.results, strict=True):
                    kind = dict(spec.partial).get(axis, "")
                    if kind:
                        reach[value] = kind
        chosen = self._stay(axis, reach, passing, joining) if reach else []
        for node, group in chosen:
            self._let_pass(node, axis, reach[node.operands[min(group)]], group, node in joining)
        return bool(chosen)

    def _let_pass(self, node: Node, axis: str, kind: str, group: frozenset[int], joined: bool) -> None:
        """MixedPrecision a node on the partial sums of some operands, and not sharded over the axis unless that is
        joined."""
        mesh, rule = self.graph.mesh, self.rules[node]
        assert node.strategy is not None
        shardings = factor_shardings(rule, node, mesh)
        shardings = shardings if joined else {f: without(sharding, axis, mesh) for f, sharding in shardings.items()}
        partial = partial_operands(node.strategy) | {axis: (kind, group)}
        node.strategy = self.context.cache.strategy(rule, {f: c for f, c in shardings.items() if c.axes}, partial)
        for value, spec in zip(node.outs, node.strategy.results, strict=True):
            value.spec = spec

    def _group(self, node: Node, axis: str, reach: dict[Value, str]) -> frozenset[int] | None:
        """The operands over which the node is linear, if all of them and no others may be partial over ``axis``."""
        operands, rule = node.operands, self.rules[node]
        group = frozenset(i for i, v in enumerate(operands) if v in reach)
        kinds = {reach[operands[i]] for i in group}
        if len(kinds) != 1 or rule.passes(min(kinds), group) is None:
            return None
        assert node.strategy is not None
        using = {f for f, axes in node.strategy.shardings if axis in axes}
        for i, dims in enumerate(rule.operands):
            if i not in group and any(f in using for dim in dims for f in dim):
                return None
        if any(f not in present for f in using for present in rule.result_factors) or self._met(node, axis, group):
            return None
        return group if keeps_terms_finite(node, rule, group, self.facts) else None

    def _joined(self, node: Node, axis: str, reach: dict[Value, str]) -> dict[Node, frozenset[int]]:
        """The node with the operands that may be partial sums over the axis, which shards a factor of it by itself."""
        assert node.strategy is not None
        rule, found = self.rules[node], [(f, axes) for f, axes in node.strategy.shardings if axis in axes]
        group = frozenset(i for i, v in enumerate(node.operands) if reach.get(v) == "sum")
        alone = found[0][1] == (axis,) and group and rule.together(found[0][0], group) is not None
        fits = alone and not self._met(node, axis, group) and keeps_terms_finite(node, rule, group, self.facts)
        return {node: group} if fits else {}

    def _met(self, node: Node, axis: str, group: frozenset[int]) -> bool:
        """Whether iterations around those of an axis meet before the node: then those within them have met, too."""
        mesh = self.graph.mesh
        around = {each.name for each in mesh.axes[: mesh.order(axis)] if each.loop} if mesh[axis].loop else set()
        assert node.strategy is not None
        pairs = [(node.operands[i].spec, node.strategy.operands[i]) for i in group if around]
        hung = [({*a.axes, *a.partial_axes}, {*b.axes, *b.partial_axes}) for a, b in pairs if a is not None]
        return any(around & (held - need) for held, need in hung)

    def _stay(
        self,
        axis: str,
        reach: dict[Value, str],
        passing: dict[Node, frozenset[int]],
        joining: dict[Node, frozenset[int]],
    ) -> list[tuple[Node, frozenset[int]]]:
        """The nodes that compute on partial sums, by a minimum-cut of each connected part. What is made by nodes that
        are joined is partial in any case."""
        taking = passing | joining
        flow, later = nx.DiGraph(), self._leads_behind(list(reach), passing.get)
        for value in reach:
            maker = value.node
            cost = NEVER if value in later else self._seconds(value, axis, reach[value])
            if maker in passing:
                source = maker.operands[min(passing[maker])]
                add_capacity(flow, source, value, cost)
                flow.add_edge(value, source)  # it can stay partial only if what it is made of does
            else:
                add_capacity(flow, "partial", value, cost)
            if value in self.ends or any(node not in taking for node in self.users[value]):
                flow.add_edge(value, "reduced")
        for node, group in taking.items():
            values = list(dict.fromkeys(node.operands[i] for i in group))
            for a, b in pairwise(values):
                flow.add_edge(a, b)
                flow.add_edge(b, a)
        chosen: list[tuple[Node, frozenset[int]]] = []
        ends = ("partial", "reduced")
        for part in nx.weakly_connected_components(flow.subgraph([n for n in flow if n not in ends])):
            if not any(v.node in passing or any(node in joining for node in self.users[v]) for v in part):
                continue
            piece, stays = flow.subgraph({*part, *ends}).copy(), part
            if "partial" not in piece:
                continue
            if "reduced" in piece:
                _, (stays, _) = nx.minimum_cut(piece, "partial", "reduced", flow_func=nx.algorithms.flow.dinitz)
            chosen += [
                (node, taking[node])
                for node in {n for v in part if v in stays for n in self.users[v]}
                if node in taking and all(node.operands[i] in stays for i in taking[node])
            ]
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        return sorted(chosen, key=lambda pair: order[pair[0]])

    def _leads_behind(self, values: Sequence[Value], passing: Callable[[Node], frozenset[int] | None]) -> set[Value]:
        """Those of some values, in the order of the graph, that go to nodes that say ``sums_behind``, and nowhere else.

        Args:
            passing: the operands with which partial sums pass a node; None, where they do not.
        """
        found: set[Value] = set()
        for value in reversed(values) if self.late else ():
            users = self.users[value] if value not in self.ends else []
            if users and all(self._leads_on(node, passing(node), found) for node in users):
                found.add(value)
        return found

    def _leads_on(self, node: Node, group: frozenset[int] | None, found: set[Value]) -> bool:
        """Whether a node adds, moves or scales its operands of these numbers, on the way to one to be passed."""
        if group is None or any(v in self.of_batch for i, v in enumerate(node.operands) if i not in group):
            return False
        return node in self.late or found.issuperset(node.outs)

    def _hanging(self, node: Node) -> frozenset[int]:
        """The operands that hang on the batch, whether or not they may be partial sums."""
        return frozenset(i for i, value in enumerate(node.operands) if value in self.of_batch)

    def _report_early(self) -> None:
        """Say of what is reduced before a node that is to be passed."""
        late = self._leads_behind(list(self.graph.values()), self._hanging)
        for value in (value for value in self.graph.values() if value in late):
            partial = value.spec is not None and value.spec.partial_axes
            if partial and value.node is not None and any(_reduces(node, value) for node in self.users[value]):
                name, dtype = op_name(value.node.op), str(value.type.dtype).removeprefix("torch.")
                self.graph.notes.append(f"a gradient is summed in {dtype}, as {name} makes it ({value.where})")

    def _seconds(self, value: Value, axis: str, kind: str) -> float:
        """The time to reduce a value over ``axis`` to what it is needed as."""
        held = self.reduced[value]
        dims = tuple(without(sharding, axis, self.graph.mesh) for sharding in held.dims)
        return self.context.planner.seconds(value.type, Spec(dims, ((axis, kind),)), held)


def _of_batch(graph: Graph) -> set[Value]:
    """The model's inputs, and what is made of them."""
    found = {given.value for kind in (InputKind.ARGUMENT, InputKind.TARGET) for given in graph.of_kind(kind)}
    for node in graph.nodes:
        if not found.isdisjoint(node.operands):
            found.update(node.outs)
    return found


def _reduces(node: Node, value: Value) -> bool:
    """Whether a node needs less of a partial sum open than its value is made with."""
    assert value.spec is not None
    return any(set(need.partial) != set(value.spec.partial) for need in _needs(node, value))


def _needs(node: Node, value: Value) -> list[Spec]:
    """How a node needs one of its operands."""
    assert node.strategy is not None
    return [need for operand, need in zip(node.operands, node.strategy.operands, strict=True) if operand is value]


def add_capacity(flow: nx.DiGraph, a: object, b: object, seconds: float) -> None:
    """An edge of at least this capacity; an integer, so that the sharding is exact."""
    capacity = int(seconds * 1e12)
    if flow.has_edge(a, b):
        capacity += flow[a][b].get("capacity", 0)
    flow.add_edge(a, b, capacity=capacity)
