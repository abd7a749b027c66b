"""Pointwise ops: one rule for all that carry ``torch.Tag.pointwise``; a table of the linear ones."""

from __future__ import annotations

import torch

from shardfx.ir.graph import Node
from shardfx.ir.rules.book import RuleEntry, rule
from shardfx.ir.rules.sharding_rule import Dim, ShardingRule
from shardfx.ir.rules.template import parse_linear, tensor_slots

aten = torch.ops.aten
prims = torch.ops.prims


LINEAR = {
    "0": (
        aten.neg,
        aten.div.Tensor,
        aten.div.Scalar,
        prims.div,
        aten.mul,
        aten._to_copy,
        aten.to.dtype,
        aten.clone,
        aten.alias,
        aten.alias_copy,
        aten.detach,
        aten.lift_fresh,
        aten.real,
        aten._conj,
        aten._conj_physical,
        aten.deg2rad,
        aten.rad2deg,
        aten.ldexp.Tensor,
        aten.xlogy.Tensor,
        aten.xlogy.Scalar_Other,
        aten.special_xlog1py.default,
        aten.polar,
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
        aten.softshrink_backward,
        aten.hardshrink_backward,
        aten._prelu_kernel_backward,
        aten.rrelu_with_noise_backward,
    ),
    "0|1": (aten.mul.Tensor,),
    "0&1": (
        aten.add.Tensor,
        aten.sub.Tensor,
        aten.rsub.Tensor,
        aten.complex,
        aten.lerp.Scalar,
        aten.lerp.Tensor,
        aten.addcdiv,
    ),
    "0&1|0&2": (aten.addcmul,),
    "0&2": (aten.masked_fill.Tensor,),
    "1": (aten.where.ScalarSelf,),
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
    if node.op in (aten._to_copy.default, aten.to.dtype) and not _keeps_precision(node):
        linear = ()
    if node.op is aten.masked_fill.Scalar and node.args[2] == 0:
        linear = parse_linear("0")
    if node.op is aten.where.ScalarSelf and node.args[1] != 0:
        linear = ()
    if node.op is aten.where.self and any(v is None for v in slots):
        linear = ()
    if len(node.operands) == 1 and node.op in (aten.add.Tensor, aten.sub.Tensor, aten.rsub.Tensor):
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

UNTAGGED = (
    aten.alias_copy,
    aten.complex,
    aten.elu_backward,
    aten.fill,
    aten.floor_divide,
    aten.hardshrink_backward,
    aten.hardsigmoid_backward,
    aten.hardswish,
    aten.hardswish_backward,
    aten.hardtanh_backward,
    aten.leaky_relu_backward,
    aten.lift_fresh,
    aten.log_sigmoid,
    aten.mish_backward,
    aten.polar,
    aten._prelu_kernel,
    aten._prelu_kernel_backward,
    aten.real,
    aten.rrelu_with_noise_backward,
    aten.rsub,
    aten.softplus_backward,
    aten.softshrink_backward,
    aten.to.dtype,
    aten.where,
    aten.zero,
    aten._conj,
    prims.div,
)
"""Pointwise ops to which torch gives no tag."""

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
            *UNTAGGED,
        ),
        pointwise,
    ),
)
