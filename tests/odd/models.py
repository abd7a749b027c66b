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
CLASSES = (ids(5, 4),)


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


@odd(normal(4, 3, 8, 8), targets=(normal(4, 4, 8, 8),), tp={"low": "-, tp, -, -", "bypass.weight": "tp, -, -, -"})
class FourierOperator(nn.Module):
    """Low frequencies are multiplied by complex weights, the others are dropped (FNO)."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.bypass = nn.Parameter(torch.randn(3, 4, 3, 3) + 0j), nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft2(x)
        out = torch.zeros(x.shape[0], 4, *waves.shape[-2:], dtype=waves.dtype)
        out[:, :, :3, :3] = torch.einsum("bixy,ioxy->boxy", waves[:, :, :3, :3], self.low)
        return F.gelu(torch.fft.irfft2(out, s=x.shape[-2:]) + self.bypass(x))


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


@odd(
    normal(6, 4),
    targets=(normal(6, 4),),
    dp={"args.0": "dp, -"},
    more={"guard": True},
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


@odd(*ROWS, targets=GOAL)
class SpectralNormed(nn.Module):
    """A power iteration in buffers at each step of training, twice in one step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = parametrizations.spectral_norm(nn.Linear(6, 8)), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu() + self.a(x.flip(0)).relu())


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
