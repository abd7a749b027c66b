"""Ops that are taken apart at capture, in the model and in its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions

aten = torch.ops.aten
DECOMPOSED = (
    aten.mse_loss,
    aten.mse_loss_backward,
    aten.smooth_l1_loss,
    aten.smooth_l1_loss_backward,
    aten.huber_loss,
    aten.huber_loss_backward,
    aten.binary_cross_entropy,
    aten.binary_cross_entropy_backward,
    aten.binary_cross_entropy_with_logits,
    aten.soft_margin_loss,
    aten.soft_margin_loss_backward,
    aten.std,
    aten.std_mean,
    aten.var,
    aten.var_mean,
    aten.linalg_vector_norm,
    aten.logsumexp,
    aten.log_sigmoid_forward,
    aten.log_sigmoid_backward,
    aten.nan_to_num,
)
"""Ops whose result is a mean over everything, or a statistic of a dim: taken apart at once into sums and pointwise
ops."""


def _smooth_l1_loss_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int, beta: float) -> Tensor:
    """Torch's gives 0 where the difference is NaN, since a sign of NaN is."""
    each = grad / x.numel() if reduction == 1 else grad
    difference = x - target
    far = difference.abs() >= beta
    return torch.where(far, each * torch.sign(difference), each * difference / beta)


OWN: dict[Any, Callable[..., Any]] = {aten.smooth_l1_loss_backward.default: _smooth_l1_loss_backward}
"""In the place of torch's, which are other functions than the kernels."""


def decompositions() -> dict[Any, Callable[..., Any]]:
    """How they are taken apart."""
    found: dict[Any, Callable[..., Any]] = get_decompositions(DECOMPOSED)
    return found | OWN
