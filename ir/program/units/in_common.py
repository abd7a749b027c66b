"""What the programs of all ranks have in common: what of a graph they do, and in which turns, whoever does it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardfx.ir.cut import Part
from shardfx.ir.graph import Graph, Input, Node, Output, OutputKind, Value
from shardfx.ir.ops.table import OwnOp
from shardfx.ir.program.looped.alike_turns import parts_in_turns
from shardfx.ir.program.looped.in_turns import Loop, in_turns

from .of_stages import ends_here


@dataclass(frozen=True)
class InCommon:
    """The part of a graph that outputs of some kinds need. It is found once, and the graph must stay as it is."""

    graph: Graph
    kinds: frozenset[OutputKind]

    @cached_property
    def chosen(self) -> tuple[list[Input], list[Node], list[Output]]:
        """The inputs, nodes and outputs."""
        return select(self.graph, self.kinds)

    @cached_property
    def steps(self) -> Sequence[Node | Loop]:
        """The nodes in an order in which they may be done, those of turns in loops."""
        _, nodes, outputs = self.chosen
        return in_turns(nodes, outputs, self.graph.mesh)

    @cached_property
    def parts(self) -> set[Part]:
        """What is cut over time, of all that is there."""
        return parts_in_turns(self.chosen[1], self.graph.mesh)

    def ends(self, coords: Mapping[str, int]) -> tuple[list[Input], list[Output]]:
        """The inputs and outputs that the rank at ``coords`` has."""
        inputs, _, outputs = self.chosen
        return ends_here(self.graph, inputs, outputs, coords)


def select(graph: Graph, kinds: Iterable[OutputKind]) -> tuple[list[Input], list[Node], list[Output]]:
    """The part of the graph that the outputs of some kinds need, with the guards that concern them."""
    wanted = set(kinds)
    outputs = [o for o in graph.outputs if o.kind in wanted or (o.guard is not None and o.guard.concerns(wanted))]
    needed = {output.value for output in outputs}
    nodes = []
    for node in reversed(graph.nodes):
        if any(value in needed for value in node.outs):
            node = _without(node, needed)
            needed.update(node.operands)
            nodes.append(node)
    return [given for given in graph.inputs if given.value in needed], nodes[::-1], outputs


def _without(node: Node, needed: Container[Value]) -> Node:
    """Communication without the values that nobody needs: a target must not travel where there is no loss."""
    kept = [i for i, value in enumerate(node.outs) if value in needed]
    if not isinstance(node.op, OwnOp) or len(kept) == len(node.outs):
        return node
    args, results = tuple(node.operands[i] for i in kept), [node.results[i] for i in kept]
    return replace(node, args=args, results=results, strategy=None)
