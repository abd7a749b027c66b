"""Losses that are kept as one op: elementwise ones (planning sees their decomposition), and those of class indices. If
the classes are sharded, each rank computes the rows whose class is in its shard."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from shardfx.ir.graph import Node
from shardfx.ir.rulebook.dims import argument, checked, ops, packed
from shardfx.ir.rules.book import RuleEntry, rule
from shardfx.ir.rules.local import Emit, mine
from shardfx.ir.rules.template import Template, template

aten = torch.ops.aten
EACH, MEAN = 0, 1
"""The values of the argument ``reduction``."""
WEIGHT = {aten.binary_cross_entropy.default: "2", aten.binary_cross_entropy_with_logits.default: "2"}
"""Losses that are linear in a weight."""


def loss(node: Node) -> Template:
    """An elementwise loss: ``x[d..], target[d..], ... -> each[d..]``, or the sum over all elements."""
    return template(f"d.., ... -> {'d..' if argument(node, 'reduction') == EACH else ''}", WEIGHT.get(node.op, ""))


def gradient(linear: str, node: Node) -> Template:
    """The gradient of an elementwise loss, from a grad per element or a scalar: ``grad, x[d..], target -> d..``."""
    grad = "d.." if argument(node, "reduction") == EACH else ""
    return template(f"{grad}, d.., ... -> d..", linear)


def share_of_mean(emit: Emit) -> Any:
    """A rank's term of a mean, or of the gradient of one: weighted by its share of the elements."""
    made, operands = emit.call(emit.node.op, *emit.args, **emit.kwargs), emit.node.operands
    local = math.prod(torch.broadcast_shapes(*(emit.operand_shape(i) for i in range(len(operands)))))
    full = math.prod(torch.broadcast_shapes(*(value.shape for value in operands)))
    if argument(emit.node, "reduction") != MEAN or local == full:
        return made
    return emit.call(aten.mul.Tensor, made, local / full)


# ---- of class indices ------------------------------------------------------------------------------------------


NOTHING = -100
"""The ignored index of a local loss: never a class in a rank's shard."""


def nll(node: Node) -> Template:
    """The *summed* negative log likelihood (capture makes the mean a quotient).

    ``x[n c s..], t[n s..], weight[c] -> sum, total weight``
    """
    ndim, each = node.operands[0].type.ndim, argument(node, "reduction") == 0
    mark = "!reduction=1"
    n, s = (f"n{mark}" if ndim > 1 else "", f"s..{mark}" if ndim > 2 else "")
    linear = "0>0" if argument(node, "reduction") == 1 else "0>0|2"
    return template(f"{n} c{mark} {s}, {n} {s}, c -> {f'{n} {s}' if each else ''}, ", linear)


def nll_backward(node: Node) -> Template:
    """The gradient of the negative log likelihood: row by row, for a fixed total weight."""
    ndim = node.operands[1].type.ndim
    n, s = ("n" if ndim > 1 else "", "s.." if ndim > 2 else "")
    grad = f"{n} {s}" if node.operands[0].shape else ""
    total = "" if argument(node, "reduction") == 1 else "|4>"
    return template(f"{grad}, {n} c {s}, {n} {s}, c, -> {n} c {s}", f"0|1>|3{total}")


def nll_local(emit: Emit) -> Any:
    """The loss of the rows whose class is in this rank's shard, or its gradient."""
    at = len(emit.node.outs) % 2  # the place of x: the forward gives two results, the backward takes one tensor more
    x = emit.node.operands[at]
    dim = 1 if x.type.ndim > 1 else 0
    shard = emit.operand_shard(at, dim)
    if shard.is_full:
        return emit.call(emit.node.op, *emit.args)
    target, weight, reduction, ignore, *total = emit.args[at + 1 :]
    target = target if total else checked(emit, target, x.shape[dim], ignore)  # the backward's was seen before
    local, outside = mine(emit, target, shard)
    ignored = emit.call(aten.eq.Scalar, target, ignore)
    local = emit.call(aten.masked_fill.Scalar, local, emit.call(aten.logical_or.default, outside, ignored), NOTHING)
    return emit.call(emit.node.op, *emit.args[: at + 1], local, weight, reduction, NOTHING, *total)


ROWS = "~n..!reduction=1 c!"
"""Rows are independent; in a mean they are replicated, as the number of rows counts."""
BACKWARD = "smooth_l1_loss_backward huber_loss_backward binary_cross_entropy_backward soft_margin_loss_backward"
FORWARD = "mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits soft_margin_loss"

RULES: tuple[RuleEntry, ...] = (
    rule(tuple(op.default for op in ops(FORWARD)), loss, local=share_of_mean),
    rule(aten.mse_loss_backward.default, partial(gradient, "0|1&2"), local=share_of_mean),
    rule(tuple(op.default for op in ops(BACKWARD)), partial(gradient, "0"), local=share_of_mean),
    rule((aten.nll_loss_forward.default, aten.nll_loss2d_forward.default), nll, local=nll_local),
    packed((aten.nll_loss_backward.default, aten.nll_loss2d_backward.default), nll_backward, local=nll_local),
    rule(aten.multilabel_margin_loss_forward, f"{ROWS}, ~n.. c -> n.., ~n.. c"),
    rule(aten.multilabel_margin_loss_backward, f"n.., {ROWS}, ~n.. c, ~n.. c -> ~n.. c", linear="0"),
)
