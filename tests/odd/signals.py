"""Transforms, sorting, splines, kernels and small solvers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .odd_model import ids, normal, odd, uniform, waves

ROWS, GOAL = (normal(4, 6),), (normal(4, 6),)


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


@odd(normal(4, 16), targets=(normal(4, 5),), tp={"mel": "tp, -"})
class Spectrogram(nn.Module):
    """Frames by unfold, a window, magnitudes, a learned bank of filters in decibels."""

    def __init__(self) -> None:
        super().__init__()
        self.mel = nn.Parameter(torch.rand(5, 5) + 0.1)
        self.register_buffer("window", torch.hann_window(8))

    def forward(self, x: Tensor) -> Tensor:
        frames = torch.fft.rfft(x.unfold(-1, 8, 4) * self.window)
        return (frames.abs().square() @ self.mel.T).clamp_min(1e-5).log10().mean(1) * 10


@odd(waves(4, 6), targets=(normal(4, 5),), tp={"w": "tp, -"})
class ComplexLayers(nn.Module):
    """Complex in, conjugates, a modulus with a learned threshold, real out."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = (nn.Parameter(torch.randn(n, m) + 1j * torch.randn(n, m)) for n, m in ((8, 6), (5, 8)))
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.w.mH.conj().resolve_conj().mT.mT
        size = h.abs() + 1e-6
        h = F.relu(size + self.bias) / size * h
        out = h @ self.v.mT
        return (out * out.conj()).real.sqrt() + out.angle().cos()


@odd(*ROWS, targets=GOAL, tp={"a.weight": "tp, -"})
class Sorted(nn.Module):
    """Sorted features, ranks, running extremes, the median, the k-th, differences."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        ordered, at = h.sort(-1, descending=True)
        ranks = at.argsort(-1).to(x.dtype)
        running = h.cummax(-1).values - h.cummin(-1).values
        middle = h.median(-1, keepdim=True).values + h.kthvalue(2, -1, keepdim=True).values
        return self.b(ordered + running + 0.1 * ranks * h) + middle + F.pad(ordered.diff(dim=-1), (0, 1))


@odd(*ROWS, targets=GOAL, tp={"heights": "-, tp"})
class Looked(nn.Module):
    """Values between learned heights: searchsorted, gather, lerp (a piecewise linear calibrator)."""

    def __init__(self) -> None:
        super().__init__()
        self.heights = nn.Parameter(torch.randn(5, 6))
        self.register_buffer("knots", torch.tensor([-1.0, -0.3, 0.1, 0.8]))

    def forward(self, x: Tensor) -> Tensor:
        at = torch.bucketize(x.detach(), self.knots)
        below, above = (self.heights.gather(0, each.clamp(0, 4)) for each in (at - 1, at))
        return torch.lerp(below, above, x.sigmoid())


@odd(
    normal(4, 7, 3),
    normal(4, 7, 2),
    targets=(normal(4, 3, 2),),
    dp={"args.0": "dp, -, -", "args.1": "dp, -, -"},
    tp={"lift.weight": "tp, -"},
)
class Ridge(nn.Module):
    """A regression for each sample, solved within the model; its weights are the result."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.weight = nn.Linear(3, 3), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.lift(x)
        gram = h.mT @ h + self.weight.exp() * torch.eye(3, dtype=x.dtype)
        return torch.linalg.solve(gram, h.mT @ y)


@odd(normal(4, 5, 5), targets=(normal(4, 5),), tp={"w": "tp, -"})
class Spectra(nn.Module):
    """Eigenvalues of symmetric matrices, singular values, a determinant, an inverse."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        a = self.w @ x
        values = torch.linalg.eigvalsh(a + a.mT) + torch.linalg.svdvals(a)
        inverse = torch.linalg.inv(a @ a.mT + torch.eye(5, dtype=x.dtype))
        return values * inverse.diagonal(dim1=-2, dim2=-1) + torch.linalg.det(x).tanh().unsqueeze(-1)


@odd(normal(4, 5, 3), targets=(normal(4, 3),), tp={"w": "tp, -"})
class Grassmann(nn.Module):
    """Bases by QR, projections, a triangular solve."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        q, r = torch.linalg.qr(self.w @ x)
        return torch.linalg.solve_triangular(r, q.mT @ x, upper=True).diagonal(dim1=1, dim2=2).tanh()


@odd(uniform(4, 6), targets=(normal(4, 6),), tp={"p": "tp"})
class Specials(nn.Module):
    """Functions that few models have: erfinv, lgamma, i0e, sinc, xlogy, hypot, atan2, logaddexp, cumprod, frac."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = nn.Parameter(torch.rand(6) + 0.5), nn.Parameter(torch.rand(6) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.erfinv(x * 0.9) + torch.lgamma(x + self.p) + torch.special.i0e(x * self.q)
        b = torch.sinc(x) + torch.xlogy(x, self.p) + torch.hypot(x, self.q) + torch.atan2(x, self.p)
        c = torch.logaddexp(x, self.q) + x.cumprod(1) + (x * 3).frac() + torch.copysign(self.p, x - 0.5)
        return (
            a
            + b * torch.special.expit(c)
            + torch.heaviside(x.detach() - 0.5, self.q.detach())
            + torch.polygamma(1, x + 1)
        )


@odd(ids(12, 4, 5), targets=(normal(4, 5, 6),), tp={"low.weight": "tp, -"})
class ResidueNumbers(nn.Module):
    """Ids in digits: integer division, remainders, bits, comparisons, wheres of both."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Embedding(4, 6), nn.Embedding(3, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        odd_ones = (tokens & 1).bool() ^ (tokens > 6)
        shift = torch.bitwise_right_shift(tokens, 1).to(torch.float64) / 10
        return torch.where(odd_ones[..., None], self.low(tokens % 4), self.high(tokens // 4)) * shift[..., None]
