"""Taking an op apart where a cut that is wanted stands in its way.

A softmax whose dim is cut, a bias inside a product whose sum is cut, a batch norm over a cut batch: the fused op
cannot do it, its decomposition can, with small reductions inside. The op is replaced only where that happens, so
that elsewhere the fused kernel stays.

    %3 = aten._log_softmax(%2{tp on dim 1})  ->  amax, sub, exp, sum, log, sub, with two all-reduces of a column
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.fx.experimental.proxy_tensor import make_fx

from shardfx.ir.builder import GraphBuilder
from shardfx.ir.capture.canonical import convert_call
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Node, Value, op_name, substitute
from shardfx.ir.ops.alike import structure
from shardfx.ir.rewriter import Rewriter
from shardfx.ir.rules.book import RuleBook


class Expander:
    """Replaces nodes by their decompositions; each distinct one is traced once."""

    def __init__(self, book: RuleBook) -> None:
        self._book = book
        self._traced: dict[object, torch.fx.GraphModule] = {}
        self._final: set[Node] = set()

    def can(self, node: Node) -> bool:
        """Whether there is a decomposition, and the node is not already what is left of one."""
        if node in self._final:
            return False
        entry = self._book.entry(node.op)
        return entry is not None and bool(entry.expand)

    def apply(self, graph: Graph, nodes: list[Node]) -> list[tuple[Value, Value]]:
        """Replace the nodes; gives each result that went with the one that stands for it."""
        rewriter = Rewriter(graph)
        swapped = [pair for node in nodes for pair in self._replace(graph, node, rewriter)]
        rewriter.apply()
        return swapped

    def _replace(self, graph: Graph, node: Node, rewriter: Rewriter) -> list[tuple[Value, Value]]:
        traced = self._trace(node)
        builder = GraphBuilder(graph.mesh)
        builder.where, builder.phase = node.where, node.phase
        values = iter(node.operands)
        env = builder.env
        results: Any = None
        for each in traced.graph.nodes:
            if each.op == "placeholder":
                env[each] = next(values)
            elif each.op == "call_function":
                env[each] = convert_call(builder, each)
            elif each.op == "get_attr":
                raise Error(f"the decomposition of {op_name(node.op)} holds a constant", where=str(node.where))
            else:
                results = torch.fx.map_arg(each.args[0], env.__getitem__)
        for made in builder.graph.nodes:
            made.why = f"part of {op_name(node.op)}, taken apart because a cut stands in its way"
            rewriter.before(node, made)
            if made.op is node.op:
                self._final.add(made)
        given = results if isinstance(results, (list, tuple)) else [results]
        swapped = [(o, n) for o, n in zip(node.results, given, strict=False) if o is not None and n is not None]
        for old, new in swapped:
            rewriter.replace(old, new)
        rewriter.erase(node)
        return swapped

    def _trace(self, node: Node) -> torch.fx.GraphModule:
        key = structure(node)
        if key not in self._traced:
            fake = [torch.empty(v.shape, dtype=v.type.dtype, device="meta") for v in node.operands]
            self._traced[key] = make_fx(self._function(node), tracing_mode="real")(*fake)
        return self._traced[key]

    def _function(self, node: Node) -> Callable[..., Any]:
        """The decomposition as a function of the tensor operands alone."""
        entry = self._book.entry(node.op)
        assert entry is not None and entry.expand
        decomposition = entry.expand if callable(entry.expand) else decomposition_table[node.op]

        def function(*tensors: torch.Tensor) -> Any:
            given = iter(tensors)

            def next_tensor(_: Value) -> torch.Tensor:
                return next(given)

            args = substitute(node.args, next_tensor)
            kwargs = {k: substitute(a, next_tensor) for k, a in node.kwargs.items()}
            out = decomposition(*args, **kwargs)
            return tuple(out) if isinstance(out, tuple) else out  # some give a named tuple, which is no op

        return function
