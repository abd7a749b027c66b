"""Passes for programs that ``torch.compile`` runs, whose memory Inductor plans.

attention-layout: queries and keys of fused attention are stored as projections give them, all heads of a row together::

    q = aten.cat([a, b], 3)                     q = aten.cat([a, b], 3)
    out, rows = attention(q, k, v)              transposed = aten.transpose(q, 1, 2)
    y = aten.reshape(out.transpose(1, 2), ...)  dense = aten.clone(transposed, ...)
                                          ->    laid = aten.transpose(dense, 1, 2)
                                                out, rows = attention(laid, k, v)
                                                y = aten.reshape(out.transpose(1, 2), ...)

An elementwise kernel (rotary positions) stores its result in either layout. The output is laid out as the queries are,
so that the reshape before the next projection copies nothing, and the backward keeps one tensor instead of two.

materialize-scalars: 0-d values of an optimizer's step are computed once, not in every element of its kernels::

    correction = aten.rsub(pow, 1)              correction = aten.rsub(pow, 1)
    new = aten.div(v, correction)         ->    scalar = memory.materialize(correction)
                                                new = aten.div(v, scalar)

Inductor computes a 0-d value within each kernel that takes it, for every element: the two powers in float64 of Adam's
bias corrections took as long as the memory traffic of the update.

write-back: new contents of parameters, optimizer states and buffers are written into the inputs of their names::

    add = aten.add(w, step)                     add = aten.add(w, step)
    return (loss, add)                    ->    write = memory.write(w, add)
                                                return (loss, write)

Inductor fuses the write with what computes the value, so that a step has no second copy of its parameters and states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from shardfx.ir.cost.fusion import is_elementwise
from shardfx.ir.cost.replay import values
from shardfx.ir.graph import OutputKind
from shardfx.ir.ops import memory_ops
from shardfx.ir.ops.memory_ops import materialize
from shardfx.ir.ops.pack import dense_last
from shardfx.ir.program.aliasing import Aliasing
from shardfx.ir.program.rank_program import RankProgram, planned_node

from .rank_pass import RankContext, RankPass, call_after, call_before, is_update

aten = torch.ops.aten
QUERIES_AND_KEYS = {
    torch.ops.shardfx.attention.default: (0, 1),
    torch.ops.shardfx.attention_backward.default: (1, 2),
}
"""The indices of queries and keys among the arguments, by op."""


@dataclass(frozen=True)
class AttentionLayout(RankPass):
    """Store queries and keys of fused attention, where they are elementwise results, row by row."""

    name: ClassVar[str] = "attention-layout"

    def run(self, program: RankProgram, context: RankContext) -> bool:
        taken = [
            (call, operand)
            for call in program.graph.nodes
            for at in QUERIES_AND_KEYS.get(call.target, ())
            if isinstance(operand := call.args[at], fx.Node) and is_elementwise(_dense(operand))
        ]
        known, copies = values(program) if taken else {}, dict[fx.Node, fx.Node]()
        for call, operand in taken:
            x = known[operand.name]
            if x.dim() == 4 and not x.transpose(1, 2).is_contiguous():
                value = _dense(operand)
                if value not in copies:
                    transposed = call_after(operand, aten.transpose.int, operand, 1, 2)
                    dense = call_after(
                        transposed, aten.clone.default, transposed, memory_format=torch.contiguous_format
                    )
                    copies[value] = call_after(dense, aten.transpose.int, dense, 1, 2)
                call.replace_input_with(operand, copies[value])
                if not operand.users:
                    program.graph.erase_node(operand)
        return bool(copies)


def _dense(node: fx.Node) -> fx.Node:
    """The operand in the dense layout that kernels get."""
    source = node.args[0] if node.target is dense_last else node
    assert isinstance(source, fx.Node)
    return source


@dataclass(frozen=True)
class MaterializeScalars(RankPass):
    """Materialize 0-d pointwise results of the update that tensors of more dims use."""

    name: ClassVar[str] = "materialize-scalars"

    def run(self, program: RankProgram, context: RankContext) -> bool:
        changed = False
        for node in list(program.graph.nodes):
            if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.pointwise not in node.target.tags:
                continue
            takers = [user for user in node.users if planned_node(user) is not None and not _is_scalar(user)]
            if takers and _is_scalar(node):
                scalar = call_after(node, materialize, node)
                for user in takers:
                    user.replace_input_with(node, scalar)
                changed = True
        return changed


def _is_scalar(node: fx.Node) -> bool:
    """Whether a call belongs to an optimizer's step and returns a 0-d tensor."""
    planned = planned_node(node)
    return planned is not None and is_update(node) and len(planned.outs) == 1 and planned.outs[0].type.ndim == 0


@dataclass(frozen=True)
class WriteBack(RankPass):
    """Write new contents, which the program made, into the inputs of their names, behind the last use of the old ones.

    Where a guard is watched, nothing that is stored may change before it was looked at: then nothing is done.
    """

    name: ClassVar[str] = "write-back"

    def run(self, program: RankProgram, context: RankContext) -> bool:
        if any(output.guard is not None or output.kind is OutputKind.OVERFLOW for output in program.outputs):
            return False
        share, end = Aliasing(program.graph.nodes), program.result()
        pairs = zip(program.graph.find_nodes(op="placeholder"), program.inputs, strict=True)
        places = {each.name: node for node, each in pairs if not each.pool}
        results: list[Any] = list(end.args[0])  # type: ignore[arg-type]
        changed = False
        for i, (output, result) in enumerate(zip(program.outputs, results, strict=True)):
            place = places.get(output.name) if output.kind.is_kept else None
            if place is None or not isinstance(result, fx.Node) or not share.owned(result):
                continue
            if not share.last_use(place, result) or share.sender(place, result) is not None:
                results[i] = call_before(end, memory_ops.write, place, result, like=result)
            else:
                results[i] = call_after(result, memory_ops.write, place, result)
            changed = True
        end.args = (tuple(results),)
        return changed
