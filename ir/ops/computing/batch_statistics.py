"""Batch norm over a sharded batch: mean and variance from those of shards, and the gradient in two steps.

    out[p, 2, c] = shardfx.shard_moments(x[n, c, ...], of, at, count)    mean and variance of each of p equal shards
    mean[c], var[c] = shardfx.joined_moments(out)                        of all (Chan, Golub and LeVeque, 1979)

    dot[c], total[c] = shardfx.batch_norm_sums(gy[n, c, ...], x, mean[c], rstd[c])    of gy * (x - mean) * rstd; of gy
    gx[n, c, ...]    = shardfx.batch_norm_gradient(gy, x, mean, rstd, dot, total, weight[c], count)

``of`` says into how many shards samples are split, and each spatial dim. ``x`` is ``count`` of them, from ``at`` on;
zeros stand for the others, so that what ranks have adds up to ``out``: one small sum. Squares are taken of what is
centred, so that nothing cancels; numbers of 16 bits are taken as float32. The two sums of the gradient, over
``count`` elements of each channel, are those of torch's kernel; the second step goes once through x and once through
gy. Needs torch alone.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from .library import Ints, define

aten = torch.ops.aten


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _moments(rows: Tensor) -> tuple[Tensor, Tensor]:
    if rows.device.type == "cpu":  # four times as fast as var_mean
        mean, var = torch.batch_norm_update_stats(rows.contiguous(), None, None, 0.0)
    else:
        var, mean = torch.var_mean(rows, [d for d in range(rows.dim()) if d != 1], correction=0)
    return mean, var


@define(
    "shard_moments(Tensor x, int[] of, int[] at, int[] count) -> Tensor",
    shapes=lambda x, of, *_: x.new_empty((math.prod(of), 2, x.shape[1]), dtype=_wide(x.dtype)),
)
def shard_moments(x: Tensor, of: Ints, at: Ints, count: Ints) -> Tensor:
    """Mean and variance of each shard that ``x`` has, in its place."""
    boxes = [x.to(_wide(x.dtype))]
    for dim, n in zip((0, *range(2, x.dim())), count, strict=True):
        boxes = [part for box in boxes for part in box.split(x.shape[dim] // n, dim)] if n > 1 else boxes
    made = boxes[0].new_zeros((math.prod(of), 2, x.shape[1]))
    places = itertools.product(*(range(first, first + n) for first, n in zip(at, count, strict=True)))
    for place, box in zip(places, boxes, strict=True):
        number = 0
        for one, n in zip(place, of, strict=True):
            number = number * n + one
        torch.stack(_moments(box), out=made[number])
    return made


@define(
    "joined_moments(Tensor moments) -> (Tensor, Tensor)",
    shapes=lambda moments: (moments.new_empty(moments.shape[2:]), moments.new_empty(moments.shape[2:])),
)
def joined_moments(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of all from those of equal shards."""
    means, variances = moments.unbind(1)
    mean = means.mean(0)
    return mean, variances.mean(0) + (means - mean).square_().mean(0)


@define(
    "batch_norm_sums(Tensor grad, Tensor x, Tensor mean, Tensor rstd) -> (Tensor, Tensor)",
    shapes=lambda grad, x, mean, rstd: (torch.empty_like(mean), torch.empty_like(mean)),
)
def batch_norm_sums(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """The sums over the batch that the gradient of ``x`` needs."""
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
    """The gradient of ``x`` from the sums over the batch."""
    scale = rstd if weight is None else rstd * weight.to(rstd.dtype)
    less = scale / -count
    slope, shift, by = less * rstd * dot, less * total, scale.view(-1, *[1] * (x.dim() - 2))
    if x.dtype == rstd.dtype:
        one = torch.ones_like(rstd)
        made: Tensor = aten._native_batch_norm_legit_no_training.default(x, slope, shift, mean, one, 0.0, 0.0)[0]
        return made.addcmul_(grad, by)
    shift, slope = ((shift - mean * slope).view(by.shape), slope.view(by.shape))
    return torch.addcmul(shift, x.to(rstd.dtype), slope).addcmul_(grad.to(rstd.dtype), by).to(x.dtype)
