"""Loops: states over time, fixed points, solvers, memories that are written to."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .odd_model import ids, normal, odd, uniform

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


@odd(
    normal(4, 6),
    targets=(normal(4, 6),),
    tp={"up.weight": "tp, -", "down.weight": "-, tp"},
    more={"zero": 1, "zero_min_numel": 1},
)
class RungeKutta(nn.Module):
    """An ordinary differential equation in three steps of four."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 8), nn.Linear(8, 6)

    def slope(self, t: float, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(torch.cat((x, torch.full_like(x[:, :1], t)), 1))))

    def forward(self, x: Tensor) -> Tensor:
        h = 1 / 3
        for step in range(3):
            t = step * h
            a = self.slope(t, x)
            b = self.slope(t + h / 2, x + a * h / 2)
            c = self.slope(t + h / 2, x + b * h / 2)
            x = x + (a + 2 * b + 2 * c + self.slope(t + h, x + c * h)) * (h / 6)
        return x


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


@odd(normal(4, 6), targets=(normal(4, 6),), tp={"stored": "tp, -"})
class ModernHopfield(nn.Module):
    """A state is drawn to stored patterns, which are parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stored, self.beta = nn.Parameter(torch.randn(10, 6)), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = (self.beta * x @ self.stored.T).softmax(-1) @ self.stored
        return x


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


@odd(*SERIES, targets=(normal(4, 5, 6),), tp={"head.weight": "tp, -"})
class Tape(nn.Module):
    """A memory that is erased, added to and read by shares, moved by a circular convolution (NTM)."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.start = nn.Linear(6, 6 + 6 + 7 + 3), nn.Parameter(torch.randn(7, 6))

    def forward(self, x: Tensor) -> Tensor:
        memory, ys = self.start.expand(x.shape[0], -1, -1), []
        for t in range(x.shape[1]):
            erase, add, at, move = self.head(x[:, t]).split((6, 6, 7, 3), -1)
            at, move = at.softmax(-1), move.softmax(-1)
            at = sum(move[:, i, None] * at.roll(i - 1, -1) for i in range(3))
            at = (at**2 / (at**2).sum(-1, keepdim=True)).unsqueeze(-1)
            memory = memory * (1 - at * erase.sigmoid()[:, None]) + at * add[:, None]
            ys.append((at * memory).sum(1))
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


@odd(ids(9, 4, 6), targets=(ids(4, 4),), loss=F.cross_entropy, tp={"embed.weight": "tp, -"})
class Stack(nn.Module):
    """Pushes, pops and keeps by shares: a stack of four, shifted by slices."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.act, self.out = nn.Embedding(9, 5), nn.Linear(10, 3), nn.Linear(5, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        stack = x.new_zeros(x.shape[0], 4, 5)
        for t in range(x.shape[1]):
            push, pop, stay = self.act(torch.cat((x[:, t], stack[:, 0]), -1)).softmax(-1)[..., None, None].unbind(1)
            pushed = torch.cat((x[:, t, None], stack[:, :-1]), 1)
            popped = F.pad(stack[:, 1:], (0, 0, 0, 1))
            stack = push * pushed + pop * popped + stay * stack
        return self.out(stack[:, 0])


@odd(normal(4, 8, 3), targets=(normal(4, 8, 5),), tp={"packed.weight": "tp, -, -"})
class QuasiRecurrent(nn.Module):
    """A causal convolution makes all gates at once, a loop pools."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Conv1d(3, 15, 2)

    def forward(self, x: Tensor) -> Tensor:
        z, f, o = self.packed(F.pad(x.mT, (1, 0))).mT.chunk(3, -1)
        c, ys = torch.zeros_like(z[:, 0]), []
        for t in range(x.shape[1]):
            c = torch.lerp(z[:, t].tanh(), c, f[:, t].sigmoid())
            ys.append(o[:, t].sigmoid() * c)
        return torch.stack(ys, 1)


@odd(uniform(4, 5), targets=(uniform(4, 5),), tp={"cost": "tp, -"})
class Sinkhorn(nn.Module):
    """Shares between two sets, normalized to and fro in logarithms."""

    def __init__(self) -> None:
        super().__init__()
        self.cost = nn.Parameter(torch.randn(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        a, u, v = (x / x.sum(-1, keepdim=True)).log(), torch.zeros_like(x), torch.zeros_like(x)
        for _ in range(4):
            u = a - (v[:, None] - self.cost).logsumexp(-1)
            v = -(u[:, :, None] - self.cost).logsumexp(1)
        return (u[:, :, None] + v[:, None] - self.cost).exp().sum(1)
