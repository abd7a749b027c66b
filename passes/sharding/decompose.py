"""Taking an op apart where a sharding that is wanted stands in its way.

A softmax whose dim is sharded, a bias inside a product whose sum is sharded, a batch norm over a sharded batch: the
fused op cannot do it, its decomposition can, with small reductions inside. The op is replaced only where that happens,
so that elsewhere the fused kernel stays.

    %3 = aten._log_softmax(%2{tp on dim 1})  ->  amax, sub, exp, sum, log, sub, with two all-reduces of a column
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch._decomp import decomposition_table

from shardfx.ir.capture.canonical.patterns import splice, trace_function
from shardfx.ir.dim_sharding import DimSharding
from shardfx.ir.graph import Graph, Node, Value, op_name, substitute
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.alike import alike
from shardfx.ir.rewriter import Rewriter
from shardfx.ir.rules.book import RuleBook
from shardfx.ir.rules.by_pieces import ByPieces, in_pieces


class Parted(NamedTuple):
    """A node that was taken apart: what it is made of, and which value stands for each of its results."""

    node: Node
    made: list[Node]
    swapped: list[tuple[Value, Value]]


class Expander:
    """Replaces nodes by their decompositions; each distinct one is traced once."""

    def __init__(self, book: RuleBook) -> None:
        self._book = book
        self._traced: dict[object, torch.fx.GraphModule] = {}
        self._parts_of: dict[Node, frozenset[Any]] = {}
        """Of a node that is a part: the ops that were taken apart to it, of which none is taken apart again."""

    def can(self, node: Node) -> bool:
        """Whether there is a decomposition, and the node is not already what is left of one: so there is an end."""
        if node.op in self._parts_of.get(node, ()):
            return False
        entry = self._book.entry(node.op)
        return entry is not None and bool(entry.expand)

    def helps(self, node: Node, shardings: Callable[[Value], Sequence[DimSharding]], mesh: Mesh) -> bool:
        """Whether the decomposition is another one than the op itself, where operands are held in these shardings."""
        expand = self._expand(node)
        if not isinstance(expand, ByPieces) or not expand.apart:
            return True
        made = in_pieces(expand, node, shardings(node.operands[0]), mesh)
        return bool(made.pieces)

    def parts(self, node: Node) -> list[Any]:
        """The ops that a node would be taken apart into."""
        nodes = self._trace(node, self._expand(node)).graph.nodes
        return list(dict.fromkeys(each.target for each in nodes if each.op == "call_function"))

    def apply(
        self, graph: Graph, nodes: list[Node], shardings: Callable[[Value], Sequence[DimSharding]]
    ) -> list[Parted]:
        """Replace the nodes, whose operands are held in these shardings; gives of each what stands for it."""
        rewriter = Rewriter(graph)
        parted = [self._replace(graph, node, rewriter, shardings) for node in nodes]
        rewriter.apply()
        return parted

    def _replace(
        self, graph: Graph, node: Node, rewriter: Rewriter, shardings: Callable[[Value], Sequence[DimSharding]]
    ) -> Parted:
        traced = self._trace(node, in_pieces(self._expand(node), node, shardings(node.operands[0]), graph.mesh))
        made, given = splice(traced, node.operands, like=node, mesh=graph.mesh)
        whole = self._parts_of.get(node, frozenset()) | {node.op}
        for each in made:
            each.why = f"part of {op_name(node.op)}, taken apart because a sharding stands in its way"
            rewriter.before(node, each)
            self._parts_of[each] = whole
        swapped = [(o, n) for o, n in zip(node.results, given, strict=False) if o is not None and n is not None]
        for old, new in swapped:
            rewriter.replace(old, new)
        rewriter.erase(node)
        return Parted(node, made, swapped)

    def _expand(self, node: Node) -> Any:
        entry = self._book.entry(node.op)
        assert entry is not None and entry.expand
        return entry.expand

    def _trace(self, node: Node, expand: Any) -> torch.fx.GraphModule:
        key = alike(node), expand
        if key not in self._traced:
            function = as_function(node, expand if callable(expand) else decomposition_table[node.op])
            self._traced[key] = trace_function(function, [value.type for value in node.operands])
        return self._traced[key]


def as_function(node: Node, decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """The decomposition of a node as a function of the tensor operands alone."""

    def function(*tensors: torch.Tensor) -> Any:
        given = iter(tensors)

        def next_tensor(_: Value) -> torch.Tensor:
            return next(given)

        args = substitute(node.args, next_tensor)
        kwargs = {k: substitute(a, next_tensor) for k, a in node.kwargs.items()}
        out = decomposition(*args, **kwargs)
        if not isinstance(out, tuple):
            return out
        return tuple(map(_as_planned, out, node.results))  # some give a named tuple, which is no op

    return function


def _as_planned(made: torch.Tensor | None, value: Value | None) -> torch.Tensor | None:
    """A result in the dtype that the op gives: statistics of few bits are of many bits in a decomposition."""
    return made if made is None or value is None else made.to(value.type.dtype)
