"""Densities and objectives: flows, mixtures, chains, contrasts, quantizers; losses that need the whole batch."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .odd_model import MLP, TwoLayers, ids, normal, odd, uniform

ROWS = (normal(4, 6),)


def first(out: Tensor | tuple[Tensor, ...], *_: Tensor) -> Tensor:
    """What a model gives first is its loss."""
    return out if isinstance(out, Tensor) else out[0]


@odd(
    *ROWS,
    loss=lambda out: -(out[1] - (out[0] ** 2).sum(-1) / 2).mean(),
    tp={"mix": "tp, -"},
    more={"zero": 3, "zero_min_numel": 0},
)
class Determinants(nn.Module):
    """A free matrix with its log determinant, norms of activations, planar steps (Glow)."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.scale = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.rand(6) + 0.5)
        self.w, self.u, self.b = (
            nn.Parameter(torch.randn(6)),
            nn.Parameter(torch.randn(6)),
            nn.Parameter(torch.zeros(())),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x * self.scale @ self.mix
        total = torch.linalg.slogdet(self.mix).logabsdet + self.scale.abs().log().sum()
        h = torch.tanh(x @ self.w + self.b)
        u = self.u + (F.softplus(self.w @ self.u) - 1 - self.w @ self.u) * self.w / self.w.square().sum()
        return x + torch.outer(h, u), total + (1 + (1 - h**2) * (self.w @ u)).abs().log()


@odd(*ROWS, targets=(normal(4, 2),), loss=lambda out, y: -mixture(out, y).mean(), tp=MLP)
class MixtureOfNormals(TwoLayers):
    """Weights, means and spreads of three normals in two dims."""

    def __init__(self) -> None:
        super().__init__(out=15)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        weight, mean, spread = self.both(x).split((3, 6, 6), -1)
        return {"weight": weight, "mean": mean.unflatten(-1, (3, 2)), "spread": spread.unflatten(-1, (3, 2))}


def mixture(out: dict[str, Tensor], y: Tensor) -> Tensor:
    normal = (
        -0.5 * ((y.unsqueeze(1) - out["mean"]) / out["spread"].exp()) ** 2 - out["spread"] - 0.5 * math.log(2 * math.pi)
    )
    return torch.logsumexp(out["weight"].log_softmax(-1) + normal.sum(-1), -1)


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


@odd(
    *ROWS,
    uniform(4, 5),
    targets=(normal(4, 3),),
    dp={"args.0": "dp, -", "args.1": "dp, -"},
    tp={"logits.weight": "tp, -"},
)
class Straight(nn.Module):
    """A hard choice by given Gumbel noise, the soft one's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.logits, self.values = nn.Linear(6, 5), nn.Linear(5, 3, bias=False)

    def forward(self, x: Tensor, drawn: Tensor) -> Tensor:
        soft = ((self.logits(x) - (-drawn.log()).log()) / 0.7).softmax(-1)
        hard = torch.zeros_like(soft).scatter_(-1, soft.argmax(-1, keepdim=True), 1.0)
        return self.values(hard - soft.detach() + soft)


@odd(
    *ROWS,
    loss=lambda out: out,
    tp={"up.weight": "tp, -"},
    more={"zero": 1, "zero_min_numel": 1},
    warns="no gradient for 1 of 4",
)
class ScoreMatching(TwoLayers):
    """The gradient of an energy within the forward, and the trace of its derivative along given directions."""

    def __init__(self) -> None:
        super().__init__(out=1)

    def forward(self, x: Tensor) -> Tensor:
        """By hand: the energy is down(tanh(up x))."""
        h = torch.tanh(self.up(x))
        slope = (1 - h**2) * self.down.weight
        score = slope @ self.up.weight
        bend = ((-2 * h * slope) * self.up.weight.square().sum(1)).sum(1)
        return (bend + 0.5 * score.square().sum(1)).mean()


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


@odd(*ROWS, normal(4, 6), loss=lambda out: out[0] + out[1], dp={"args.0": "dp, -", "args.1": "dp, -"}, tp=MLP)
class Redundancy(TwoLayers):
    """Correlations over the batch near one and near none (Barlow), spreads and covariances (VICReg)."""

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.both(a), self.both(b)
        z, w = ((each - each.mean(0)) / (each.std(0) + 1e-3) for each in (a, b))
        c = z.T @ w / a.shape[0]
        one = torch.eye(6, dtype=torch.bool)
        barlow = (c.diagonal() - 1).square().sum() + 0.01 * c.masked_fill(one, 0).square().sum()
        spread = F.relu(1 - (a.var(0) + 1e-4).sqrt()).mean()
        return barlow, spread + torch.cov(a.T).masked_select(~one).square().sum() / 6


@odd(
    normal(6, 5), ids(3, 6), loss=lambda out, *_: out, dp={"args.0": "dp, -", "args.1": "dp"}, tp={"up.weight": "tp, -"}
)
class HardTriplets(nn.Module):
    """The farthest of the same class, the nearest of another, of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 4)

    def forward(self, x: Tensor, of: Tensor) -> Tensor:
        h = self.up(x)
        apart = ((h[:, None] - h) ** 2).sum(-1)
        same = of[:, None] == of
        far = apart.masked_fill(~same, 0).amax(1)
        near = apart.masked_fill(same, 1e4).amin(1)
        return F.softplus(far - near).mean()


