"""Ops that are taken apart at capture, in the model and in its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
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


def decompositions() -> dict[Any, Callable[..., Any]]:
    """How torch takes them apart."""
    found: dict[Any, Callable[..., Any]] = get_decompositions(DECOMPOSED)
    return found
