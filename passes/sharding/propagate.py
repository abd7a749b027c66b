"""propagate: from a few hints to a strategy for every op.

Hints flow both ways through the graph (:mod:`.fixpoint`), ops that stand in the way of a wanted sharding are taken
apart (:mod:`.decompose`), and then every node is settled in order. Partial sums are reduced where they are made: where
else they may be is decided afterwards (:mod:`.reassociate`, :mod:`.sum_placement`).

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
from shardfx.passes.base import HINTED, SHARDED, Context, Pass
from shardfx.passes.gathered_space import report_gathered_space
from shardfx.passes.lost_work import share_lost_work
from shardfx.passes.update_placement import update_apart

from .conflicts import Conflicts, parted
from .decompose import Expander
from .fixpoint import Propagation
from .held import Held
from .pins import check_pin, hand_over, must_part
from .seeds import as_used, data_axes, seeds_of, stored_by_hints


@dataclass(frozen=True)
class Propagate(Pass):
    """Give every op a strategy, from hints on a few values.

    With ``strict`` an op without a sharding rule is an error, and one that gathers a sharding of space; else it is
    computed whole on every rank, and said so.
    """

    name: ClassVar[str] = "propagate"
    requires: ClassVar[frozenset[str]] = frozenset({HINTED})
    establishes: ClassVar[frozenset[str]] = frozenset({SHARDED})

    strict: bool = field(default=False, metadata={"help": "an op without a rule is an error"})

    def run(self, graph: Graph, context: Context) -> bool:
        with update_apart(graph, context.cache):
            self._place(graph, context)
        self._report_missing(graph, context)
        report_gathered_space(graph, context.cache, self.strict)
        return True

    def _place(self, graph: Graph, context: Context) -> None:
        expander = Expander(context.rules)
        held = Held(graph, context.cache)
        state = Propagation(held, Conflicts(held, context.planner))
        state.seed(seeds_of(graph))
        state.run()
        self._take_apart(graph, expander, state)
        if share_lost_work(graph, data_axes(graph), state):
            self._take_apart(graph, expander, state)
        for node in graph.nodes:
            if node.pin is not None:
                check_pin(node, held.rules[node], graph.mesh)
        write(held, sweep(held, state.conflicts))
        graph.reasons = state.reasons()
        for made in stored_by_hints(graph):
            graph.reasons.add(made)
        graph.rename()

    def _take_apart(self, graph: Graph, expander: Expander, state: Propagation) -> None:
        """Take apart what stands in the way of a sharding, and hand on what that lets through, as long as there is
        any."""
        held = state.held

        def parts(node: Node) -> bool:
            return expander.can(node) and is_blocked(node, held) and expander.helps(node, held.of, graph.mesh)

        while blocked := [node for node in graph.nodes if parts(node)]:
            around = [value for node in blocked for value in node.operands]
            parted = expander.apply(graph, blocked, held.of)
            around += [value for each in parted for node in each.made for value in node.operands]
            for old, new in (pair for each in parted for pair in each.swapped):
                state.take_over(old, new)
                new.hint, new.hinted_by = old.hint, old.hinted_by
                around.append(new)
            held.changed_graph()
            for each in parted:
                if each.node.pin is not None:
                    hand_over(each.node.pin, each.node, each.made, held.rules, graph.mesh)
            state.run(around)

    def _report_missing(self, graph: Graph, context: Context) -> None:
        """Say once per op that its rule was discovered, or that it has none."""
        known = {node: context.cache.known(node) for node in graph.nodes}
        for node in unique_ops(node for node, found in known.items() if found.source == "discovered"):
            rule = rule_text(known[node].rule)
            graph.notes.append(f"the rule of {op_name(node.op)} ({node.where}) was found by running it: {rule}")
        for node in unique_ops(node for node, found in known.items() if found.source == "none"):
            name = op_name(node.op)
            if self.strict:
                raise Error(
                    f"no sharding rule for {name}",
                    where=f"{node.where}  {node.where.code}",
                    expected="a rule for every op (strict=True), or one that is found by running it on small tensors",
                    got=name,
                    remedy="write one (docs/writing_rules.md), or pass strict=False to compute it whole on every rank",
                )
            text = f"no sharding rule for {name} ({node.where}): it is computed whole on every rank"
            graph.notes.append(text)
            warnings.warn(text, ShardfxWarning, stacklevel=2)


def is_blocked(node: Node, state: Held) -> bool:
    """Whether some operand holds a sharding of a factor that the op needs whole, or somebody wants it sharded."""
    rule = state.rules[node]
    if must_part(node, rule):
        return True
    if node.pin is not None and not is_heavy(node):
        return False  # its parts are other ops, of which the pin says nothing: those of a product are products
    for value, dims in zip(node.operands, rule.operands, strict=True):
        held = state.shardings.get(value)
        if held is None:
            continue
        for d, dim in enumerate(dims):
            if held[d].axes and any(f in rule.whole for f in dim):
                pieces = parted(held[d], dim, rule, state)
                if not any(pieces) or any(c.axes and f in rule.whole for f, c in zip(dim, pieces, strict=True)):
                    return True
    return False


def unique_ops(nodes: Iterable[Node]) -> list[Node]:
    """The first node of every op."""
    return list({op_name(node.op): node for node in reversed(list(nodes))}.values())[::-1]


def sweep(held: Held, conflicts: Conflicts) -> dict[Node, dict[str, DimSharding]]:
    """Settle every node's strategy in order, now that all shardings are known; open values take what is made of
    them."""
    settled: dict[Node, dict[str, DimSharding]] = {}
    for node in held.graph.nodes:
        shardings, _ = conflicts.resolve(node, with_results=True)
        settled[node] = shardings
        made = held.cache.strategy(held.rules[node], shardings)
        for value, spec in zip(node.outs, made.results, strict=True):
            if value not in held.closed:
                wished = held.of(value)
                if tuple(wished) != spec.dims:
                    held.shardings[value] = list(scattered(spec, wished))
    return settled


def scattered(made: Spec, wish: Iterable[DimSharding]) -> tuple[DimSharding, ...]:
    """What an open value is held as: as it is made, but a partial sum may be scattered as was wished."""
    waiting = set(made.partial_axes)
    result = []
    for sharding, wished in zip(made.dims, wish, strict=True):
        extra = set(wished.axes) - set(sharding.axes)
        fits = extra and extra <= waiting and set(sharding.axes) <= set(wished.axes)
        result.append(wished if fits else sharding)
        waiting -= set(result[-1].axes)
    return tuple(result)


def write(held: Held, shardings: Mapping[Node, dict[str, DimSharding]]) -> None:
    """Write strategies on nodes and specs on values and outputs; a parameter lies as it is stored: in all iterations,
    though
    each may read a part of it alone."""
    iterations = {axis.name for axis in held.mesh.axes if axis.loop}
    for node in held.graph.nodes:
        node.strategy = held.cache.strategy(held.rules[node], shardings[node])
        for value, spec in zip(node.outs, node.strategy.results, strict=True):
            value.spec = spec
            value.hint = held.spec(value) if value.hint is not None else None  # with the turns it is made in
    for given in held.graph.inputs:
        if given.value.spec is None or given.kind is not InputKind.PARAMETER:
            given.value.spec = held.spec(given.value)
        if given.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            given.value.spec = as_used(given.value.spec, iterations, given.value, held.mesh)
    for output, spec in held.graph.output_specs().items():
        output.spec = spec
