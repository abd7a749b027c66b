"""A rank that has nothing of a factor which its op shares: what it gives then, without the op's kernel.

Of three rows on four ranks the last one has none. What it has of a result that has the rows is empty; its share of a
sum over them is zero, of a maximum what is lowest. So it follows from the rule, for every op.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from shardfx.ir.graph import Node, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.spec import Spec

from .local import Emit, gives_list
from .sharding_rule import SAME, ShardingRule

aten = torch.ops.aten


def may_lack(node: Node, mesh: Mesh) -> bool:
    """Whether some rank may have nothing of a tensor of a node."""
    made = node.strategy
    if made is None:
        return False
    pairs = (*zip(node.operands, made.operands, strict=False), *zip(node.outs, made.results, strict=False))
    return any(_may_lack(spec, value.shape, mesh) for value, spec in pairs if spec.axes)


def _may_lack(spec: Spec, shape: tuple[int, ...], mesh: Mesh) -> bool:
    return any(
        sharding.rows is not None or any(part.size < mesh.extent(part.axes) for part in sharding.sub(size))
        for sharding, size in zip(spec.dims, shape, strict=True)
        if sharding.axes and size > 0
    )


def results_of_empty_shard(rule: ShardingRule | None, emit: Emit) -> Any:
    """The call that gives a rank's results where it has nothing of a factor that is sharded; None where it has of all,
    or where a result is not what ranks' shares make of it."""
    lost = _lacking(rule, emit) if rule is not None else frozenset[str]()
    if rule is None or not lost or not emit.node.operands:
        return None
    shapes, values, dtypes = [], [], []
    for i, value in enumerate(emit.node.results):
        if value is None:
            shapes.append([0])
            values.append(0.0)
            dtypes.append(emit.node.outs[0].type.dtype)
            continue
        shape = list(emit.result_shape(emit.node.outs.index(value)))
        if 0 not in shape and (rule.reduce == SAME or any(i in rule.unread.get(f, ()) for f in lost)):
            return None
        shapes.append(shape)
        values.append(_neutral(rule.reduce, value.type.dtype))
        dtypes.append(value.type.dtype)
    like = _first_tensor(emit.node.args, emit.args)
    if len(shapes) == 1 and not gives_list(emit.node.op):
        return emit.call(aten.new_full.default, like, shapes[0], values[0], dtype=dtypes[0])
    flat, dims = [n for shape in shapes for n in shape], [len(shape) for shape in shapes]
    return emit.call(torch.ops.shardfx.no_share.default, like, flat, dims, dtypes, values)


def _first_tensor(args: Any, written: Any) -> Any:
    """What stands for the first operand among a node's arguments; None where none of these is one."""
    if isinstance(args, Value):
        return written
    pairs = zip(args, written, strict=True) if isinstance(args, (list, tuple)) else ()
    return next((found for each in pairs if (found := _first_tensor(*each)) is not None), None)


def _lacking(rule: ShardingRule, emit: Emit) -> frozenset[str]:
    """The factors that are sharded and of which the rank has nothing, by the tensors that have them."""
    node, found = emit.node, set[str]()
    assert node.strategy is not None
    shared = {factor for factor, axes in node.strategy.shardings if axes}
    made = [dims for dims in rule.results if dims is not None]
    for values, specs, tensors, shape in (
        (node.operands, node.strategy.operands, rule.operands, emit.operand_shape),
        (node.outs, node.strategy.results, made, emit.result_shape),
    ):
        for i, (value, spec, dims) in enumerate(zip(values, specs, tensors, strict=True)):
            if 0 in value.shape or not _may_lack(spec, value.shape, emit.mesh):
                continue
            for held, factors in zip(shape(i), dims, strict=True):
                if held == 0:
                    found.update(shared.intersection(factors))
    return frozenset(found)


def _neutral(kind: str, dtype: torch.dtype) -> float:
    """What adds nothing to a reduction."""
    if kind in ("max", "min") and dtype is not torch.bool:
        most = math.inf if dtype.is_floating_point else float(torch.iinfo(dtype).max)
        return -most if kind == "max" else most
    return float(kind in ("product", "min"))
