"""Optimizers that look at full tensors, each in another way."""

from __future__ import annotations

import math
from typing import Any

import torch


class WholeTensor(torch.optim.Optimizer):
    """Steps by ``update`` of a parameter and its gradient."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.update(p, p.grad), alpha=group["lr"])

    def update(self, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return grad


class RowNorm(WholeTensor):
    """Each row of a matrix has the norm 1."""

    def update(self, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return grad / (grad.flatten(1).norm(dim=1).view(-1, *[1] * (p.dim() - 1)) + 1e-3) if p.dim() > 1 else grad


class Centralized(WholeTensor):
    """Each row of a matrix, or filter, has the mean 0."""

    def update(self, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return grad - grad.mean(dim=tuple(range(1, p.dim())), keepdim=True) if p.dim() > 1 else grad


class TrustRatio(WholeTensor):
    """Steps of large tensors are as long as these."""

    def update(self, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return grad * (p.norm() / (grad.norm() + 1e-3)) if p.numel() >= 256 else grad


class FanIn(WholeTensor):
    """The rate of a matrix goes by its number of columns."""

    def update(self, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return grad / max(1, math.prod(p.shape[1:]) // 2) if p.dim() > 1 else grad


class AdaptiveClipping(WholeTensor):
    """Clips the norm of each row, or of a vector, by that of the parameter."""

    def update(self, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        rows, grads = (t.flatten(1) if t.dim() > 1 else t.reshape(1, -1) for t in (p, grad))
        most = rows.norm(dim=1, keepdim=True).clamp(min=1e-3) * 0.01
        return (grads * (most / grads.norm(dim=1, keepdim=True).clamp(min=1e-6)).clamp(max=1.0)).view_as(grad)
