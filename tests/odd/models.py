"""Sound and uncommon models: scatter, spectral convolutions, scans, buffers that change, tied and computed weights."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from .odd_model import MLP, TwoLayers, ids, normal, odd

ROWS, GOAL = (normal(4, 6),), (normal(4, 6),)


EDGES = ids(6, 2, 10)


@odd(normal(6, 5), EDGES, targets=(normal(6, 8),), dp={"args.0": "dp, -"}, tp={"lift.weight": "tp, -"})
class EdgeSoftmax(nn.Module):
    """Shares of edges among those that end at one node: a maximum, a sum and a division by scatter (GAT)."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.a = nn.Linear(5, 8, bias=False), nn.Parameter(torch.randn(2, 8))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        (start, end), h = edges, self.lift(x)
        score = F.leaky_relu((h @ self.a[0])[start] + (h @ self.a[1])[end], 0.2)
        most = torch.full((x.shape[0],), -1e9, dtype=x.dtype).scatter_reduce(0, end, score.detach(), "amax")
        score = (score - most[end]).exp()
        whole = torch.zeros(x.shape[0], dtype=x.dtype).scatter_add(0, end, score)
        sent = h[start] * (score / whole[end])[:, None]
        return torch.zeros_like(h).scatter_add(0, end[:, None].expand_as(sent), sent)


IMAGE = (normal(4, 3, 8, 8),)


@odd(*IMAGE, targets=(normal(4, 4, 8, 8),), tp={"bank": "-, tp, -, -, -"})
class OwnKernels(nn.Module):
    """Samples become groups, so that each is convolved by its own kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.bank, self.route = nn.Parameter(torch.randn(3, 4, 3, 3, 3)), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        b = x.shape[0]
        weights = torch.einsum("bk,koihw->boihw", self.route(x.mean((2, 3))).softmax(-1), self.bank).flatten(0, 1)
        return F.conv2d(x.reshape(1, b * 3, 8, 8), weights, padding=1, groups=b).view(b, 4, 8, 8)


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


@odd(*ROWS, targets=GOAL)
class SpectralNormed(nn.Module):
    """A power iteration in buffers at each step of training, twice in one step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = parametrizations.spectral_norm(nn.Linear(6, 8)), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu() + self.a(x.flip(0)).relu())


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