@odd(
    normal(7, 4, 5),
    targets=(ids(3, 4),),
    loss=lambda out, y: alignments(out, y),
    dp={"args.0": "-, dp, -"},
    tp={"head.weight": "tp, -"},
)
class Aligned(nn.Module):
    """A sum over all alignments of a sequence with a shorter one, by a loop; the batch is the second dim."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).log_softmax(-1)


def alignments(out: Tensor, last: Tensor) -> Tensor:
    words = torch.stack((last, last + 1, last + 2), 1)
    alpha = F.pad(torch.zeros_like(out[0, :, :1]), (0, 2), value=-1e4)
    for each in out:
        moved = F.pad(alpha[:, :-1], (1, 0), value=-1e4)
        alpha = torch.logaddexp(alpha, moved) + each.gather(1, words)
    return -alpha[:, -1].mean()


@odd(*ROWS, targets=(normal(4),), loss=lambda out, y: gaussian_process(*out, y), tp={"up.weight": "tp, -"})
class DeepKernel(nn.Module):
    """A process over the batch: a kernel of features, a Cholesky factor, a marginal likelihood."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.noise = nn.Linear(6, 5), nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.up(x).tanh()
        return torch.exp(-((h[:, None] - h).square().sum(-1))), F.softplus(self.noise)


def gaussian_process(kernel: Tensor, noise: Tensor, y: Tensor) -> Tensor:
    factor = torch.linalg.cholesky(kernel + noise * torch.eye(kernel.shape[0], dtype=kernel.dtype))
    solved = torch.cholesky_solve(y[:, None], factor)[:, 0]
    return 0.5 * y @ solved + factor.diagonal().log().sum()


@odd(*ROWS, targets=(ids(4, 4),), loss=lambda out, y: evidential(out, y), tp=MLP)
class Evidence(TwoLayers):
    """Parameters of a Dirichlet, whose divergence has gamma functions."""

    def __init__(self) -> None:
        super().__init__(out=4)

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(self.both(x)) + 1


def evidential(alpha: Tensor, y: Tensor) -> Tensor:
    hot, total = F.one_hot(y, 4).to(alpha.dtype), alpha.sum(1, keepdim=True)
    fit = (hot * (torch.digamma(total) - torch.digamma(alpha))).sum(1)
    rest = hot + (1 - hot) * alpha
    apart = torch.lgamma(rest.sum(1)) - torch.lgamma(rest).sum(1) - math.lgamma(4)
    apart = apart + ((rest - 1) * (torch.digamma(rest) - torch.digamma(rest.sum(1, keepdim=True)))).sum(1)
    return (fit + 0.1 * apart).mean()
