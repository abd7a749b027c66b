"""add-into: what an iteration adds to a sum is computed into it.

    grad = aten.mm(t, x)                            sum = loop.addmm(total, t, x)
    sum = loop.add(total, grad)               ->

A weight's gradient is then never there twice, and is gone through once an iteration in place of three times. The
gradient of a table (``aten.embedding_dense_backward``) is added row by row: only rows that were looked up are touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from shardfx.ir.graph import Node
from shardfx.ir.ops import memory_ops
from shardfx.ir.ops.local_ops import ADDING
from shardfx.ir.ops.loop import loop_ops
from shardfx.ir.program.loops.loop_regions import regions
from shardfx.ir.program.rank_program import RankProgram

from .rank_pass import RankContext, RankPass


@dataclass(frozen=True)
class AddInto(RankPass):
    """MixedPrecision what is used for nothing but a sum over turns into that sum."""

    name: ClassVar[str] = "add-into"

    def run(self, program: RankProgram, context: RankContext) -> bool:
        """Do so where the sum has the dtype and the shape of what is added."""
        inside, changed = regions(program.graph.nodes), False
        for node in list(program.graph.nodes):
            if node.target is not loop_ops.add:
                continue
            args: Any = node.args
            total, x = args
            whole = inside[x] == inside[node] and list(x.users) == [node]
            if whole and x.target in ADDING and not x.kwargs and _alike(x, node) and _fits(x, total):
                node.target, node.args = ADDING[x.target], (total, *x.args)
                program.graph.erase_node(x)
                changed = True
        return changed


def _alike(x: fx.Node, node: fx.Node) -> bool:
    """Whether what is added has the type of the sum, so that it is neither cast nor seen otherwise."""
    made, to = x.meta.get("shardfx"), node.meta.get("shardfx")
    if not isinstance(made, Node) or not isinstance(to, Node):
        return False
    return len(made.outs) == 1 and [*made.outs] == [*to.operands] and made.outs[0].type == to.outs[0].type


def _fits(x: fx.Node, total: fx.Node) -> bool:
    """Whether a sum lies as its rows do: a table's in one piece, of a gradient that is no mean by frequency."""
    if ADDING[x.target] is not loop_ops.index_add:
        return True
    if total.target is memory_ops.part and total.args[1] != 1:
        return False
    return x.args[4] is False
