"""in-place: a value that nothing else needs is reduced where it lies.

    mm = aten.mm(x, w)                             mm = aten.mm(x, w)
    sent = c10d.all_reduce(mm, 'sum', ...)    ->   sent = c10d.all_reduce_(mm, 'sum', ...)

A functional collective makes its result anew: reducing 64 MB between two processes takes three times as long so as in
place (``python -m benchmarks.collectives``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from shardfx.ir.ops import memory_ops
from shardfx.ir.program.aliasing import Aliasing
from shardfx.ir.program.loops.loop_regions import regions, sibling_actions
from shardfx.ir.program.rank_program import RankProgram

from .rank_pass import RankContext, RankPass

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


@dataclass(frozen=True)
class InPlace(RankPass):
    """Reduce over the operand where its memory is the program's own and this is its last use."""

    name: ClassVar[str] = "in-place"

    def run(self, program: RankProgram, context: RankContext) -> bool:
        """Reduce in place."""
        graph, changed = program.graph, False
        share = Aliasing(graph.nodes)
        nodes: list[fx.Node] = list(graph.nodes)
        inside = regions(nodes)
        for node in nodes:
            if node.target is not c10d.all_reduce.default:
                continue
            args: Any = node.args
            x, *rest = args
            if not share.owned(x) or not share.last_use(x, node) or share.sender(x, node) is not None:
                continue
            if sibling_actions(inside[share.root(x)], inside[node]) is not None:
                continue  # another action of its iteration made it, and the order may differ between iterations
            dense: Any = x
            if x.target is not memory_ops.join:  # which is dense
                with graph.inserting_before(node):
                    dense = graph.create_node("call_function", aten.contiguous.default, (x,), name="dense")
                dense.meta = dict(node.meta)
            node.target, node.args = memory_ops.all_reduce_, (dense, *rest)
            changed = True
        return changed
