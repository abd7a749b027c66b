"""Loops: states over time, fixed points, solvers, memories that are written to."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .odd_model import normal, odd

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


@odd(*SERIES, targets=(normal(4, 5, 8),), tp={"gate.weight": "tp, -", "new.weight": "tp, -"})
class ParallelGates(nn.Module):
    """A recurrence as a running log-sum-exp (minGRU)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.new = nn.Linear(6, 8), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate, new = self.gate(x), F.softplus(self.new(x)).log()
        decay = F.logsigmoid(-gate).cumsum(1)
        return (decay + torch.logcumsumexp(F.logsigmoid(gate) + new - decay, 1)).exp()


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


@odd(normal(5, 6), targets=(normal(5, 6),), tp={"w.weight": "tp, -"})
class Equilibrium(nn.Module):
    """Found without gradients, then one step with them."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(6):
                z = torch.tanh(self.w(z) * 0.3 + self.u(x))
        return torch.tanh(self.w(z) * 0.3 + self.u(x))


@odd(*SERIES, targets=(normal(4, 5, 4),), tp={"k.weight": "tp, -", "v.weight": "tp, -"})
class DeltaRule(nn.Module):
    """A matrix of fast weights, corrected at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.beta = (nn.Linear(6, n, bias=False) for n in (4, 4, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, beta = self.q(x), F.normalize(self.k(x), dim=-1), self.v(x), self.beta(x).sigmoid()
        memory, ys = x.new_zeros(x.shape[0], 4, 4), []
        for t in range(x.shape[1]):
            old = torch.einsum("bij,bj->bi", memory, k[:, t])
            memory = torch.baddbmm(memory, (beta[:, t] * (v[:, t] - old)).unsqueeze(2), k[:, t].unsqueeze(1))
            ys.append((memory @ q[:, t, :, None]).squeeze(2))
        return torch.stack(ys, 1)


@odd(normal(4, 5, 2, 6, 6), targets=(normal(4, 3, 6, 6),), more={"zero": 3, "zero_min_numel": 0})
class ConvolutionalCell(nn.Module):
    """Gates of images, from one convolution over input and state."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Conv2d(5, 12, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[0], 3, *x.shape[-2:])
        for frame in x.unbind(1):
            i, f, o, g = self.gates(torch.cat((frame, h), 1)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return h


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


@odd(*SERIES, targets=(normal(4, 5, 6),), tp={"read.weight": "-, tp"})
class Reservoir(nn.Module):
    """Fixed random weights in buffers, scaled by their largest singular value; the reading is learned."""

    def __init__(self) -> None:
        super().__init__()
        w = torch.randn(8, 8)
        self.register_buffer("w", w / torch.linalg.matrix_norm(w, 2))
        self.register_buffer("u", torch.randn(8, 6), persistent=False)
        self.read = nn.Linear(8, 6)
        with torch.no_grad():
            self.u.copy_(torch.linspace(-1, 1, 48).view(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        h, ys = torch.zeros(x.shape[0], 8, dtype=x.dtype), []
        for each in x.unbind(1):
            h = 0.7 * h + 0.3 * torch.tanh(F.linear(h, self.w) + F.linear(each, self.u))
            ys.append(h)
        return self.read(torch.stack(ys, 1))
