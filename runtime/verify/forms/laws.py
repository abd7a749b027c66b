"""Laws of ops, as data: what an op gives, written by other ops.

Each holds for every real number, and for infinities and NaN where the op gives them, up to rounding; a test runs both
sides of each (``tests/unit/test_laws.py``). They are asked only of tensors of one floating-point dtype, masks aside.
What is sums, products, reductions, matrix products and moves stands in :mod:`.forms`, which knows these by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))


def _silu_backward(g: Tensor, x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return g * s * (1 + x * (1 - s))


def _clamp(x: Tensor, low: float | None = None, high: float | None = None) -> Tensor:
    x = x if low is None else torch.maximum(x, x.new_full((), low))
    return x if high is None else torch.minimum(x, x.new_full((), high))


def _lerp(a: Tensor, b: Tensor, weight: float) -> Tensor:
    return a + weight * (b - a)


def _addmm(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return beta * c + alpha * torch.mm(a, b)


def _baddbmm(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return beta * c + alpha * torch.bmm(a, b)


def _addmv(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return beta * c + alpha * torch.mv(a, b)


def _mse(x: Tensor, y: Tensor, reduction: int = 1) -> Tensor:
    square = (x - y) * (x - y)
    return square if reduction == 0 else square.mean() if reduction == 1 else square.sum()


def _norm(
    x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    dims = list(range(x.dim())) if dim is None else dim
    return torch.sqrt(torch.sum(x * x, dims, keepdim))


LAWS: dict[Any, Callable[..., Tensor]] = {
    aten.silu.default: lambda x: x * torch.sigmoid(x),
    aten.silu_backward.default: _silu_backward,
    aten.gelu.default: _gelu,
    aten.relu.default: lambda x: _clamp(x, 0),
    aten.clamp.default: _clamp,
    aten.clamp_min.default: _clamp,
    aten.clamp_max.default: lambda x, high: _clamp(x, None, high),
    aten.hardtanh.default: lambda x, low=-1, high=1: _clamp(x, low, high),
    aten.leaky_relu.default: lambda x, slope=0.01: torch.where(x > 0, x, x * slope),
    aten.threshold_backward.default: lambda g, x, least: torch.where(x <= least, g.new_full((), 0), g),
    aten.tanh_backward.default: lambda g, y: g * (1 - y * y),
    aten.sigmoid_backward.default: lambda g, y: g * y * (1 - y),
    aten._softmax.default: lambda x, dim, widen: torch.exp(aten._log_softmax.default(x, dim, widen)),
    aten.rsqrt.default: lambda x: torch.reciprocal(torch.sqrt(x)),
    aten.masked_fill.Scalar: lambda x, mask, value: torch.where(mask, x.new_full((), value), x),
    aten.masked_fill.Tensor: lambda x, mask, value: torch.where(mask, value, x),
    aten.addmm.default: _addmm,
    aten.addmv.default: _addmv,
    aten.baddbmm.default: _baddbmm,
    aten.addcmul.default: lambda x, a, b, *, value=1: x + value * a * b,
    aten.addcdiv.default: lambda x, a, b, *, value=1: x + value * a / b,
    aten.lerp.Scalar: _lerp,
    aten.mse_loss.default: _mse,
    aten.linalg_vector_norm.default: _norm,
    aten.ge.Tensor: lambda a, b: torch.le(b, a),
    aten.gt.Tensor: lambda a, b: torch.lt(b, a),
    aten.ge.Scalar: lambda a, b: torch.le(a.new_full((), b), a),
    aten.gt.Scalar: lambda a, b: torch.lt(a.new_full((), b), a),
    aten.le.Scalar: lambda a, b: torch.le(a, a.new_full((), b)),
    aten.lt.Scalar: lambda a, b: torch.lt(a, a.new_full((), b)),
}
"""The op, and what it gives."""


def _of_both(*tensors: Tensor, beta: float = 1, alpha: float = 1) -> bool:
    """What is taken zero times is not looked at: infinities and NaN in it are in no result."""
    return bool(beta and alpha)


ONLY: dict[Any, Callable[..., bool]] = {
    aten.addmm.default: _of_both,
    aten.addmv.default: _of_both,
    aten.baddbmm.default: _of_both,
    aten.lerp.Scalar: lambda a, b, weight: abs(weight) < 0.5,
    aten._softmax.default: lambda x, dim, widen: not widen,
    aten.linalg_vector_norm.default: lambda x, ord=2, *rest, dtype=None: ord == 2 and dtype is None,
}
"""Of which arguments a law speaks, where not of all."""

COMMUTE = {
    aten.maximum.default,
    aten.minimum.default,
    aten.eq.Tensor,
    aten.ne.Tensor,
    aten.logical_and.default,
    aten.logical_or.default,
    aten.logical_xor.default,
    aten.bitwise_and.Tensor,
    aten.bitwise_or.Tensor,
    aten.bitwise_xor.Tensor,
}
"""Ops of two operands whose order does not matter; sums and products are sets anyway."""

INVOLUTIONS = {aten.logical_not.default: torch.bool, aten.bitwise_not.default: None, aten.neg.default: None}
"""Ops that done twice give back what they were given: of which dtype (None: of any)."""
