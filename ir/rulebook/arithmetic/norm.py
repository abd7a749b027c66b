"""Normalisations. The normalised dims are whole; where a cut of them is wanted the op is taken apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardfx.ir.rulebook.dims import packed
from shardfx.ir.rules.book import RuleEntry, rule
from shardfx.ir.rules.sharding_rule import SAME

aten = torch.ops.aten


Given = Tensor | None


def expand_batch_norm(
    x: Tensor, weight: Given, bias: Given, old_mean: Given, old_var: Given, training: bool, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    """Batch normalisation over the whole batch in two passes: mean, then centred squares; sums that may be partial.

    What is then done to each element is the kernel that takes its statistics as given.
    """
    dims = [d for d in range(x.dim()) if d != 1]
    count = x.numel() // x.shape[1]
    mean = torch.sum(x, dims) / count
    centred = x - mean.view([1, x.shape[1], *[1] * (x.dim() - 2)])
    var = torch.sum(centred * centred, dims) / count
    y = aten._native_batch_norm_legit_no_training.default(x, weight, bias, mean, var, 0.0, eps)[0]
    results = [y, mean, torch.rsqrt(var + eps)]
    if old_mean is not None and old_var is not None:
        results.append(old_mean * (1 - momentum) + mean * momentum)
        results.append(old_var * (1 - momentum) + var * (momentum * count / max(count - 1, 1)))
    return tuple(results)


def expand_batch_norm_backward(
    grad: Tensor, x: Tensor, weight: Given, mean: Given, var: Given, save_mean: Tensor, save_rstd: Tensor, *options: Any
) -> tuple[Given, ...]:
    """The gradients, from two sums over the batch that may be partial: the kernel for given statistics makes them.

    What it lacks of the gradient of x, because the statistics hang on x too, is x normalised by two vectors more.
    """
    train, eps, (_, for_weight, for_bias) = options
    if not train:
        return _backward_of_given(grad, x, weight, mean, var, eps)
    count = x.numel() // x.shape[1]
    given = (save_mean, 1 / (save_rstd * save_rstd))
    asked = [True, True, True]
    gx, dot, total = aten.native_batch_norm_backward.default(grad, x, weight, *given, None, None, False, 0.0, asked)
    scale = (save_rstd if weight is None else save_rstd * weight) / -count
    rest = aten._native_batch_norm_legit_no_training.default(x, dot * scale, total * scale, *given, 0.0, 0.0)[0]
    return gx + rest, dot if for_weight else None, total if for_bias else None


def _backward_of_given(
    grad: Tensor, x: Tensor, weight: Given, mean: Given, var: Given, eps: float
) -> tuple[Given, ...]:
    """The gradients where the statistics do not hang on x."""
    assert mean is not None and var is not None
    shape, dims = [1, x.shape[1], *[1] * (x.dim() - 2)], [d for d in range(x.dim()) if d != 1]
    rstd = torch.rsqrt(var + eps)
    scale = rstd if weight is None else rstd * weight
    normal = (x - mean.view(shape)) * rstd.view(shape)
    return grad * scale.view(shape), torch.sum(grad * normal, dims), torch.sum(grad, dims)


ROWS = "n.. d*normalized_shape!"
GROUPS = "n (g c!) s..!"
GROUPED = {"N": "n", "C": "(g c)", "group": "g"}

RULES: tuple[RuleEntry, ...] = (
    rule(aten.native_layer_norm.default, f"{ROWS}, d.., d.. -> n.. d.., n.. 1*d, n.. 1*d", expand=True),
    # The gradients of weight and bias are sums over n: partial where that is cut.
    packed(
        aten.native_layer_norm_backward.default,
        f"{ROWS}, n.. d.., n.. 1*d, n.. 1*d, d.., d.. -> n.. d.., d.., d..",
        linear="0",
        expand=True,
    ),
    packed(
        aten.native_group_norm.default, f"{GROUPS}, (g c), (g c) -> n (g c) s.., n g, n g", sized=GROUPED, expand=True
    ),
    packed(
        aten.native_group_norm_backward.default,
        f"{GROUPS}, n (g c) s.., n g, n g, (g c) -> n (g c) s.., (g c), (g c)",
        linear="0",
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
    packed(aten.native_batch_norm.default, "n!training c s..!training, c, ... -> n c s.., c, ...", reduce=SAME),
    packed(aten._native_batch_norm_legit_no_training.default, "n c s.., c, ... -> n c s.., c, ...", reduce=SAME),
    # In training the gradient of x needs the sums over n and space.
    packed(
        aten.native_batch_norm_backward.default,
        "n!train c s..!train, n c s.., c, ... -> n c s.., c, c",
        linear="0",
        expand=expand_batch_norm_backward,
    ),
    packed(aten.batch_norm_backward.default, "n!update c s..!update, n c s.., c, ... -> n c s.., c, c", linear="0"),
)

if hasattr(aten, "_fused_rms_norm"):
    RULES += (
        rule(aten._fused_rms_norm.default, f"{ROWS}, d.. -> n.. d.., n.. 1*d", expand=True),
        rule(
            aten._fused_rms_norm_backward.default,
            f"{ROWS}, n.. d.., n.. 1*d, d.. -> n.. d.., d..",
            linear="0",
            expand=True,
        ),
    )
