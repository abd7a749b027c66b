"""Batch norm over a sharded batch: mean and variance from sums over ranks, and the gradient in two steps.

    sums[2, c] = shardfx.batch_moments(x[n, c, ...])                    of all elements of a channel; of their squares
    mean[c], var[c] = shardfx.joined_moments(sums, count, dtype)

    dot[c], total[c] = shardfx.batch_norm_sums(gy[n, c, ...], x, mean[c], rstd[c])    of gy * (x - mean) * rstd; of gy
    gx[n, c, ...]    = shardfx.batch_norm_gradient(gy, x, mean, rstd, dot, total, weight[c], count)

The sums are of float64, from the mean and the variance of what a rank has: so only what ranks have is squared without
being centred, and of float32 nothing is lost by it. The two sums of the gradient, over ``count`` elements of each
channel, are those of torch's kernel; the second step goes once through x and once through gy. Needs torch alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .library import define

aten = torch.ops.aten


@define("batch_moments(Tensor x) -> Tensor", shapes=lambda x: x.new_empty((2, x.shape[1]), dtype=torch.float64))
def batch_moments(x: Tensor) -> Tensor:
    """The sum and the sum of squares of each channel."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if x.device.type == "cpu":  # four times as fast as var_mean
        mean, var = torch.batch_norm_update_stats(x.contiguous(), None, None, 0.0)
    else:
        var, mean = torch.var_mean(x, [d for d in range(x.dim()) if d != 1], correction=0)
    mean, var = mean.double(), var.double()
    return torch.stack([mean, var + mean * mean]).mul_(x.numel() // x.shape[1])


@define(
    "joined_moments(Tensor sums, int count, ScalarType dtype) -> (Tensor, Tensor)",
    shapes=lambda sums, count, dtype: tuple(sums.new_empty(sums.shape[1:], dtype=dtype) for _ in range(2)),
)
def joined_moments(sums: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Mean and variance of ``count`` elements from their sums."""
    mean, square = sums / count
    return mean.to(dtype, copy=True), (square - mean * mean).clamp_(min=0).to(dtype)


@define(
    "batch_norm_sums(Tensor grad, Tensor x, Tensor mean, Tensor rstd) -> (Tensor, Tensor)",
    shapes=lambda grad, x, mean, rstd: (torch.empty_like(mean), torch.empty_like(mean)),
)
def batch_norm_sums(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """The reductions over the batch for the gradient of ``x``."""
    weight = torch.ones_like(rstd)  # which the sums do not depend on: CUDA's kernel makes them of its dtype and device
    asked = [False, True, True]
    _, dot, total = aten.native_batch_norm_backward.default(grad, x, weight, None, None, mean, rstd, True, 0.0, asked)
    return dot, total


@define(
    "batch_norm_gradient(Tensor grad, Tensor x, Tensor mean, Tensor rstd, Tensor dot, Tensor total, Tensor? weight,"
    " int count) -> Tensor",
    shapes=lambda grad, x, *_: x.new_empty(x.shape),
)
def batch_norm_gradient(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, dot: Tensor, total: Tensor, weight: Tensor | None, count: int
) -> Tensor:
    """The gradient of ``x`` from these reductions."""
    scale = rstd if weight is None else rstd * weight.to(rstd.dtype)
    less = scale / -count
    slope, shift, by = less * rstd * dot, less * total, scale.view(-1, *[1] * (x.dim() - 2))
    if x.dtype == rstd.dtype:
        one = torch.ones_like(rstd)
        made: Tensor = aten._native_batch_norm_legit_no_training.default(x, slope, shift, mean, one, 0.0, 0.0)[0]
        return made.addcmul_(grad, by)
    shift, slope = ((shift - mean * slope).view(by.shape), slope.view(by.shape))
    return torch.addcmul(shift, x.to(rstd.dtype), slope).addcmul_(grad.to(rstd.dtype), by).to(x.dtype)
