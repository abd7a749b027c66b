"""Odd shapes of modules: dicts, tuples, buffers that change, losses of the batch, mixed dtypes, checkpoints."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .odd_model import MLP, TwoLayers, flags, ids, normal, odd

ROWS, GOAL = (normal(4, 6),), (normal(4, 6),)


class Heads(NamedTuple):
    kind: Tensor
    values: tuple[Tensor, Tensor]


@odd(
    {"x": normal(4, 6), "more": [normal(4, 2), ids(5, 4)]},
    targets=({"kind": ids(3, 4), "value": normal(4)},),
    loss=lambda out, y: F.cross_entropy(out.kind, y["kind"]) + F.huber_loss(out.values[0], y["value"]) + out.values[1],
    dp={"args.0.x": "dp, -"},
    tp=MLP,
    more={"zero": 3, "zero_min_numel": 0},
)
class Nested(TwoLayers):
    """A dict with a list goes in, a named tuple with a tuple comes out; three losses."""

    def __init__(self) -> None:
        super().__init__(13)
        self.table, self.kind = nn.Embedding(5, 5), nn.Linear(6, 3)

    def forward(self, given: dict[str, Any]) -> Heads:
        more, at = given["more"]
        h = self.both(torch.cat((given["x"], more, self.table(at)), -1))
        return Heads(self.kind(h), (h.mean(-1), h.square().mean() * 0.1))


@odd(
    *ROWS,
    kwargs={"mask": flags(4, 6), "scale": 2.0, "names": ("a", "b")},
    targets=GOAL,
    loss=lambda out, y, weight=0.5: F.mse_loss(out["b"], y) + weight * out["a"].sum(),
    tp=MLP,
)
class Keywords(TwoLayers):
    """Keywords of all kinds; keys of results are made from words."""

    def forward(self, x: Tensor, *, mask: Tensor, scale: float, names: tuple[str, ...]) -> dict[str, Tensor | None]:
        h = self.both(x.masked_fill(~mask, 0.0)) * scale
        return {**dict(zip(names, (h.square().mean(0), h), strict=True)), "nothing": None}


@odd(*ROWS, targets=GOAL, tp=MLP)
class Remembers(TwoLayers):
    """A ring of earlier batches in a buffer, an integer that counts, means that move; read before they are written."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ring", torch.randn(8, 6))
        self.register_buffer("at", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.both(x)
        ring = self.ring.clone()
        out = h + (h @ ring.T).softmax(-1) @ ring - self.mean
        if self.training:
            rows = (self.at + torch.arange(x.shape[0])) % 8
            self.ring[rows] = h.detach()
            self.at.add_(x.shape[0])
            self.mean.lerp_(h.detach().mean(0), 0.1)
        return out


@odd(*ROWS, targets=GOAL, tp={**MLP, "slow_up": "tp, -"})
class SlowTwin(TwoLayers):
    """Buffers follow parameters by a moving mean, and are the target (BYOL)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slow_up", torch.randn(8, 6))
        self.register_buffer("slow_down", torch.randn(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.training:
                self.slow_up.mul_(0.9).add_(self.up.weight, alpha=0.1)
                self.slow_down.copy_(0.9 * self.slow_down + 0.1 * self.down.weight)
            goal = F.linear(F.linear(x, self.slow_up).tanh(), self.slow_down)
        return self.both(x) - goal


@odd(normal(5, 6), targets=(normal(5, 6),), tp=MLP, close=1e-5)
class MixedTypes(TwoLayers):
    """A part in float32, a cumulative sum of booleans, integers between."""

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(x.float(), self.up.weight.float(), self.up.bias.float()).tanh()
        count = (low > 0).cumsum(-1)
        parity = count.remainder(2).to(torch.int8)
        return self.down(low.to(x.dtype) * parity + count.to(torch.int32) / 8)


@odd(normal(7, 6), targets=(normal(7, 6),), tp=MLP)
class Centred(TwoLayers):
    """Statistics of the batch by hand: a whitening by them, running ones in buffers; seven rows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("moment", torch.eye(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.both(x)
        if self.training:
            mean = h.mean(0)
            moment = (h - mean).T @ (h - mean) / h.shape[0]
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * mean)
                self.moment.mul_(0.9).add_(0.1 * moment)
        else:
            mean, moment = self.mean, self.moment
        factor = torch.linalg.cholesky(moment + 0.1 * torch.eye(6, dtype=x.dtype))
        return torch.linalg.solve_triangular(factor, (h - mean).T, upper=False).T


@odd(normal(1, 6, 1), targets=(normal(1, 1, 6),), dp={}, tp=MLP)
class SizesOfOne(TwoLayers):
    """A batch of one, dims of one, squeezed and put back; sums over nothing, products over nothing."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.both(x.squeeze(-1)).unsqueeze(1)
        nothing = h[..., :0].sum(-1, keepdim=True) + h[..., :0].prod(-1, keepdim=True)
        return h * nothing + h.expand(1, 3, 6).mean(1, keepdim=True)


@odd(
    normal(6, 4),
    targets=(normal(6, 4),),
    dp={"args.0": "dp, -"},
    always={"guard": True},
    tp={"experts.0.weight": "tp, -"},
)
class HardMixture(nn.Module):
    """Rows go to the expert that they choose, by nonzero, and are put back by index."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 2), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        share, at = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (at == i).nonzero().squeeze(-1)
            out[rows] = expert(x[rows]) * share[rows, None]
        return out


@odd(normal(4, 6), normal(4, 6), targets=(normal(4, 6),), dp={"args.0": "dp, -", "args.1": "-, dp"}, tp=MLP)
class OtherSharding(TwoLayers):
    """Two inputs, sharded along two dims, meet in an outer sum, a swap of halves and a running mean over rows."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        h = self.both(a + b.flip(0))
        running = h.cumsum(0) / torch.arange(1, 5, dtype=h.dtype)[:, None]
        return torch.cat(running.split((2, 4), -1)[::-1], -1) + (a[:, None] * b[None]).mean((1,))


@odd(*ROWS, targets=GOAL, tp=MLP)
class InPlace(TwoLayers):
    """Views are written to, views of views read; an out= and a copy_."""

    def forward(self, x: Tensor) -> Tensor:
        h, out = self.both(x), torch.empty_like(x)
        out[:, ::2] = h[:, :3]
        out[:, 1::2] = h[:, 3:].flip(-1)
        out.diagonal().mul_(2)
        out.view(-1)[:5] += 1
        out.narrow(1, 2, 2).clamp_(-1, 1)
        torch.sigmoid_(out[:, 0])
        return out.T.contiguous().T.addcmul_(h, x, value=0.5)


@odd(*ROWS, loss=lambda out: out[1], tp={"codes": "tp, -"})
class Quantized(nn.Module):
    """The nearest code by squared distances, gradients straight through, and a moving mean of use in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.codes = nn.Linear(6, 4), nn.Parameter(torch.randn(5, 4))
        self.register_buffer("used", torch.zeros(5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.lift(x)
        at = (h.square().sum(-1, keepdim=True) - 2 * h @ self.codes.T + self.codes.square().sum(-1)).argmin(-1)
        code = F.embedding(at, self.codes)
        if self.training:
            self.used.mul_(0.9).add_(F.one_hot(at, 5).to(x.dtype).mean(0), alpha=0.1)
        loss = F.mse_loss(code, h.detach()) + 0.25 * F.mse_loss(h, code.detach())
        through = h + (code - h).detach()
        return through, loss + through.sin().mean()


@odd(*ROWS, normal(4, 6), loss=lambda out: contrast(*out), dp={"args.0": "dp, -", "args.1": "dp, -"}, tp=MLP)
class Contrast(TwoLayers):
    """Each row's pair among all rows of the batch, both ways (CLIP), with a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.normalize(self.both(a), dim=1), F.normalize(self.both(b), dim=1), self.scale


def contrast(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    logits, own = a @ b.T * scale.exp(), torch.arange(a.shape[0])
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2
