"""Images: samplers, shuffles, unfold and fold, dynamic and turned kernels, capsules, wavelets."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .odd_model import ids, normal, odd

IMAGE = (normal(4, 3, 8, 8),)
CLASSES = (ids(5, 4),)
ROWS = {"args.0": "dp, -, -, -"}


@odd(*IMAGE, targets=(normal(4, 3, 16, 16),), tp={"a.weight": "tp, -, -, -"})
class SubPixel(nn.Module):
    """Channels become pixels; and back, to be compared."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 12, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        big = F.pixel_shuffle(self.b(self.a(x).relu()), 2)
        return big - F.pixel_shuffle(F.pixel_unshuffle(big, 2).flip(1), 2)


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
class Wavelets(nn.Module):
    """Haar's transform by slices, its bands mixed, and back by a transposed convolution with fixed weights."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(12, 12, 1)
        signs = torch.tensor([[1.0, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2
        self.register_buffer("back", signs.view(4, 1, 2, 2).repeat(3, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = x[..., ::2, ::2], x[..., ::2, 1::2], x[..., 1::2, ::2], x[..., 1::2, 1::2]
        bands = torch.stack((a + b + c + d, a - b + c - d, a + b - c - d, a - b - c + d), 2) / 2
        return F.conv_transpose2d(self.mix(bands.flatten(1, 2)), self.back, stride=2, groups=3)


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


@odd(*IMAGE, targets=(normal(4, 8, 8),), tp={"conv.weight": "tp, -, -, -"})
class IntegralImage(nn.Module):
    """Means over boxes from running sums over both dims, then an image tall for its maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gain = nn.Conv2d(3, 4, 1), nn.Parameter(torch.tensor([2.0]))

    def forward(self, x: Tensor) -> Tensor:
        sums = F.pad(self.conv(x).cumsum(2).cumsum(3), (3, 0, 3, 0))
        box = sums[..., 3:, 3:] - sums[..., :-3, 3:] - sums[..., 3:, :-3] + sums[..., :-3, :-3]
        running = box.sum(1).cummax(1).values
        return running * self.gain


@odd(normal(4, 3, 6, 6, 6), targets=(normal(4, 2),), tp={"conv.weight": "tp, -, -, -, -"})
class Volumes(nn.Module):
    """Three dims: dilated and in groups, an average pool, trilinear resizing, instance norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.deep = nn.Conv3d(3, 4, 3, padding=2, dilation=2), nn.Conv3d(4, 4, 1, groups=2)
        self.norm, self.out = nn.InstanceNorm3d(4, affine=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = F.avg_pool3d(self.norm(self.conv(x)).relu(), 2)
        h = F.interpolate(self.deep(h), scale_factor=2, mode="trilinear")
        return self.out(h.var((2, 3, 4)))
