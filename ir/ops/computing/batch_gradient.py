"""The gradient of a batch norm in two steps, between which ranks add up what each has of two sums.

    dot[c], total[c] = shardfx.batch_norm_sums(gy[n, c, ...], x, mean[c], rstd[c])    of gy * (x - mean) * rstd; of gy
    gx[n, c, ...]    = shardfx.batch_norm_gradient(gy, x, mean, rstd, dot, total, weight[c], count)

``count`` elements of each channel are in the sums, which are those of the kernel; the second step goes once through x
and once through gy, into one new tensor. Needs torch alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

_library = torch.library.Library("shardfx", "FRAGMENT")
_library.define("batch_norm_sums(Tensor grad, Tensor x, Tensor mean, Tensor rstd) -> (Tensor, Tensor)")
_library.define(
    "batch_norm_gradient(Tensor grad, Tensor x, Tensor mean, Tensor rstd, Tensor dot, Tensor total, Tensor? weight,"
    " int count) -> Tensor"
)

aten = torch.ops.aten


def _sums(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    weight = torch.ones_like(rstd)  # which the sums do not depend on: CUDA's kernel makes them of its dtype and device
    asked = [False, True, True]
    _, dot, total = aten.native_batch_norm_backward.default(grad, x, weight, None, None, mean, rstd, True, 0.0, asked)
    return dot, total


def _gradient(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, dot: Tensor, total: Tensor, weight: Tensor | None, count: int
) -> Tensor:
    scale = rstd if weight is None else rstd * weight.to(rstd.dtype)
    less = scale / -count
    slope, shift, by = less * rstd * dot, less * total, scale.view(-1, *[1] * (x.dim() - 2))
    if x.dtype == rstd.dtype:
        one = torch.ones_like(rstd)
        made: Tensor = aten._native_batch_norm_legit_no_training.default(x, slope, shift, mean, one, 0.0, 0.0)[0]
        return made.addcmul_(grad, by)
    shift, slope = ((shift - mean * slope).view(by.shape), slope.view(by.shape))
    return torch.addcmul(shift, x.to(rstd.dtype), slope).addcmul_(grad.to(rstd.dtype), by).to(x.dtype)


def _sums_meta(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(mean), torch.empty_like(mean)


def _gradient_meta(grad: Tensor, x: Tensor, *given: object) -> Tensor:
    return x.new_empty(x.shape)


for _key in ("CPU", "CUDA"):
    _library.impl("batch_norm_sums", _sums, _key)
    _library.impl("batch_norm_gradient", _gradient, _key)
_library.impl("batch_norm_sums", _sums_meta, "Meta")
_library.impl("batch_norm_gradient", _gradient_meta, "Meta")

batch_norm_sums = torch.ops.shardfx.batch_norm_sums.default
batch_norm_gradient = torch.ops.shardfx.batch_norm_gradient.default
