"""Decomposition of an op where a wanted sharding is not possible for the fused op.

A softmax whose dim is sharded, a bias inside a product whose sum is sharded, a batch norm over a sharded batch: the
fused op cannot do it, its decomposition can, with small reductions inside. The op is replaced only where that happens,
so that elsewhere the fused kernel is kept.

    %3 = aten._log_softmax(%2{tp on dim 1})  ->  amax, sub, exp, sum, log, sub, with two all-reduces of a column
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._decomp import decomposition_table

from shardfx.ir.capture.canonical.patterns import splice, trace_function
from shardfx.ir.graph import Graph, Node, Value, op_name, substitute
from shardfx.ir.ops.alike import alike
from shardfx.ir.rewriter import Rewriter
from shardfx.ir.rules.book import RuleBook


class Decomposed(NamedTuple):
    """A node that was decomposed: its parts, and which value replaces each of its results."""

    node: Node
    made: list[Node]
    swapped: list[tuple[Value, Value]]


class Decomposer:
    """Replaces nodes by their decompositions; each distinct one is traced once."""

    def __init__(self, book: RuleBook) -> None:
        self._book = book
        self._traced: dict[object, torch.fx.GraphModule] = {}
        self._parts_of: dict[Node, frozenset[Any]] = {}
        """Of a node that is a part: the ops that were decomposed to it, of which none is decomposed again."""

    def can(self, node: Node) -> bool:
        """Whether the node has a decomposition, and is not itself the remainder of one: so decomposing terminates. A
        decomposition that writes to an operand (``diagonal_scatter`` by ``prims.copy_to``) does not count."""
        entry = self._book.entry(node.op)
        if node.op in self._parts_of.get(node, ()) or entry is None or not entry.expand:
            return False
        return not any(isinstance(op, torch._ops.OpOverload) and op._schema.is_mutable for op in self.parts(node))

    def parts(self, node: Node) -> list[Any]:
        """The ops of a node's decomposition."""
        nodes = self._trace(node).graph.nodes
        return list(dict.fromkeys(each.target for each in nodes if each.op == "call_function"))

    def apply(self, graph: Graph, nodes: list[Node]) -> list[Decomposed]:
        """Replace the nodes; returns the replacement of each."""
        rewriter = Rewriter(graph)
        decomposed = [self._replace(graph, node, rewriter) for node in nodes]
        rewriter.apply()
        return decomposed

    def _replace(self, graph: Graph, node: Node, rewriter: Rewriter) -> Decomposed:
        traced = self._trace(node)
        made, results = splice(traced, node.operands, like=node, mesh=graph.mesh)
        ops = self._parts_of.get(node, frozenset()) | {node.op}
        for each in made:
            each.why = f"part of {op_name(node.op)}, decomposed because it cannot be sharded as wanted"
            rewriter.before(node, each)
            self._parts_of[each] = ops
        swapped = [(o, n) for o, n in zip(node.results, results, strict=False) if o is not None and n is not None]
        for old, new in swapped:
            rewriter.replace(old, new)
        rewriter.erase(node)
        return Decomposed(node, made, swapped)

    def _trace(self, node: Node) -> torch.fx.GraphModule:
        entry, key = self._book.entry(node.op), alike(node)
        assert entry is not None and entry.expand
        if key not in self._traced:
            function = _as_function(node, entry.expand if callable(entry.expand) else decomposition_table[node.op])
            self._traced[key] = trace_function(function, [value.type for value in node.operands])
        return self._traced[key]


def _as_function(node: Node, decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """The decomposition of a node as a function of the tensor operands alone, with results in the dtypes of the op:
    statistics in few bits are in many in a decomposition."""

    def function(*tensors: torch.Tensor) -> Any:
        xs = iter(tensors)
        args = substitute(node.args, lambda value: next(xs))
        out = decomposition(*args, **{k: substitute(a, lambda value: next(xs)) for k, a in node.kwargs.items()})
        if not isinstance(out, tuple):
            return out
        pairs = zip(out, node.results, strict=False)  # some give a named tuple, which is no op
        return tuple([x if x is None or value is None else x.to(value.type.dtype) for x, value in pairs])

    return function
