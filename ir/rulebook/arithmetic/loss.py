"""Losses of each element, their sums and means, as ops by themselves: planning sees what they are decomposed into."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from shardfx.ir.graph import Node
from shardfx.ir.rulebook.dims import argument, ops
from shardfx.ir.rules.book import RuleEntry, rule
from shardfx.ir.rules.local import Emit
from shardfx.ir.rules.template import Template, template

aten = torch.ops.aten
EACH, MEAN = 0, 1
"""The values of the argument ``reduction``."""
WEIGHT = {aten.binary_cross_entropy.default: "2", aten.binary_cross_entropy_with_logits.default: "2"}
"""Losses that are linear in a weight."""


def loss(node: Node) -> Template:
    """``x[d..], target[d..], ... -> each[d..]``, or the sum over all elements."""
    return template(f"d.., ... -> {'d..' if argument(node, 'reduction') == EACH else ''}", WEIGHT.get(node.op, ""))


def gradient(linear: str) -> Callable[[Node], Template]:
    """``grad, x[d..], target[d..], ... -> d..``, of a gradient for each element or of one number."""

    def make(node: Node) -> Template:
        grad = "d.." if argument(node, "reduction") == EACH else ""
        return template(f"{grad}, d.., ... -> d..", linear)

    make.__name__ = "grad, d.., ... -> d.."
    return make


def share_of_mean(emit: Emit) -> Any:
    """A rank's term of a mean, or the gradient of one: by its share of the elements."""
    operands = emit.node.operands
    held = torch.broadcast_shapes(*(emit.operand_shape(i) for i in range(len(operands))))
    return by_share(emit, held, torch.broadcast_shapes(*(value.shape for value in operands)))


def by_share(emit: Emit, held: tuple[int, ...], whole: tuple[int, ...]) -> Any:
    """What a rank's call gives, of a mean by what the rank has of the elements."""
    made = emit.call(emit.node.op, *emit.args, **emit.kwargs)
    if argument(emit.node, "reduction") != MEAN or held == whole:
        return made
    return emit.call(aten.mul.Tensor, made, math.prod(held) / math.prod(whole))


BACKWARD = "smooth_l1_loss_backward huber_loss_backward binary_cross_entropy_backward soft_margin_loss_backward"
FORWARD = "mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits soft_margin_loss"

RULES: tuple[RuleEntry, ...] = (
    rule(tuple(op.default for op in ops(FORWARD)), loss, local=share_of_mean),
    rule(aten.mse_loss_backward.default, gradient("0|1&2"), local=share_of_mean),
    rule(tuple(op.default for op in ops(BACKWARD)), gradient("0"), local=share_of_mean),
)
