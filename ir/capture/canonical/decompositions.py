"""Ops that are decomposed at capture, in the model and in its optimizer, and by what."""

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
    aten.linalg_vector_norm,
    aten.logsumexp,
    aten.log_sigmoid_forward,
    aten.log_sigmoid_backward,
    aten.nan_to_num,
)
"""Ops whose result is a mean over everything, or a statistic of a dim: decomposed at once into sums and pointwise
ops."""


def _smooth_l1_loss_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int, beta: float) -> Tensor:
    """Torch's decomposition gives 0 where the difference is NaN, for the sign of NaN is."""
    each = grad / x.numel() if reduction == 1 else grad
    difference = x - target
    near = torch.where(difference >= beta, each, each * difference / beta)
    return torch.where(difference <= -beta, -each, near)


def _soft_margin_loss_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int) -> Tensor:
    """Torch's decomposition is a sigmoid; the kernel is a quotient, which is NaN where its exponential is infinite."""
    z = torch.exp(-target * x)
    norm = 1 / x.numel() if reduction == 1 and x.numel() else 1.0
    return target * z * -norm / (z + 1) * grad


def _binary_cross_entropy_backward(
    grad: Tensor, x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1
) -> Tensor:
    """Torch's decomposition divides by at least 1e-12 in the dtype of the input, and the kernel in float32."""
    made = grad * (x - target) / torch.clamp(x * (1 - x), min=LEAST_VARIANCE)
    made = made if weight is None else made * weight
    return made / x.numel() if reduction == 1 else made


LEAST_VARIANCE = torch.tensor(1e-12, dtype=torch.float32).item()
OWN: dict[Any, Callable[..., Any]] = {
    aten.smooth_l1_loss_backward.default: _smooth_l1_loss_backward,
    aten.binary_cross_entropy_backward.default: _binary_cross_entropy_backward,
    aten.soft_margin_loss_backward.default: _soft_margin_loss_backward,
}
"""Replacements of torch's decompositions that differ from the kernels."""


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The decompositions, by op."""
    found: dict[Any, Callable[..., Any]] = get_decompositions(DECOMPOSED)
    return found | OWN
