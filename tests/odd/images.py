"""Images and signals: samplers, unfold and fold, own kernels, transforms, sorting."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .odd_model import ids, normal, odd, waves

IMAGE = (normal(4, 3, 8, 8),)
CLASSES = (ids(5, 4),)


@odd(*IMAGE, targets=CLASSES, loss=F.cross_entropy, tp={"where.weight": "-, tp"})
class SpatialTransformer(nn.Module):
    """Where to look is learned: an affine grid, a bilinear sampler."""

    def __init__(self) -> None:
        super().__init__()
        self.where, self.head = nn.Linear(192, 6), nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        theta = self.where(x.flatten(1)).view(-1, 2, 3) * 0.1 + torch.eye(2, 3, dtype=x.dtype)
        grid = F.affine_grid(theta, [x.shape[0], 3, 6, 6], align_corners=False)
        return self.head(F.grid_sample(x, grid, padding_mode="border", align_corners=False).mean((2, 3)))


@odd(*IMAGE, targets=(normal(4, 4, 8, 8),), tp={"mix.weight": "tp, -"})
class UnfoldFold(nn.Module):
    """Patches are mixed by a matrix each, and overlap where they are put back."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(27, 16)

    def forward(self, x: Tensor) -> Tensor:
        patches = F.unfold(x, 3, padding=1, stride=2)
        mixed = self.mix(patches.mT).tanh().mT
        return F.fold(mixed, (8, 8), 2, stride=2) / F.fold(torch.ones_like(mixed), (8, 8), 2, stride=2)


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


@odd(*IMAGE, targets=(normal(4, 3, 8, 8),), tp={"mix.weight": "tp, -, -, -"})
class Shifts(nn.Module):
    """Groups of channels move by one, some around; coordinates are channels."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Conv2d(5, 8, 1), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        along = torch.linspace(-1, 1, 8, dtype=x.dtype)
        yx = torch.stack(torch.meshgrid(along, along, indexing="ij")).expand(x.shape[0], -1, -1, -1)
        a, b, c, d = self.mix(torch.cat((x, yx), 1)).chunk(4, 1)
        a, b = a.roll(1, -1), b.roll((-1, 2), (-1, -2))
        c, d = F.pad(c, (0, 0, 1, -1)), F.pad(d, (-2, 2), mode="constant", value=0.5)
        return self.out(torch.cat((a, b, c, d), 1).relu())


@odd(*IMAGE, targets=(normal(4, 2, 8, 8),), tp={"down.weight": "tp, -, -, -"})
class Unpooled(nn.Module):
    """Maxima are put back where they were; local response norm; reflection."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.local_response_norm(self.down(F.pad(x, (1, 1, 1, 1), mode="reflect")), 3, alpha=0.5)
        h, at = F.max_pool2d(h, 2, return_indices=True)
        return self.up(F.max_unpool2d(h, at, 2))


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
