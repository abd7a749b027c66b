"""propagate: from a few hints to a strategy for every op.

Hints flow both ways through the graph (:mod:`.factors`), ops that stand in the way of a wanted cut are taken
apart (:mod:`.expand`), partial sums are reduced where that is cheapest (:mod:`.partials`).

    before   %3 = aten.mm(%1, %2)                                hints: %1 "dp, -", %2 "-, tp"
    after    %3 = aten.mm(%1, %2) : f32[64{dp}, 512{tp}]         each node has a strategy, each value a spec
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from shardfx.ir.cut import WHOLE, Cut, project
from shardfx.ir.errors import Error, ShardfxWarning
from shardfx.ir.graph import Graph, Input, InputKind, Node, Value, op_name
from shardfx.ir.rules.sharding_rule import ShardingRule, rule_text
from shardfx.ir.spec import Spec
from shardfx.passes.base import SHARDED, Context, Pass

from .bind_hints import bind
from .decompose import Expander
from .fixpoint import Propagation
from .reassociate import reassociate
from .rule_cache import RuleCache
from .sum_placement import Partial, Partials

MOST_ROUNDS = 8


@dataclass(frozen=True)
class Propagate(Pass):
    """Give every op a strategy, from hints on a few values."""

    name: ClassVar[str] = "propagate"
    establishes: ClassVar[frozenset[str]] = frozenset({SHARDED})

    partial_sums: bool = field(default=True, metadata={"help": "carry partial sums through linear ops where cheaper"})

    def run(self, graph: Graph, context: Context) -> bool:
        expander = Expander(context.rules)
        rules: dict[Node, ShardingRule] = {}
        cache = RuleCache(context.rules)
        cache.add(graph, rules)
        seeds = bind(graph, context.specs, context.aliases, rules)
        state = Propagation(graph, rules, context.planner)
        state.seed(seeds)
        state.run()
        for _ in range(MOST_ROUNDS):
            blocked = [node for node in graph.nodes if expander.can(node) and is_blocked(node, rules[node], state)]
            if not blocked:
                break
            around = [value for node in blocked for value in node.operands]
            for old, new in expander.apply(graph, blocked):
                state.take_over(old, new)
                around.append(new)
            cache.add(graph, rules)
            state.run(around)
        else:
            raise Error("ops are taken apart without end", got=", ".join(op_name(n.op) for n in blocked[:3]))
        report_missing(cache, rules, graph, context)
        cuts = sweep(graph, state)
        partial: dict[Node, Partial] = {}
        if self.partial_sums:
            reassociate(graph, state, cache, cuts)
            chooser = Partials(graph, state, cuts)
            chooser.run()
            partial = chooser.partial
        write(graph, state, cuts, partial, context)
        graph.rename()
        return True


def is_blocked(node: Node, rule: ShardingRule, state: Propagation) -> bool:
    """Whether some operand holds a cut of a factor that the op needs whole."""
    for value, dims in zip(node.operands, rule.operands, strict=True):
        held = state.held.get(value)
        if held is None:
            continue
        for d, dim in enumerate(dims):
            if held[d].axes and any(f in rule.whole for f in dim):
                projected = project(held[d], value.shape[d], rule.dim_sizes(dim), state.graph.mesh)
                if projected is None or any(c.axes and f in rule.whole for f, c in zip(dim, projected, strict=True)):
                    return True
    return False


def report_missing(cache: RuleCache, rules: Mapping[Node, ShardingRule], graph: Graph, context: Context) -> None:
    """Say once per op that its rule was discovered, or that it has none: an error if strict, else it is computed
    whole."""
    left = set(graph.nodes)  # the others were taken apart
    for node in unique_ops(node for node in cache.discovered if node in left):
        rule = rule_text(rules[node])
        context.notes.append(f"the rule of {op_name(node.op)} ({node.where}) was found by running it: {rule}")
    for node in unique_ops(node for node in cache.missing if node in left):
        name = op_name(node.op)
        if context.strict:
            raise Error(
                f"no sharding rule for {name}",
                where=f"{node.where}  {node.where.code}",
                expected="a rule for every op (strict=True), or one that is found by running it on small tensors",
                got=name,
                remedy="write one (docs/writing_rules.md), or pass strict=False to compute it whole on every rank",
            )
        text = f"no sharding rule for {name} ({node.where}): it is computed whole on every rank"
        context.notes.append(text)
        warnings.warn(text, ShardfxWarning, stacklevel=2)


def unique_ops(nodes: Iterable[Node]) -> list[Node]:
    """The first node of every op."""
    return list({op_name(node.op): node for node in reversed(list(nodes))}.values())[::-1]


def sweep(graph: Graph, state: Propagation) -> dict[Node, dict[str, Cut]]:
    """Settle every node's strategy in order, now that all cuts are known; open values take what is made of them."""
    settled: dict[Node, dict[str, Cut]] = {}
    for node in graph.nodes:
        rule = state.rules[node]
        cuts, _ = state.resolve(node, rule, with_results=True)
        settled[node] = cuts
        made = state.strategy(node, cuts)
        for value, spec in zip(node.outs, made.results, strict=True):
            if value not in state.closed:
                held = state.cuts_of(value)
                if tuple(held) != spec.dims:
                    state.held[value] = hold(spec, held)
    return settled


def hold(made: Spec, held: list[Cut]) -> list[Cut]:
    """What an open value is held as: as it is made, but a partial sum may be scattered as was wished."""
    waiting = set(made.partial_axes)
    result = []
    for cut, wish in zip(made.dims, held, strict=True):
        extra = set(wish.axes) - set(cut.axes)
        fits = extra and extra <= waiting and set(cut.axes) <= set(wish.axes)
        result.append(wish if fits else cut)
        waiting -= set(result[-1].axes)
    return result


def write(
    graph: Graph,
    state: Propagation,
    cuts: Mapping[Node, dict[str, Cut]],
    partial: Mapping[Node, Partial],
    context: Context,
) -> None:
    """Write strategies on nodes and specs on values."""
    for node in graph.nodes:
        node.strategy = state.strategy(node, cuts[node], partial.get(node))
        for value, spec in zip(node.outs, node.strategy.results, strict=True):
            value.spec = spec
    for given in graph.inputs:
        if given.value.spec is None or given.kind is not InputKind.PARAMETER:
            given.value.spec = input_spec(given, state)
    context.decisions.update(state.decisions)
    context.hints.update({value: state.spec_of(value) for value in state.closed if value.node is not None})


def input_spec(given: Input, state: Propagation) -> Spec:
    value: Value = given.value
    held = state.held.get(value)
    return Spec(tuple(held)) if held is not None else Spec((WHOLE,) * value.type.ndim)
