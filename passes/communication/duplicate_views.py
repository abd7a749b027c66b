"""duplicate-views: views are duplicated, one for each placement of them that is needed, which costs nothing.

What is placed otherwise is then asked of *their* operand, and so on up: a value that is needed replicated as it is and
transposed is gathered once, and the gathered copy transposed. A partial sum is reduced where ``sum-placement`` says,
and not above a view that it was to pass: a gradient in its parameter's own shape is bucketed with the others.

    %3 = t(%w) : [6, 8{tp}]    needed as such, and full     ->    %3 = t(%w) : [6, 8{tp}]
                                                                 %4 = t(%w) : [6, 8]  needs [8, 6]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardfx.ir.dim_sharding import DimSharding, project
from shardfx.ir.graph import Graph, Node, Output, Strategy, Value
from shardfx.ir.rewriter import Rewriter
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.spec import Spec
from shardfx.passes.base import SHARDED, Pass, PassContext

Uses = dict[Spec, list[tuple[Node | Output, int]]]
"""By placement, who needs a value so, and as which operand."""


@dataclass(frozen=True)
class DuplicateViews(Pass):
    """Duplicate ops that only move elements, one for each placement that is needed of them."""

    name: ClassVar[str] = "duplicate-views"
    requires: ClassVar[frozenset[str]] = frozenset({SHARDED})

    def run(self, graph: Graph, context: PassContext) -> bool:
        users, rewriter = graph.users(), Rewriter(graph)
        asked: dict[Value, Uses] = {}
        for output, spec in graph.output_specs().items():
            asked.setdefault(output.value, {}).setdefault(spec, []).append((output, 0))
        for node in reversed(graph.nodes):
            made = [node]
            shared = len(asked.get(node.outs[0], ())) > 1 or any(len(users[v]) > 1 for v in node.operands)
            if shared and _moves(node, context):
                made = _copies(node, asked.get(node.outs[0], {}), context, rewriter)
            for each in made:
                assert each.strategy is not None
                for place, (value, spec) in enumerate(zip(each.operands, each.strategy.operands, strict=True)):
                    asked.setdefault(value, {}).setdefault(spec, []).append((each, place))
        changed = rewriter.apply()
        graph.rename()
        return changed


def _moves(node: Node, context: PassContext) -> bool:
    entry = context.rules.entry(node.op)
    if entry is None or len(node.results) != 1 or len(node.operands) != 1 or node.outs[0].hint is not None:
        return False
    return entry.free and node.operands[0].type.numel == node.outs[0].type.numel


def _copies(node: Node, asked: Uses, context: PassContext, rewriter: Rewriter) -> list[Node]:
    """One node per placement that users ask for; the node itself serves those that no copy can."""
    rule, value, made = context.cache.rule(node), node.outs[0], [node]
    for spec, users in asked.items():
        if spec == value.spec or value.spec is None or {*spec.partial} != {*value.spec.partial}:
            continue
        found = _strategy_for(rule, spec, node, context)
        if found is None:
            continue
        copy = Rewriter.make(node.op, node.args, value.type, like=node, kwargs=node.kwargs)
        copy.strategy, copy.why, copy.outs[0].spec = found, node.why, spec
        rewriter.after(node, copy)
        for user, place in users:
            rewriter.replace(value, copy.outs[0], [user], at=[place])
        made.append(copy)
    if len(made) > 1 and value.spec not in asked and {*asked} <= {n.outs[0].spec for n in made}:
        rewriter.erase(node)
        made.remove(node)
    return made


def _strategy_for(rule: ShardingRule, spec: Spec, node: Node, context: PassContext) -> Strategy | None:
    """The strategy by which a one-operand move gives its result as ``spec``, if there is one; not in rows that overlap,
    which are exchanged last."""
    if any(sharding.rows is not None for sharding in spec.dims):
        return None
    shardings: dict[str, DimSharding] = {}
    moved = {f for dims in rule.operands for dim in dims for f in dim} - rule.replicated
    for d, dim in enumerate(rule.results[0] or ()):
        projected = project(spec.dims[d], node.outs[0].shape[d], rule.dim_sizes(dim), context.planner.mesh)
        if projected is None or any(
            sharding.axes and f not in moved for f, sharding in zip(dim, projected, strict=True)
        ):
            return None
        shardings |= {factor: sharding for factor, sharding in zip(dim, projected, strict=True) if sharding.axes}
    made = context.cache.strategy(rule, shardings, {axis: (op, frozenset({0})) for axis, op in spec.partial})
    return made if made.results[0] == spec else None
