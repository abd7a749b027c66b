"""Sequences: attention in windows; loops over states."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .odd_model import normal, odd

QKV = {"q.weight": "tp, -", "k.weight": "tp, -", "v.weight": "tp, -", "o.weight": "-, tp"}
ALIKE = (normal(4, 6, 8),)


class Projected(nn.Module):
    """Queries, keys, values and an output, for two heads of four."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=bias) for _ in range(4))

    def heads(self, x: Tensor) -> list[Tensor]:
        return [each(x).unflatten(-1, (2, 4)).transpose(1, 2) for each in (self.q, self.k, self.v)]

    def joined(self, x: Tensor) -> Tensor:
        return self.o(x.transpose(1, 2).flatten(2))


@odd(*ALIKE, targets=ALIKE, tp=QKV)
class LocalWindows(Projected):
    """Each query sees three keys, taken by unfold."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        k, v = (F.pad(each, (0, 0, 1, 1)).unfold(2, 3, 1) for each in (k, v))
        scores = torch.einsum("bhtd,bhtdw->bhtw", q, k).softmax(-1)
        return self.joined(torch.einsum("bhtw,bhtdw->bhtd", scores, v))


SERIES = (normal(4, 5, 6),)


@odd(*SERIES, targets=(normal(4, 5, 6),), tp={"inward.weight": "tp, -", "out.weight": "-, tp"})
class SelectiveScan(nn.Module):
    """Steps, and what goes in and out, depend on the input (Mamba), one step after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.out, self.rates = nn.Linear(6, 8), nn.Linear(8, 6), nn.Parameter(torch.rand(8, 3))
        self.step, self.b, self.c = nn.Linear(6, 8), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        u, step, b, c = self.inward(x), F.softplus(self.step(x)), self.b(x), self.c(x)
        state, ys = x.new_zeros(x.shape[0], 8, 3), []
        for t in range(x.shape[1]):
            decay = torch.exp(-step[:, t, :, None] * self.rates.exp())
            state = decay * state + (step[:, t] * u[:, t])[..., None] * b[:, t, None]
            ys.append((state * c[:, t, None]).sum(-1))
        return self.out(torch.stack(ys, 1) * F.silu(u))


@odd(*SERIES, targets=(normal(4, 5, 6),), tp={"b": "tp, -", "c": "-, tp"})
class LinearRecurrence(nn.Module):
    """Complex states of length below one (LRU), from real and imaginary halves."""

    def __init__(self) -> None:
        super().__init__()
        self.nu, self.theta = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.b, self.c = nn.Parameter(torch.randn(4, 6) + 0j), nn.Parameter(torch.randn(6, 4) + 0j)

    def forward(self, x: Tensor) -> Tensor:
        factor, inward = torch.exp(torch.complex(-self.nu.exp(), self.theta)), x.to(self.b.dtype) @ self.b.mT
        h, ys = torch.zeros_like(inward[:, 0]), []
        for t in range(x.shape[1]):
            h = factor * h + inward[:, t]
            ys.append((h @ self.c.mT).real)
        return torch.stack(ys, 1)


@odd(*SERIES, targets=(normal(4, 5, 3),), tp={"cell.weight_ih": "tp, -", "out.weight": "-, tp"})
class Clockwork(nn.Module):
    """Half the state moves at every second step only; states come in from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out, self.first = nn.RNNCell(6, 8), nn.Linear(8, 3), nn.Parameter(torch.randn(1, 8))

    def forward(self, x: Tensor) -> Tensor:
        h, ys = self.first.repeat(x.shape[0], 1), []
        for t in range(x.shape[1]):
            new = self.cell(x[:, t], h)
            h = new if t % 2 == 0 else torch.cat((new[:, :4], h[:, 4:]), 1)
            ys.append(self.out(h))
        return torch.stack(ys, 1)
