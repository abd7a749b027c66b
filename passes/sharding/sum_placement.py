"""Placement of reductions: reassociate and sum-placement.

reassociate: sums of gradients are ordered so that partial sums meet. Where a value is used several times its gradient
is a chain of adds in the order in which the uses were left; that order decides how often is reduced::

    ((r + dq) + dk) + dv        three all-reduces, when dq, dk and dv are partial over tp and r is not
    r + ((dq + dk) + dv)        one

sum-placement: a partial sum is reduced at once, or behind linear ops where that moves fewer bytes.
``dq @ wq' + dk @ wk' + dv @ wv'`` are three partial sums over tp: adding them before reducing sends a third. A value
that is made partial may be kept so (its consumers compute on the partial sums) or be reduced where it is made. Keeping
it costs nothing at the value itself, but something at every value further on where it ends. The cheapest choice is a
minimum cut between "kept partial" and "reduced", solved exactly, per mesh axis::

    %3 = mm(%1, %2) : [64, 512] +{tp}     %3 = mm(%1, %2) : [64, 512] +{tp}
    %4 = mm(%5, %6) : [64, 512] +{tp}     %4 = mm(%5, %6) : [64, 512] +{tp}
    %7 = add(AR(%3), AR(%4))         ->   %7 = add(%3, %4) : [64, 512] +{tp},  AR(%7) for what follows

Partial sums that go nowhere else pass a node that is to be reduced after (``REDUCE_AFTER``), whatever that sends: a
gradient in bf16 is reduced behind its cast to f32 (:mod:`shardfx.ir.capture.canonical.mixed_precision`). On the way it
is added, moved, and multiplied by what no input of the model goes into: what is multiplied by the batch is no gradient
of a parameter yet.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import networkx as nx
import torch

from shardfx.ir.dim_sharding import without
from shardfx.ir.graph import Graph, InputKind, Node, Phase, Value, op_name
from shardfx.ir.rewriter import Rewriter, dead_code
from shardfx.ir.rules.strategy import REDUCE_AFTER, factor_shardings, partial_operands
from shardfx.ir.spec import Spec
from shardfx.passes.base import SHARDED, Pass, PassContext, derived
from shardfx.passes.finite import Factors

from .propagate import scattered

ADD = torch.ops.aten.add.Tensor
NEVER = 1e6
"""Seconds that no reduction takes: what costs so much is reduced elsewhere, if it can be."""
Groups = dict[Node, frozenset[int]]
"""Of nodes, the operands that may be partial sums."""


@dataclass(frozen=True)
class Reassociate(Pass):
    """Reorder chains of adds in the backward pass, so that partial sums are added before they are reduced."""

    name: ClassVar[str] = "reassociate"
    requires: ClassVar[frozenset[str]] = frozenset({SHARDED})

    def run(self, graph: Graph, context: PassContext) -> bool:
        users, rewriter = graph.users(), Rewriter(graph)
        kept = _fixed(graph)
        inner: set[Node] = set()
        for node in reversed(graph.nodes):
            if node in inner or not _is_sum(node):
                continue
            groups: dict[object, list[Value]] = {}
            for term in _terms(node, users, kept, inner):
                groups.setdefault(_partial(term, context), []).append(term)
            if len(groups) > 1 and any(key and len(group) > 1 for key, group in groups.items()):
                new = _rebuild(node, list(groups.values()), rewriter)
                new.hint, new.hinted_by = node.outs[0].hint, node.outs[0].hinted_by
        changed = rewriter.apply()
        if changed:
            dead_code(graph)
            graph.rename()
        return changed


def _fixed(graph: Graph) -> set[Value]:
    """Values that must be reduced: outputs, and those with a hint."""
    return {output.value for output in graph.outputs} | {value for value in graph.values() if value.hint is not None}


def _is_sum(node: Node) -> bool:
    if node.op is not ADD or node.phase is not Phase.BACKWARD or node.kwargs or len(node.operands) != 2:
        return False
    return all(v.type == node.outs[0].type for v in node.operands)


def _terms(node: Node, users: dict[Value, list[Node]], kept: Container[Value], inner: set[Node]) -> list[Value]:
    """The terms of a sum: through adds whose result nothing else uses."""
    terms: list[Value] = []
    for value in node.operands:
        maker = value.node
        once = users[value] == [node] and value not in kept and node.operands.count(value) == 1
        if maker is not None and once and _is_sum(maker):
            inner.add(maker)
            terms += _terms(maker, users, kept, inner)
        else:
            terms.append(value)
    return terms


def _partial(value: Value, context: PassContext) -> tuple[tuple[str, str], ...]:
    """The axes over which a value is partial where it is made; seen through ops that only move elements."""
    maker = value.node
    while maker is not None and len(maker.operands) == 1 and context.cache.rule(maker).moves_only:
        value = maker.operands[0]
        maker = value.node
    if maker is None or maker.strategy is None:
        return ()
    return maker.strategy.results[maker.outs.index(value)].partial


def _rebuild(root: Node, groups: list[list[Value]], rewriter: Rewriter) -> Value:
    """Rebuild the sum in the place of ``root`` from the groups' sums; its adds are computed as that was."""

    def total(values: Sequence[Value]) -> Value:
        found = values[0]
        for value in values[1:]:
            node = rewriter.before(root, Rewriter.make(ADD, (found, value), root.outs[0].type, like=root))
            node.strategy, node.outs[0].spec = root.strategy, root.outs[0].spec
            found = node.outs[0]
        return found

    made = total([total(group) for group in groups])
    rewriter.replace(root.outs[0], made)
    rewriter.erase(root)
    return made


