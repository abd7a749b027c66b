"""propagate: from a few hints to a strategy for every op.

Hints flow both ways through the graph (:mod:`.fixpoint`), ops that cannot be sharded as wanted are decomposed
(:mod:`.decompose`), and then every node is settled in order. Partial sums are reduced where they are made: where else
they may be is decided afterwards (:mod:`.sum_placement`).

    before   %3 = aten.mm(%1, %2)                                hints: %1 "dp, -", %2 "-, tp"
    after    %3 = aten.mm(%1, %2) : f32[64{dp}, 512{tp}]         each node has a strategy, each value a spec
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from shardfx.ir.dim_sharding import DimSharding
from shardfx.ir.errors import Error, ShardfxWarning
from shardfx.ir.graph import Graph, InputKind, Node, op_name
from shardfx.ir.ops.traits import is_heavy
from shardfx.ir.rules.sharding_rule import rule_text
from shardfx.ir.spec import Spec
from shardfx.passes.base import HINTED, SHARDED, Pass, PassContext
from shardfx.passes.replicated_spatial_ops import report_replicated_space
from shardfx.passes.update_placement import place_update

from .conflicts import Conflicts, factor_shardings
from .decompose import Decomposer
from .fixpoint import Propagation
from .pins import check_pin, needs_decomposition, pin_parts
from .seeds import as_used, data_axes, seeds_of, stored_by_hints
from .sharding_state import ShardingState
from .share_compute import share_compute


@dataclass(frozen=True)
class Propagate(Pass):
    """Give every op a strategy, from hints on a few values.

    With ``strict`` an op without a sharding rule is an error, and one that gathers what is sharded over space; else it
    is replicated on every rank, which a warning says.
    """

    name: ClassVar[str] = "propagate"
    requires: ClassVar[frozenset[str]] = frozenset({HINTED})
    establishes: ClassVar[frozenset[str]] = frozenset({SHARDED})

    strict: bool = field(default=False, metadata={"help": "an op without a rule is an error"})

    def run(self, graph: Graph, context: PassContext) -> bool:
        self._place(graph, context)
        place_update(graph, context.cache, {})
        self._report_missing(graph, context)
        report_replicated_space(graph, context.cache, self.strict)
        return True

    def _place(self, graph: Graph, context: PassContext) -> None:
        decomposer, state = Decomposer(context.rules), ShardingState(graph, context.cache)
        propagation = Propagation(state, Conflicts(state, context.planner))
        propagation.seed(seeds_of(graph))
        propagation.run()
        _decompose(graph, decomposer, propagation)
        if share_compute(graph, data_axes(graph), propagation):
            _decompose(graph, decomposer, propagation)
        for node in graph.nodes:
            if node.pin is not None:
                check_pin(node, state.rules[node], graph.mesh)
        _write(state, _settled(state, propagation.conflicts))
        graph.reasons = propagation.reasons()
        for made in stored_by_hints(graph):
            graph.reasons.add(made)
        graph.rename()

    def _report_missing(self, graph: Graph, context: PassContext) -> None:
        """Report, once per op, that its rule was discovered, or that it has none."""
        known = {node: context.cache.known(node) for node in graph.nodes}
        for node in _first_of_each_op(node for node, found in known.items() if found.source == "discovered"):
            rule = rule_text(known[node].rule)
            graph.notes.append(f"the rule of {op_name(node.op)} ({node.where}) was found by running it: {rule}")
        for node in _first_of_each_op(node for node, found in known.items() if found.source == "none"):
            name = op_name(node.op)
            if self.strict:
                raise Error(
                    f"no sharding rule for {name}",
                    where=f"{node.where}  {node.where.code}",
                    expected="a rule for every op (strict=True), or one that is found by running it on small tensors",
                    got=name,
                    remedy="write one (docs/writing_rules.md), or pass strict=False to replicate it on every rank",
                )
            text = f"no sharding rule for {name} ({node.where}): it is computed replicated on every rank"
            graph.notes.append(text)
            warnings.warn(text, ShardfxWarning, stacklevel=2)


def _decompose(graph: Graph, decomposer: Decomposer, propagation: Propagation) -> None:
    """Decompose ops that cannot be sharded as wanted, and propagate further, as long as there are any."""
    state = propagation.state
    while blocked := [node for node in state.nodes if _is_blocked(node, state) and decomposer.can(node)]:
        around = [value for node in blocked for value in node.operands]
        decomposed = decomposer.apply(graph, blocked)
        around += [value for each in decomposed for node in each.made for value in node.operands]
        for old, new in (pair for each in decomposed for pair in each.swapped):
            propagation.take_over(old, new)
            new.hint, new.hinted_by = old.hint, old.hinted_by
            around.append(new)
        state.changed_graph()
        for each in decomposed:
            if each.node.pin is not None:
                pin_parts(each.node.pin, each.node, each.made, state.rules, graph.mesh)
        propagation.run(around)


def _is_blocked(node: Node, state: ShardingState) -> bool:
    """Whether the wanted sharding of some operand, or of a pin, is on a factor that the op needs replicated."""
    rule = state.rules[node]
    if needs_decomposition(node, rule):
        return True
    if node.pin is not None and not is_heavy(node):
        return False  # its parts are other ops, of which the pin says nothing: those of a product are products
    for value, dims in zip(node.operands, rule.operands, strict=True):
        for sharding, dim in zip(state.shardings.get(value, ()), dims, strict=False):
            if sharding.axes and any(f in rule.replicated for f in dim):
                factors = factor_shardings(sharding, dim, rule, state)
                if not any(factors) or any(c.axes and f in rule.replicated for f, c in zip(dim, factors, strict=True)):
                    return True
    return False


def _first_of_each_op(nodes: Iterable[Node]) -> list[Node]:
    return list({op_name(node.op): node for node in reversed(list(nodes))}.values())[::-1]


def _settled(state: ShardingState, conflicts: Conflicts) -> dict[Node, dict[str, DimSharding]]:
    """Settle every node's strategy in order, after propagation; open values take the resulting placement."""
    settled: dict[Node, dict[str, DimSharding]] = {}
    for node in state.nodes:
        shardings, _ = conflicts.resolve(node, with_results=True)
        settled[node] = shardings
        made = state.cache.strategy(state.rules[node], shardings)
        for value, spec in zip(node.outs, made.results, strict=True):
            if value not in state.closed and tuple(state.of(value)) != spec.dims:
                state.shardings[value] = list(scattered(spec, state.of(value)))
    return settled


