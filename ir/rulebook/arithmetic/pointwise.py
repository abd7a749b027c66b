"""Pointwise ops: one rule for all that carry ``torch.Tag.pointwise``, and a table of the linear ones; and ops that
create tensors."""

from __future__ import annotations

from typing import Any

import torch

from shardfx.ir.graph import Node
from shardfx.ir.ops.dropout import draw, dropout
from shardfx.ir.ops.traits import is_neutral
from shardfx.ir.rulebook.dims import argument, ops, words
from shardfx.ir.rules.book import RuleEntry, rule
from shardfx.ir.rules.local import Emit, box_of
from shardfx.ir.rules.sharding_rule import SAME
from shardfx.ir.rules.template import Template, template

aten = torch.ops.aten


LINEAR = {
    "0": """
        neg div.Tensor div.Scalar prims::div mul _to_copy to.dtype clone alias alias_copy detach lift_fresh
        real _conj _conj_physical deg2rad rad2deg polar native_dropout_backward threshold_backward
        gelu_backward silu_backward
        tanh_backward sigmoid_backward elu_backward leaky_relu_backward hardtanh_backward hardswish_backward
        hardsigmoid_backward mish_backward softplus_backward softshrink_backward
        hardshrink_backward _prelu_kernel_backward
        """,
    "0|1": "mul.Tensor",
    "0&1": "add.Tensor sub.Tensor rsub.Tensor complex lerp.Scalar lerp.Tensor addcdiv",
    "0&1|0&2": "addcmul",
    "0&2": "masked_fill.Tensor",
    "0>": "zeros_like ones_like full_like empty_like zero fill.Scalar",
    "0>|1": "copy fill.Tensor",
    "1": "where.ScalarSelf",
    "1&2": "where.self",
}
"""The operands that may be partial sums, by op; an overload takes precedence over its packet. ``mul`` by a number is
linear; by a tensor, in each of both. An op is left out if it multiplies by a number that may be infinite for finite
operands: ``xlogy`` by log(0), ``ldexp`` by 2 ** 5000, ``logit``'s gradient by 1 / 0, unless ``eps`` prevents it."""

_LINEAR = {op: text for text, names in LINEAR.items() for op in ops(names)}
_FORM = "d.., ... -> d.., ..."


def linear(node: Node) -> str:
    """The operands that may be partial sums; a few ops are linear for some values of their other arguments only."""
    op = node.op
    if is_neutral(op, node.args, node.kwargs):
        return "0"
    if op is aten.rrelu_with_noise_backward.default:  # a product with what was drawn, or by the sign of its operand
        return "0|2|1>" if argument(node, "training") else "0|2>"
    if op is aten.logit_backward.default and argument(node, "eps"):
        return "0"
    if op is aten.masked_fill.Scalar:
        return "0" if node.args[2] == 0 else ""
    if op is aten.where.ScalarSelf and node.args[1] != 0:
        return ""
    if op.overloadpacket in (aten.div, torch.ops.prims.div) and node.args[1] == 0:
        return ""
    return _LINEAR[op] if op in _LINEAR else _LINEAR.get(op.overloadpacket, "")


def pointwise(node: Node) -> Template:
    """Each dim of the result is a factor; an operand has those of its dims that are not broadcast."""
    return template(_FORM, linear(node), transparent=True)


POINTWISE = rule((), pointwise)

UNTAGGED = """
    alias_copy complex copy elu_backward fill floor_divide hardshrink_backward hardsigmoid_backward hardswish
    hardswish_backward hardtanh_backward leaky_relu_backward lift_fresh log_sigmoid mish_backward polar
    _prelu_kernel _prelu_kernel_backward real rrelu_with_noise_backward rsub softplus_backward
    softshrink_backward to.dtype where zero _conj prims::div
"""
"""Pointwise ops without torch's tag."""

LIKE = "clone _to_copy alias detach native_dropout_backward zeros_like ones_like full_like empty_like masked_fill"

# ---- ops that make values: constants, ranges, random masks; any dim of the result may be sharded ---------------------


def created(node: Node) -> str:
    """The dims of the result, whatever those of the operands (``new_zeros`` needs only the dtype of its operand)."""
    shape = node.outs[0].shape
    operands = []
    for t, value in enumerate(node.operands):
        same = (i < len(shape) and shape[i] == size for i, size in enumerate(value.shape))
        operands.append("~" + words(f"d{i}" if each else f"o{t}_{i}" for i, each in enumerate(same)))
    return f"{', '.join(operands)} -> {words(f'd{i}' for i in range(len(shape)))}"


def arange_local(emit: Emit) -> Any:
    """This rank's box of the full range, as the number of steps of a range of floats depends on rounding."""
    return box_of(emit, emit.call(emit.node.op, *emit.args, **emit.kwargs), [emit.result_shard(0, 0)])


def new_empty_local(emit: Emit) -> Any:
    """An empty tensor of the local shape; its strides do not matter."""
    return emit.call(aten.new_empty.default, emit.args[0], list(emit.result_shape(0)), **emit.kwargs)


def dropout_local(emit: Emit) -> Any:
    """Dropout by this rank's box of the full tensor's mask: replicas agree, shards differ."""
    x, p, seed, number, _ = emit.args
    box = [emit.result_shard(0, d).first for d in range(len(emit.result_shape(0)))]
    return emit.call(dropout, x, p, seed, number, box)


MADE = rule((), "-> d..!", reduce=SAME)
"""The rule of ops without tensor operands that have no other rule (``tril_indices``, ``hann_window``): the values
depend on the position and are cheap, so each rank computes the full result, and takes its shard."""

RULES: tuple[RuleEntry, ...] = (
    rule(ops(f"{LIKE} {UNTAGGED}"), pointwise),
    rule(
        (aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format),
        "-> d..",
        reduce=SAME,
        shape_arg=0,
    ),
    rule(
        (aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty), created, linear="0>", reduce=SAME, shape_arg=1
    ),
    rule(aten.new_empty_strided, created, linear="0>", reduce=SAME, local=new_empty_local),
    rule(aten.scalar_tensor, "->", reduce=SAME),
    rule((aten.eye, aten.linspace, aten.logspace), "~, ... -> d..!", reduce=SAME),
    rule(aten.arange, "-> d", reduce=SAME, local=arange_local),
    rule(draw, "d.. -> d.."),
    rule(dropout, "d.., -> d..", transparent=True, local=dropout_local),
)
