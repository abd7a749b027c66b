"""attention-layout: queries and keys of fused attention lie as projections give them, all heads of a row together.

    q = aten.cat([a, b], 3)                     q = aten.cat([a, b], 3)
    out, rows = attention(q, k, v)              transposed = aten.transpose(q, 1, 2)
    y = aten.reshape(out.transpose(1, 2), ...)  dense = aten.clone(transposed, ...)
                                          ->    laid = aten.transpose(dense, 1, 2)
                                                out, rows = attention(laid, k, v)
                                                y = aten.reshape(out.transpose(1, 2), ...)

For programs that a compiler fuses: an elementwise kernel (rotary positions) stores its result in either layout. The
output is laid as the queries are, so that the reshape in front of the next projection copies nothing, and the backward
keeps one tensor instead of two; its gradient comes in that layout, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from shardfx.ir.cost.fusion import is_elementwise
from shardfx.ir.cost.replay import values
from shardfx.ir.ops.pack import dense_last
from shardfx.ir.program.rank_program import RankProgram

from .rank_pass import RankContext, RankPass

aten = torch.ops.aten
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
ATTENTION = torch.ops.shardfx.attention.default
BACKWARD = torch.ops.shardfx.attention_backward.default
OPERANDS = {ATTENTION: (0, 1), BACKWARD: (1, 2)}
"""Where a call has its queries and keys."""
TRANSPOSED: Call = (aten.transpose.int, (1, 2), {})
DENSE: Call = (aten.clone.default, (), {"memory_format": torch.contiguous_format})


@dataclass(frozen=True)
class AttentionLayout(RankPass):
    """Store queries and keys of fused attention, where they are elementwise results, row by row."""

    name: ClassVar[str] = "attention-layout"

    def run(self, program: RankProgram, context: RankContext) -> bool:
        """Insert a copy behind each such result, which the compiler makes a part of its kernel."""
        taken = [
            (call, given)
            for call in program.graph.nodes
            for at in OPERANDS.get(call.target, ())
            if isinstance(given := call.args[at], fx.Node) and is_elementwise(_dense(given))
        ]
        lies, laid = values(program) if taken else {}, dict[fx.Node, fx.Node]()
        for call, given in taken:
            if not _in_rows(lies[given.name]):
                value = _dense(given)
                if value not in laid:
                    laid[value] = _in_rows_copy(program.graph, given)
                call.replace_input_with(given, laid[value])
                if not given.users:
                    program.graph.erase_node(given)
        return bool(laid)


def _dense(node: fx.Node) -> fx.Node:
    """The value that is given to kernels with a dense last dim."""
    source = node.args[0] if node.target is dense_last else node
    assert isinstance(source, fx.Node)
    return source


def _in_rows(x: torch.Tensor) -> bool:
    return x.dim() != 4 or x.transpose(1, 2).is_contiguous()


def _in_rows_copy(graph: fx.Graph, given: fx.Node) -> fx.Node:
    """The value of ``given`` [batch, heads, rows, head], in memory by rows."""
    made = given
    with graph.inserting_after(given):
        for op, args, kwargs in (TRANSPOSED, DENSE, TRANSPOSED):
            behind = graph.call_function(op, (made, *args), kwargs)
            behind.meta = {key: value for key, value in given.meta.items() if key == "shardfx"}
            made.append(behind)
            made = behind
    return made