def scattered(made: Spec, preferred: Iterable[DimSharding]) -> tuple[DimSharding, ...]:
    """The stored placement of an open value: as it is made, but a partial sum may be scattered as is preferred."""
    waiting = set(made.partial_axes)
    result = []
    for sharding, wished in zip(made.dims, preferred, strict=True):
        extra = set(wished.axes) - set(sharding.axes)
        fits = extra and extra <= waiting and set(sharding.axes) <= set(wished.axes)
        result.append(wished if fits else sharding)
        waiting -= set(result[-1].axes)
    return tuple(result)


def _write(state: ShardingState, shardings: Mapping[Node, dict[str, DimSharding]]) -> None:
    """Write strategies on nodes and specs on values and outputs; a parameter is placed as it is stored: in all
    iterations, though each may read a part of it alone."""
    loops = {axis.name for axis in state.mesh.axes if axis.loop}
    for node in state.nodes:
        node.strategy = state.cache.strategy(state.rules[node], shardings[node])
        for value, spec in zip(node.outs, node.strategy.results, strict=True):
            value.spec = spec
            value.hint = state.spec(value) if value.hint is not None else None  # with the loops it is made in
    for inp in state.graph.inputs:
        if inp.value.spec is None or inp.kind is not InputKind.PARAMETER:
            inp.value.spec = state.spec(inp.value)
        if inp.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            inp.value.spec = as_used(inp.value.spec, loops, inp.value, state.mesh)
    for output, spec in state.graph.output_specs().items():
        output.spec = spec
