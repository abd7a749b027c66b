"""Ops that make values: constants, ranges, random masks. Any dim of the result may be cut."""

from __future__ import annotations

from typing import Any

import torch

from shardfx.ir.graph import Node
from shardfx.ir.ops.dropout import dropout
from shardfx.ir.rules.book import RuleEntry, rule
from shardfx.ir.rules.local import Emit
from shardfx.ir.rules.sharding_rule import SAME, Dim, ShardingRule

from .pointwise import pointwise

aten = torch.ops.aten


def created(node: Node) -> ShardingRule:
    """The result's dims, however the operands lie (``new_zeros`` needs only the dtype of its operand)."""
    shape = node.outs[0].shape
    sizes = {f"d{i}": s for i, s in enumerate(shape)}
    operands = []
    for t, value in enumerate(node.operands):
        dims: list[Dim] = []
        for i, size in enumerate(value.shape):
            name = f"d{i}" if i < len(shape) and shape[i] == size else f"o{t}_{i}"
            sizes[name] = size
            dims.append((name,))
        operands.append(tuple(dims))
    result: tuple[Dim, ...] = tuple((f"d{i}",) for i in range(len(shape)))
    return ShardingRule(tuple(operands), (result,), sizes, reduce=SAME)


def whole_result(node: Node) -> ShardingRule:
    """The result depends on where in it one is, and is cheap: every rank makes all of it."""
    base = created(node)
    return ShardingRule(base.operands, base.results, base.sizes, frozenset(base.sizes), reduce=SAME)


def arange_local(emit: Emit) -> Any:
    op = emit.node.op
    args = emit.node.args
    first, step = 0, 1
    if op is aten.arange.start:
        first = args[0]
    elif op is aten.arange.start_step:
        first, step = args[0], args[2] if len(args) > 2 else 1
    start, length = emit.result_bounds(0, 0)
    if length == emit.node.outs[0].shape[0]:
        return emit.call(op, *emit.args, **emit.kwargs)
    low = first + start * step
    return emit.call(aten.arange.start_step, low, low + length * step, step, **emit.kwargs)


def new_empty_local(emit: Emit) -> Any:
    """The strides are those of the whole, and what is written there does not ask for them."""
    return emit.call(aten.new_empty.default, emit.args[0], list(emit.result_shape(0)), **emit.kwargs)


def dropout_local(emit: Emit) -> Any:
    """The mask is drawn by the box of the whole that the rank holds: replicas agree, shards differ."""
    x, p, seed, number, _ = emit.args
    box = [emit.result_bounds(0, d)[0] for d in range(len(emit.result_shape(0)))]
    return emit.call(dropout, x, p, seed, number, box)


def dropout_rule(node: Node) -> ShardingRule:
    base = pointwise(node)
    return ShardingRule((base.operands[0], ()), base.results, base.sizes, transparent=True)


RULES: tuple[RuleEntry, ...] = (
    rule((aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format), created, shape_arg=0),
    rule((aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty), created, shape_arg=1),
    rule(aten.new_empty_strided, created, local=new_empty_local),
    rule(aten.scalar_tensor, created),
    rule((aten.eye, aten.linspace, aten.logspace), whole_result),
    rule(aten.arange, created, local=arange_local),
    rule(dropout, dropout_rule, local=dropout_local),
)
