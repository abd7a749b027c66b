"""Weights that are made: shared, tied through views, parametrized, products of factors, from other networks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from .odd_model import ids, normal, odd

ROWS, GOAL = (normal(4, 6),), (normal(4, 6),)


@odd(ids(8, 4, 5), targets=(ids(8, 4, 5),), loss=lambda out, y: F.cross_entropy(out.mT, y), tp={"table": "tp, -"})
class TiedSlices(nn.Module):
    """One matrix is embedding, head, and (in a slice, turned) a layer between."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 6) * 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        h = F.embedding(tokens, self.table)
        h = h + torch.tanh(h @ self.table[:6].T) @ self.table.view(2, 4, 6)[1, 1:3].T @ self.table[::4]
        return h @ self.table.T


@odd(*ROWS, targets=GOAL, tp={"store": "tp"})
class OneStore(nn.Module):
    """All weights are views of one flat parameter, some of the same elements."""

    def __init__(self) -> None:
        super().__init__()
        self.store = nn.Parameter(torch.randn(80) * 0.4)

    def forward(self, x: Tensor) -> Tensor:
        up, down = self.store[:48].view(8, 6), self.store.as_strided((6, 8), (8, 1), 20)
        bias = self.store[68:74]
        return F.linear(F.linear(x, up).relu(), down, bias)


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).T


class Exponential(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.matrix_exp(x - x.T)


@odd(*ROWS, targets=GOAL)
class Parametrized(nn.Module):
    """One weight is symmetric, one orthogonal by an exponential, one of unit rows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))
        parametrize.register_parametrization(self.a, "weight", Symmetric())
        parametrize.register_parametrization(self.b, "weight", Exponential())
        parametrizations.weight_norm(self.c)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).relu()).relu())


@odd(*ROWS, targets=GOAL)
class SpectralNormed(nn.Module):
    """A power iteration in buffers at each step of training, twice in one step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = parametrizations.spectral_norm(nn.Linear(6, 8)), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu() + self.a(x.flip(0)).relu())


@odd(*ROWS, targets=GOAL, tp={"base.weight": "tp, -", "b": "tp, -"}, more={"zero": 3, "zero_min_numel": 0})
class LowRank(nn.Module):
    """A frozen weight with two factors beside it, merged in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self.base(x) + x @ self.a.T @ self.b.T * 0.5
        return F.linear(x, self.base.weight + self.b @ self.a * 0.5, self.base.bias)


@odd(*ROWS, targets=GOAL, tp={"a": "tp, -"})
class Kronecker(nn.Module):
    """A weight that is a Kronecker product, and a block diagonal."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(n, n)) for n in (2, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.kron(self.a, self.b) @ torch.block_diag(self.c, self.c.T)


class Sign(torch.autograd.Function):
    """Signs, whose gradient goes through within one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return above[0] * (x.abs() <= 1)


@odd(*ROWS, targets=GOAL, tp={"up": "tp, -", "down": "-, tp"})
class Binary(nn.Module):
    """Weights of two values, scaled by the mean of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        up, down = (Sign.apply(w) * w.abs().mean(1, keepdim=True) for w in (self.up, self.down))
        return F.linear(F.linear(x, up).relu(), down)


@odd(*ROWS, targets=GOAL, tp={"block.0.weight": "tp, -", "block.0.bias": "tp", "block.2.weight": "-, tp"})
class SharedBlock(nn.Module):
    """One block in several places of a list, a scalar for each; one parameter of no elements, one of one."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.layers = nn.ModuleList([self.block, nn.LayerNorm(6), self.block, self.block])
        self.scales = nn.ParameterList([nn.Parameter(torch.tensor(0.5 + i)) for i in range(4)])
        self.none, self.one = nn.Parameter(torch.zeros(0, 6)), nn.Parameter(torch.ones(1, 1))

    def forward(self, x: Tensor) -> Tensor:
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = x + layer(x) * scale
        return torch.cat((x, x[:0], x.new_zeros(0, 6) + self.none)) * self.one
