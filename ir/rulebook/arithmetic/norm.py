"""Normalisations. The normalised dims are whole; where a cut of them is wanted the op is taken apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardfx.ir.graph import Node
from shardfx.ir.rulebook.dims import argument, packed
from shardfx.ir.rules.book import RuleEntry, rule
from shardfx.ir.rules.sharding_rule import SAME
from shardfx.ir.rules.template import Template, template

aten = torch.ops.aten


Given = Tensor | None


def _shape_of_channels(x: Tensor) -> list[int]:
    return [1, x.shape[1], *[1] * (x.dim() - 2)]


def expand_batch_norm(
    x: Tensor, weight: Given, bias: Given, old_mean: Given, old_var: Given, training: bool, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    """Batch normalisation over the whole batch in two passes: mean, then centred squares; sums that may be partial.

    In evaluation by the running statistics, which stay; nothing is saved.
    """
    dims = [d for d in range(x.dim()) if d != 1]
    count = x.numel() // x.shape[1]
    shape = _shape_of_channels(x)
    if training:
        mean = torch.sum(x, dims) / count
    else:
        assert old_mean is not None and old_var is not None
        mean = old_mean
    centred = x - mean.view(shape)
    var = torch.sum(centred * centred, dims) / count if training or old_var is None else old_var
    rstd = torch.rsqrt(var + eps)
    y = centred * rstd.view(shape)
    if weight is not None:
        y = y * weight.view(shape)
    if bias is not None:
        y = y + bias.view(shape)
    if not training:
        assert old_mean is not None and old_var is not None
        return y, x.new_empty([0]), x.new_empty([0]), old_mean.clone(), old_var.clone()
    results = [y, mean, rstd]
    if old_mean is not None and old_var is not None:
        results.append(old_mean * (1 - momentum) + mean * momentum)
        results.append(old_var * (1 - momentum) + var * (momentum * count / max(count - 1, 1)))
    return tuple(results)


def expand_batch_norm_backward(
    grad: Tensor, x: Tensor, weight: Given, mean: Given, var: Given, save_mean: Tensor, save_rstd: Tensor, *options: Any
) -> tuple[Given, ...]:
    """The gradients, from sums over the batch that may be partial; of running statistics that of x needs none."""
    train, eps, (_, for_weight, for_bias) = options
    dims = [d for d in range(x.dim()) if d != 1]
    count = x.numel() // x.shape[1]
    shape = _shape_of_channels(x)
    if not train:
        assert mean is not None and var is not None
        save_mean, save_rstd = mean, torch.rsqrt(var + eps)
    rstd = save_rstd.view(shape)
    normal = (x - save_mean.view(shape)) * rstd
    sum_grad = torch.sum(grad, dims)
    sum_dot = torch.sum(grad * normal, dims)
    scale = rstd if weight is None else rstd * weight.view(shape)
    gx = (
        grad * scale
        if not train
        else (grad - sum_grad.view(shape) / count - normal * (sum_dot.view(shape) / count)) * scale
    )
    return gx, sum_dot if for_weight else None, sum_grad if for_bias else None


def affine(form: str, *unread: int) -> Callable[[Node], Template]:
    """Weight and bias may be partial sums together: the statistics know nothing of them. A bias alone is added once."""

    def make(node: Node) -> Template:
        scaled = argument(node, "weight") is not None
        training = argument(node, "training") is not False
        linear = ["1&2>0"] * (scaled and training) + [f"{i}>" for i in unread if training]
        return template(form, "|".join(linear), SAME if unread else "sum")

    make.__name__ = form
    return make


def batch_backward(form: str, flag: str) -> Callable[[Node], Template]:
    """The statistics of the batch, or the running ones, are not looked at."""

    def make(node: Node) -> Template:
        return template(form, "0|2>0|3>|4>" if argument(node, flag) else "0|2>0|5>|6>|1&3>1")

    make.__name__ = form
    return make


ROWS = "n.. d*normalized_shape!"
GROUPS = "n (g c!) s..!"
GROUPED = {"N": "n", "C": "(g c)", "group": "g"}

RULES: tuple[RuleEntry, ...] = (
    rule(aten.native_layer_norm.default, affine(f"{ROWS}, d.., d.. -> n.. d.., n.. 1*d, n.. 1*d"), expand=True),
    # The gradients of weight and bias are sums over n: partial where that is cut.
    packed(
        aten.native_layer_norm_backward.default,
        f"{ROWS}, n.. d.., n.. 1*d, n.. 1*d, d.., d.. -> n.. d.., d.., d..",
        linear="0|4>0|5>",
        expand=True,
    ),
    packed(
        aten.native_group_norm.default,
        affine(f"{GROUPS}, (g c), (g c) -> n (g c) s.., n g, n g"),
        sized=GROUPED,
        expand=True,
    ),
    packed(
        aten.native_group_norm_backward.default,
        f"{GROUPS}, n (g c) s.., n g, n g, (g c) -> n (g c) s.., (g c), (g c)",
        linear="0|4>0",
        sized=GROUPED,
        expand=True,
    ),
    # In training all of n and space is one statistic, and whole; by running statistics, which stay, it is pointwise.
    packed(
        aten._native_batch_norm_legit_functional.default,
        "n!training c s..!training, c, ... -> n c s.., c, ...",
        reduce=SAME,
        expand=expand_batch_norm,
    ),
    packed(aten.native_batch_norm.default, affine("n!training c s..!training, c, ... -> n c s.., c, ...", 3, 4)),
    packed(aten._native_batch_norm_legit_no_training.default, "n c s.., c, ... -> n c s.., c, ...", reduce=SAME),
    # In training the gradient of x needs the sums over n and space.
    packed(
        aten.native_batch_norm_backward.default,
        batch_backward("n!train c s..!train, n c s.., c, ... -> n c s.., c, c", "train"),
        expand=expand_batch_norm_backward,
    ),
    packed(
        aten.batch_norm_backward.default,
        batch_backward("n!update c s..!update, n c s.., c, ... -> n c s.., c, c", "update"),
    ),
)

if hasattr(aten, "_fused_rms_norm"):
    RULES += (
        rule(aten._fused_rms_norm.default, f"{ROWS}, d.. -> n.. d.., n.. 1*d", linear="1>0", expand=True),
        rule(
            aten._fused_rms_norm_backward.default,
            f"{ROWS}, n.. d.., n.. 1*d, d.. -> n.. d.., d..",
            linear="0|3>0",
            expand=True,
        ),
    )