@dataclass(frozen=True)
class SumPlacement(Pass):
    """Keep partial sums through linear ops where that sends less than reducing them at once."""

    name: ClassVar[str] = "sum-placement"
    requires: ClassVar[frozenset[str]] = frozenset({SHARDED})

    def run(self, graph: Graph, context: PassContext) -> bool:
        return _Sums(graph, context).run()


class _Sums:
    """Chooses where to reduce, one mesh axis after the other, and writes it on the nodes."""

    def __init__(self, graph: Graph, context: PassContext) -> None:
        self.graph, self.context, self.users = graph, context, graph.users()
        self.rules = {node: context.cache.rule(node) for node in graph.nodes}
        self.factors = Factors.of(graph, context.cache)
        self.reduced = {value: self._needed(value) for value in graph.values()}
        """What a partial value is needed as, once it is reduced."""
        self.ends = _fixed(graph)
        self.late = {node for node in graph.nodes if node.attrs.get(REDUCE_AFTER)}
        """Nodes that partial sums pass."""
        inputs = (inp for kind in (InputKind.ARGUMENT, InputKind.TARGET) for inp in graph.of_kind(kind))
        self.of_batch = derived(graph, (inp.value for inp in inputs if self.late))
        """Values that an input of the model goes into."""

    def run(self) -> bool:
        changed = [self._axis(axis.name) for axis in self.graph.mesh.axes if axis.size > 1 or axis.loop]
        self._report_early()
        return any(changed)

    def _needed(self, value: Value) -> Spec:
        """The placement of a value after its reduction: as its hint says; as it is made, but scattered as the first
        user that wants its partial sum so; or, where it is replicated, as all its users want it."""
        made = value.spec
        assert made is not None
        if value.hint is not None:
            return value.hint
        needs = [spec for user in self.users[value] for spec in _needs(user, value)]
        if made.partial:
            dims = (scattered(made, need.dims) for need in needs)
            found = next((each for each in dims if each != made.dims), None)
            return Spec(found) if found is not None else made.reduced()
        return needs[0] if len(set(needs)) == 1 and not made.axes else made

    def _axis(self, axis: str) -> bool:
        """Build the flow graph of values that may be partial over ``axis``, and find its minimum cut."""
        reach: dict[Value, str] = {}
        passing, joining = Groups(), Groups()
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
                kinds = zip(node.outs, (dict(spec.partial).get(axis, "") for spec in made.results), strict=True)
                reach.update((value, kind) for value, kind in kinds if kind)
        chosen = self._chosen(axis, reach, passing, joining) if reach else []
        for node, group in chosen:
            self._let_pass(node, axis, reach[node.operands[min(group)]], group, node in joining)
        return bool(chosen)

    def _let_pass(self, node: Node, axis: str, kind: str, group: frozenset[int], joined: bool) -> None:
        """Compute a node on the partial sums of some operands, and not sharded over the axis unless that is joined."""
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
        others = {f for i, dims in enumerate(rule.operands) if i not in group for dim in dims for f in dim}
        if using & others or any(not using <= present for present in rule.result_factors):
            return None
        return group if self._may_be_partial(node, axis, group) else None

    def _may_be_partial(self, node: Node, axis: str, group: frozenset[int]) -> bool:
        """Whether operands may be partial over an axis: they are multiplied by nothing infinite; and iterations of
        loops around those of the axis do not meet before the node, for then those within them have met, too."""
        mesh = self.graph.mesh
        around = {each.name for each in mesh.axes[: mesh.order(axis)] if each.loop} if mesh[axis].loop else set()
        assert node.strategy is not None
        pairs = [(node.operands[i].spec, node.strategy.operands[i]) for i in group if around]
        over = [({*a.axes, *a.partial_axes}, {*b.axes, *b.partial_axes}) for a, b in pairs if a is not None]
        met = any(around & (made - need) for made, need in over)
        return not met and self.factors.may_pass(node, self.rules[node], group)

    def _joined(self, node: Node, axis: str, reach: dict[Value, str]) -> Groups:
        """The node with the operands that may be partial sums over the axis, which shards a factor of it by itself."""
        assert node.strategy is not None
        rule, found = self.rules[node], [(f, axes) for f, axes in node.strategy.shardings if axis in axes]
        group = frozenset(i for i, v in enumerate(node.operands) if reach.get(v) == "sum")
        alone = found[0][1] == (axis,) and group and rule.together(found[0][0], group) is not None
        return {node: group} if alone and self._may_be_partial(node, axis, group) else {}

    def _chosen(
        self, axis: str, reach: dict[Value, str], passing: Groups, joining: Groups
    ) -> list[tuple[Node, frozenset[int]]]:
        """The nodes that compute on partial sums, by a minimum cut of each connected part. What is made by nodes that
        are joined is partial in any case."""
        taking = passing | joining
        flow, later = nx.DiGraph(), self._leads_behind(list(reach), passing.get)
        for value in reach:
            maker = value.node
            cost = NEVER if value in later else self._seconds(value, axis, reach[value])
            if maker in passing:
                source = maker.operands[min(passing[maker])]
                _add_capacity(flow, source, value, cost)
                flow.add_edge(value, source)  # it can be kept partial only if what it is made of is
            else:
                _add_capacity(flow, "partial", value, cost)
            if value in self.ends or any(node not in taking for node in self.users[value]):
                flow.add_edge(value, "reduced")
        for node, group in taking.items():
            for a, b in pairwise(dict.fromkeys(node.operands[i] for i in group)):
                flow.add_edges_from([(a, b), (b, a)])
        chosen: set[Node] = set()
        ends = ("partial", "reduced")
        for part in nx.weakly_connected_components(flow.subgraph([n for n in flow if n not in ends])):
            users = {node for value in part for node in self.users[value] if node in taking}
            if not any(v.node in passing for v in part) and users.isdisjoint(joining):
                continue
            graph, kept = flow.subgraph({*part, *ends}).copy(), part
            if "partial" not in graph:
                continue
            if "reduced" in graph:
                _, (kept, _) = nx.minimum_cut(graph, "partial", "reduced", flow_func=nx.algorithms.flow.dinitz)
            chosen |= {node for node in users if all(node.operands[i] in kept for i in taking[node])}
        return [(node, taking[node]) for node in self.graph.nodes if node in chosen]

    def _leads_behind(self, values: Sequence[Value], passing: Callable[[Node], frozenset[int] | None]) -> set[Value]:
        """Those of some values, in the order of the graph, that go to nodes to be reduced after, and nowhere else.

        Args:
            passing: the operands with which partial sums pass a node; None, where they do not.
        """
        found: set[Value] = set()

        def leads_on(node: Node) -> bool:
            """Whether a node adds, moves or scales its operands, on the way to one to be passed."""
            group = passing(node)
            if group is None or any(v in self.of_batch for i, v in enumerate(node.operands) if i not in group):
                return False
            return node in self.late or found.issuperset(node.outs)

        for value in reversed(values) if self.late else ():
            users = self.users[value] if value not in self.ends else []
            if users and all(map(leads_on, users)):
                found.add(value)
        return found

    def _report_early(self) -> None:
        """Report values that are reduced before a node that could have taken partial sums."""

        def of_batch(node: Node) -> frozenset[int]:
            return frozenset(i for i, value in enumerate(node.operands) if value in self.of_batch)

        late = self._leads_behind(list(self.graph.values()), of_batch)
        for value in (value for value in self.graph.values() if value in late):
            partial = set(value.spec.partial) if value.spec is not None else set()
            needs = [need for node in self.users[value] for need in _needs(node, value)]
            if partial and value.node is not None and any(set(need.partial) != partial for need in needs):
                name, dtype = op_name(value.node.op), str(value.type.dtype).removeprefix("torch.")
                self.graph.notes.append(f"a gradient is summed in {dtype}, as {name} makes it ({value.where})")

    def _seconds(self, value: Value, axis: str, kind: str) -> float:
        """The time to reduce a value over ``axis`` to what it is needed as."""
        needed = self.reduced[value]
        dims = tuple(without(sharding, axis, self.graph.mesh) for sharding in needed.dims)
        return self.context.planner.seconds(value.type, Spec(dims, ((axis, kind),)), needed)


def _needs(node: Node, value: Value) -> list[Spec]:
    """The placement of one of its operands that a node needs."""
    assert node.strategy is not None
    return [need for operand, need in zip(node.operands, node.strategy.operands, strict=True) if operand is value]


def _add_capacity(flow: nx.DiGraph, a: object, b: object, seconds: float) -> None:
    """Add an edge of at least this capacity; an integer, so that the minimum cut is exact."""
    capacity = int(seconds * 1e12)
    if flow.has_edge(a, b):
        capacity += flow[a][b].get("capacity", 0)
    flow.add_edge(a, b, capacity=capacity)
