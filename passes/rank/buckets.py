"""buckets: gradients are computed into the bucket in which they are reduced, and sums into their accumulator.

buckets: what is reduced together is computed in the memory where it is reduced::

    grad = aten.mm(t, x)                            flat = memory.empty([48], float32)
    flat = pack.flatten([grad], 1)            ->    part = memory.part(flat, 1, 0, [8, 6])
    sent = c10d.all_reduce(flat, 'sum', ...)        grad = aten.mm.out(t, x, out=part)
                                                    full = memory.join(flat, [grad], 1)
                                                    sent = c10d.all_reduce(full, 'sum', ...)

A matrix product that is used for nothing else is computed into the bucket, anything else is written there when it is
made, so that its own memory is freed at once. DistributedDataParallel's gradients are views of buckets likewise.

add-into: what an iteration of a loop adds to a sum is computed into it::

    grad = aten.mm(t, x)                      ->    sum = loop.addmm(total, t, x)
    sum = loop.add(total, grad)

A weight's gradient then never exists twice, and is read once an iteration in place of three times. The gradient of a
table (``aten.embedding_dense_backward``) is added row by row: only rows that were looked up are touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from shardfx.ir.graph import Value
from shardfx.ir.ops import memory_ops, pack
from shardfx.ir.ops.local_ops import ADDING
from shardfx.ir.ops.loop import loop_ops
from shardfx.ir.ops.pools.pool_ops import computed_beside
from shardfx.ir.program.aliasing import destination
from shardfx.ir.program.loops.loop_nest import loop_axes
from shardfx.ir.program.loops.loop_regions import regions
from shardfx.ir.program.rank_program import RankProgram, planned_node

from .rank_pass import RankContext, RankPass, call_after, call_before

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
REDUCTIONS = (c10d.all_reduce.default, c10d.reduce_scatter_tensor.default)


@dataclass(frozen=True)
class Buckets(RankPass):
    """Compute gradients into the bucket in which they are reduced together."""

    name: ClassVar[str] = "buckets"

    def run(self, program: RankProgram, context: RankContext) -> bool:
        changed = False
        nodes = list(program.graph.nodes)
        inside, in_host = regions(nodes), computed_beside(context.graph)
        order = {node: place for place, node in enumerate(nodes)}
        for node in nodes:
            planned = planned_node(node)
            if node.target is not pack.flatten or len(node.users) != 1 or planned is None or planned in in_host:
                continue
            tensors, shards = node.args
            if next(iter(node.users)).target not in REDUCTIONS or len(set(tensors)) != len(tensors):
                continue
            sums = [_is_sum(each, node) for each in tensors]
            apart = any(inside[each] != inside[node] for each in tensors)
            shapes = [shape for v in planned.operands if (shape := _shape(v, program)) is not None]
            if any(sums) != all(sums) or (apart and not all(sums)) or len(shapes) != len(tensors):
                continue
            if all(each.op != "placeholder" for each in tensors):
                first = min((_allocated(each) for each in tensors), key=order.__getitem__)
                _bucket(node, first, shapes, shards, planned.operands[0].type.dtype, context.device)
                changed = True
        return changed


def _shape(value: Value, program: RankProgram) -> tuple[int, ...] | None:
    """The local shape of a value, the same in each iteration; None if iterations have shards of several shapes."""
    spec, mesh = value.spec, program.mesh
    if spec is None:
        return None
    over = [axis for axis in loop_axes(mesh) if axis in spec.axes]
    coords = {**dict.fromkeys(loop_axes(mesh), 0), **mesh.coords(program.rank)}
    shapes = {spec.local_shape(value.shape, mesh, at) for at in mesh.along(coords, over)}
    return shapes.pop() if len(shapes) == 1 else None


def _allocated(tensor: fx.Node) -> fx.Node:
    """The call that allocates the memory of a tensor: of a sum over iterations, in front of them."""
    into = destination(tensor) if tensor.target is loop_ops.add else None
    return tensor if into is None else into


def _is_sum(tensor: fx.Node, flat: fx.Node) -> bool:
    """Whether a tensor is a sum over iterations, in its own memory, and used for nothing but ``flat``."""
    into = _allocated(tensor)
    return into is not tensor and into.target is memory_ops.filled and list(tensor.users) == [flat]


def _bucket(
    flat: fx.Node, first: fx.Node, shapes: Sequence[tuple[int, ...]], shards: int, dtype: torch.dtype, device: str
) -> None:
    """Replace a concatenation by a buffer; ``first`` is the allocation of its first tensor."""
    graph, tensors = flat.graph, list[fx.Node](flat.args[0])  # type: ignore[arg-type]
    sizes = [torch.Size(shape).numel() // shards for shape in shapes]
    numel, sums = sum(sizes) * shards, _allocated(tensors[0]) is not tensors[0]
    if sums:
        memory = call_before(first, memory_ops.filled, [numel], 0.0, dtype, device, like=flat)
    else:
        memory = call_before(first, memory_ops.empty, [numel], dtype, device, like=flat)
    written, at = [], 0
    for tensor, shape, size in zip(tensors, shapes, sizes, strict=True):
        arguments = (memory_ops.part, memory, shards, at, list(shape))
        if sums:
            filled, into = _allocated(tensor), tensor
            filled.replace_all_uses_with(call_before(filled, *arguments, like=flat))
            graph.erase_node(filled)
        elif tensor.target is aten.mm.default and list(tensor.users) == [flat]:
            part = call_before(tensor, *arguments, like=flat)
            if shards == 1:
                into = call_before(tensor, aten.mm.out, *tensor.args, out=part)
            else:
                into = call_before(tensor, memory_ops.mm_shards, *tensor.args, part)
            into.meta = dict(tensor.meta)
            tensor.replace_all_uses_with(into)
            graph.erase_node(tensor)
        else:
            part = call_after(tensor, *arguments)
            into = call_after(part, memory_ops.write, part, tensor)
            part.meta, into.meta = ({"shardfx": flat.meta["shardfx"]} for _ in range(2))
        written.append(into)
        at += size
    joined = call_before(flat, memory_ops.join, memory, written, shards)
    joined.meta["shape"] = (numel,)
    flat.replace_all_uses_with(joined)
    graph.erase_node(flat)


@dataclass(frozen=True)
class AddInto(RankPass):
    """Compute addends of a sum over iterations directly into that sum."""

    name: ClassVar[str] = "add-into"

    def run(self, program: RankProgram, context: RankContext) -> bool:
        inside, changed = regions(program.graph.nodes), False
        for node in list(program.graph.nodes):
            if node.target is not loop_ops.add:
                continue
            args: Any = node.args
            total, x = args
            alone = inside[x] == inside[node] and list(x.users) == [node]
            if alone and x.target in ADDING and not x.kwargs and _is_alike(x, node) and _fits(x, total):
                node.target, node.args = ADDING[x.target], (total, *x.args)
                program.graph.erase_node(x)
                changed = True
        return changed


def _is_alike(x: fx.Node, node: fx.Node) -> bool:
    """Whether the addend has the type of the sum, so that no cast or view is needed."""
    made, to = planned_node(x), planned_node(node)
    if made is None or to is None:
        return False
    return len(made.outs) == 1 and [*made.outs] == [*to.operands] and made.outs[0].type == to.outs[0].type


def _fits(x: fx.Node, total: fx.Node) -> bool:
    """Whether the sum's layout fits: contiguous rows for a table, whose gradient is no mean by frequency."""
    if ADDING[x.target] is not loop_ops.index_add:
        return True
    return (total.target is not memory_ops.part or total.args[1:2] == (1,)) and x.args[4] is False
