"""Destinations of collectives: a buffer of the program, or the operand itself.

gather-into: gathers write into memory that is kept between steps::

    sent = all_gather_into_tensor(w, 2, ...)      memory = memory.empty([16, 6], float32)
                                             ->   sent = c10d.all_gather_into(w, 2, ..., out=memory)

Fresh memory is expensive where the system hands it out page by page: on CPUs. On other devices torch itself keeps
memory, which activations use as well: there gathers have no destinations, and stored parameters that are adjacent in
memory are sent without a copy.

in-place: a value that nothing else needs is reduced in its own memory::

    sent = c10d.all_reduce(mm, 'sum', ...)   ->   sent = c10d.all_reduce_(mm, 'sum', ...)

A functional collective allocates its result: reducing 64 MB between two processes takes three times as long so
(``python -m benchmarks.collectives``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from shardfx.ir.ops import memory_ops, pack
from shardfx.ir.ops.pools.pool_ops import computed_beside
from shardfx.ir.program.aliasing import Aliasing
from shardfx.ir.program.loops.loop_regions import regions, sibling_actions
from shardfx.ir.program.rank_program import RankProgram, planned_node

from .rank_pass import RankContext, RankPass, call_before

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


@dataclass(frozen=True)
class GatherInto(RankPass):
    """On a CPU gather into memory that the program asks for; adjacent stored parameters are not joined first."""

    name: ClassVar[str] = "gather-into"

    def run(self, program: RankProgram, context: RankContext) -> bool:
        changed = False
        nodes, in_host = list(program.graph.nodes), computed_beside(context.graph)
        share = Aliasing(nodes if any(node.target is pack.flatten for node in nodes) else ())
        for node in nodes:
            planned = planned_node(node)
            if planned is None or planned in in_host or not planned.operands:
                continue
            spreads = node.target is pack.unflatten and node.args[2:] != (1,) and len(node.all_input_nodes) == 1
            dtype, gathers = planned.operands[0].type.dtype, node.target is c10d.all_gather_into_tensor.default
            if node.target is pack.flatten and node.args[1] == 1 and _may_be_adjacent(node.args[0], share):
                node.target, node.args = memory_ops.adjoin, node.args[:1]
            elif context.device == "cpu" and gathers and "shape" in node.meta:
                memory = call_before(node, memory_ops.empty, list(node.meta["shape"]), dtype, context.device)
                node.target, node.kwargs = memory_ops.all_gather_into, {"out": memory}
            elif context.device == "cpu" and spreads:
                shapes: Any = node.args[1]
                numel = sum(torch.Size(shape).numel() for shape in shapes)
                memory = call_before(node, memory_ops.empty, [numel], dtype, context.device)
                node.target, node.args = memory_ops.spread, (memory, *node.args)
            else:
                continue
            changed = True
        return changed


def _may_be_adjacent(tensors: Any, share: Aliasing) -> bool:
    """Whether tensors may be adjacent: stored inputs, or parts of one buffer; not separately allocated ones."""
    return all(each.op == "placeholder" for each in tensors) or len({share.root(each) for each in tensors}) == 1


@dataclass(frozen=True)
class InPlace(RankPass):
    """Reduce in place, if the operand's memory is the program's own and this is its last use."""

    name: ClassVar[str] = "in-place"

    def run(self, program: RankProgram, context: RankContext) -> bool:
        nodes: list[fx.Node] = list(program.graph.nodes)
        share, inside, changed = Aliasing(nodes), regions(nodes), False
        for node in nodes:
            if node.target is not c10d.all_reduce.default:
                continue
            x: Any = node.args[0]
            if not share.owned(x) or not share.last_use(x, node) or share.sender(x, node) is not None:
                continue
            if sibling_actions(inside[share.root(x)], inside[node]) is not None:
                continue  # another unit of the iteration made it, and units may run in another order in each
            dense: Any = x
            if x.target is not memory_ops.join:  # which is dense
                with program.graph.inserting_before(node):
                    dense = program.graph.create_node("call_function", aten.contiguous.default, (x,), name="dense")
                dense.meta = dict(node.meta)
            node.target, node.args = memory_ops.all_reduce_, (dense, *node.args[1:])
            changed = True
        return changed
