"""Pointwise ops: one rule for all that carry ``torch.Tag.pointwise``; a table of the linear ones."""

from __future__ import annotations

import torch

from ..graph import Node
from ..rules import Dim, RuleEntry, ShardingRule, parse_linear, rule, tensor_slots

aten = torch.ops.aten

LINEAR = {
    "0": (
        aten.neg,
        aten.div,
        aten.mul,
        aten._to_copy,
        aten.clone,
        aten.alias,
        aten.native_dropout_backward,
        aten.threshold_backward,
        aten.gelu_backward,
        aten.silu_backward,
        aten.tanh_backward,
        aten.sigmoid_backward,
        aten.elu_backward,
        aten.leaky_relu_backward,
        aten.hardtanh_backward,
        aten.hardswish_backward,
        aten.hardsigmoid_backward,
        aten.mish_backward,
        aten.softplus_backward,
        aten.logit_backward,
    ),
    "0|1": (aten.mul.Tensor,),
    "0&1": (aten.add.Tensor, aten.sub.Tensor),
    "1&2": (aten.where.self,),
}
"""Which operands may be partial sums; an overload wins over its name. ``mul`` by a number is linear, by a
tensor in each of the two."""

_LINEAR = {op: parse_linear(text) for text, ops in LINEAR.items() for op in ops}


def pointwise(node: Node) -> ShardingRule:
    """Every dim of the result is a factor; an operand has those of its dims that are not broadcast."""
    out = node.outs[0].shape
    sizes = {f"d{i}": size for i, size in enumerate(out)}

    def dims(shape: tuple[int, ...]) -> tuple[Dim, ...]:
        lead = len(out) - len(shape)
        return tuple(() if s == 1 and out[lead + i] != 1 else (f"d{lead + i}",) for i, s in enumerate(shape))

    linear = _LINEAR.get(node.op)
    if linear is None:
        linear = _LINEAR.get(node.op.overloadpacket, ())
    slots = tensor_slots(node)
    if node.op is aten._to_copy.default and not _keeps_precision(node):
        linear = ()
    if node.op is aten.where.self and any(v is None for v in slots):
        linear = ()
    if len(node.operands) == 1 and node.op in (aten.add.Tensor, aten.sub.Tensor):
        linear = ()
    return ShardingRule(
        tuple(dims(v.shape) for v in node.operands),
        tuple(None if v is None else dims(v.shape) for v in node.results),
        sizes,
        linear=linear,
        transparent=True,
    )


def _keeps_precision(node: Node) -> bool:
    """A cast of partial sums to fewer bits would round before it adds: that is another result."""
    source, target = node.operands[0].type.dtype, node.outs[0].type.dtype
    return target.is_floating_point and torch.promote_types(source, target) == target


POINTWISE = rule((), pointwise)

RULES: tuple[RuleEntry, ...] = (
    rule(
        (
            aten.clone,
            aten._to_copy,
            aten.alias,
            aten.detach,
            aten.native_dropout_backward,
            aten.zeros_like,
            aten.ones_like,
            aten.full_like,
            aten.empty_like,
            aten.masked_fill,
        ),
        pointwise,
    ),
)
