"""buckets: what is reduced together is computed where it is reduced.

    grad = aten.mm(t, x)                            flat = memory.empty([48], float32)
    flat = pack.flatten([grad], 1)            ->    part = memory.part(flat, 1, 0, [8, 6])
    sent = c10d.all_reduce(flat, 'sum', ...)        grad = aten.mm.out(t, x, out=part)
                                                    full = memory.join(flat, [grad], 1)
                                                    sent = c10d.all_reduce(full, 'sum', ...)

A matrix product that is used for nothing else is computed into the bucket, anything else is written there when it is
made, so that its own memory is let go at once. DistributedDataParallel's gradients are views of buckets likewise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from shardfx.ir.graph import Node, Value
from shardfx.ir.ops import memory_ops, pack
from shardfx.ir.ops.loop import loop_ops
from shardfx.ir.ops.pools.pool_ops import computed_beside
from shardfx.ir.program.aliasing import destination
from shardfx.ir.program.loops.loop_nest import loop_axes
from shardfx.ir.program.loops.loop_regions import regions
from shardfx.ir.program.rank_program import RankProgram

from .rank_pass import RankContext, RankPass

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
REDUCTIONS = (c10d.all_reduce.default, c10d.reduce_scatter_tensor.default)


@dataclass(frozen=True)
class Buckets(RankPass):
    """MixedPrecision what is reduced together into one memory."""

    name: ClassVar[str] = "buckets"

    def run(self, program: RankProgram, context: RankContext) -> bool:
        """Make the buckets."""
        changed = False
        nodes = list(program.graph.nodes)
        inside, beside = regions(nodes), computed_beside(context.graph)
        order = {node: place for place, node in enumerate(nodes)}
        for node in nodes:
            made = node.meta.get("shardfx")
            if node.target is not pack.flatten or len(node.users) != 1 or not isinstance(made, Node) or made in beside:
                continue
            if next(iter(node.users)).target not in REDUCTIONS:
                continue
            tensors, pieces = node.args
            if len(set(tensors)) != len(tensors) or any(each.op == "placeholder" for each in tensors):
                continue
            collected = [_collected(each, node) for each in tensors]
            if any(collected) != all(collected) or any(
                inside[each] != inside[node] for each in tensors if not all(collected)
            ):
                continue
            shapes = [shape for v in made.operands if (shape := _shape(v, program)) is not None]
            if len(shapes) != len(tensors):
                continue
            first = min((_made(each) for each in tensors), key=order.__getitem__)
            _bucket(program.graph, node, tensors, first, shapes, pieces, made.operands[0].type.dtype, context.device)
            changed = True
        return changed


def _shape(value: Value, program: RankProgram) -> tuple[int, ...] | None:
    """What a rank holds of a value, in each iteration; None where iterations have unequal parts."""
    spec, mesh = value.spec, program.mesh
    over = [axis for axis in loop_axes(mesh) if spec is not None and axis in spec.axes]
    coords = {**dict.fromkeys(loop_axes(mesh), 0), **mesh.coords(program.rank)}
    held = {spec.local_shape(value.shape, mesh, at) for at in mesh.along(coords, over)} if spec is not None else set()
    return held.pop() if len(held) == 1 else None


def _made(tensor: fx.Node) -> fx.Node:
    """Where the memory of a tensor is made: that of a sum over iterations is there before them."""
    into = destination(tensor) if tensor.target is loop_ops.add else None
    return tensor if into is None else into


def _collected(tensor: fx.Node, flat: fx.Node) -> bool:
    """Whether a tensor is a sum over iterations, in memory of its own, that is used for nothing but ``flat``."""
    into = _made(tensor)
    return into is not tensor and into.target is memory_ops.filled and list(tensor.users) == [flat]


def _bucket(
    graph: fx.Graph,
    flat: fx.Node,
    tensors: Sequence[fx.Node],
    first: fx.Node,
    shapes: Sequence[tuple[int, ...]],
    pieces: int,
    dtype: torch.dtype,
    device: str,
) -> None:
    """Put memory in place of a concatenation; ``first`` is the first of the tensors to be made."""
    sizes = [torch.Size(shape).numel() // pieces for shape in shapes]

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = graph.call_function(target, args, kwargs)
        made.meta["shardfx"] = flat.meta["shardfx"]
        return made

    collected = _made(tensors[0]) is not tensors[0]
    with graph.inserting_before(first):
        if collected:
            memory = call(memory_ops.filled, [sum(sizes) * pieces], 0.0, dtype, device)
        else:
            memory = call(memory_ops.empty, [sum(sizes) * pieces], dtype, device)
    written, at = [], 0
    for tensor, shape, size in zip(tensors, shapes, sizes, strict=True):
        if collected:
            filled = _made(tensor)
            with graph.inserting_before(filled):
                part = call(memory_ops.part, memory, pieces, at, list(shape))
            filled.replace_all_uses_with(part)
            graph.erase_node(filled)
            into = tensor
        elif tensor.target is aten.mm.default and list(tensor.users) == [flat]:
            with graph.inserting_before(tensor):
                part = call(memory_ops.part, memory, pieces, at, list(shape))
                a, b = tensor.args
                if pieces == 1:
                    into = graph.call_function(aten.mm.out, (a, b), {"out": part})
                else:
                    into = graph.call_function(memory_ops.mm_pieces, (a, b, part))
            into.meta = dict(tensor.meta)
            tensor.replace_all_uses_with(into)
            graph.erase_node(tensor)
        else:
            with graph.inserting_after(tensor):
                part = call(memory_ops.part, memory, pieces, at, list(shape))
            with graph.inserting_after(part):
                into = call(memory_ops.write, part, tensor)
        written.append(into)
        at += size
    with graph.inserting_before(flat):
        joined = call(memory_ops.join, memory, written, pieces)
        joined.meta["shape"] = (sum(sizes) * pieces,)
    flat.replace_all_uses_with(joined)
    graph.erase_node(flat)
