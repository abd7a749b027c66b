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


@odd(*IMAGE, targets=(normal(4, 3, 8, 8),))
class Involution(nn.Module):
    """A kernel for each pixel, shared by channels."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Conv2d(3, 9, 1)

    def forward(self, x: Tensor) -> Tensor:
        kernels = self.make(x).softmax(1).unsqueeze(1)
        return (F.unfold(x, 3, padding=1).unflatten(1, (3, 9)).unflatten(-1, (8, 8)) * kernels).sum(2)


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


@odd(*IMAGE, targets=CLASSES, loss=F.cross_entropy, tp={"conv.weight": "tp, -, -, -", "a.weight": "-, tp"})
class ChannelsAndPlaces(nn.Module):
    """Gates for channels from means and maxima, for places from both (CBAM)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.a, self.b = nn.Conv2d(3, 8, 3), nn.Linear(8, 2), nn.Linear(2, 8)
        self.place, self.head = nn.Conv2d(2, 1, 3, padding=1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        gate = sum(self.b(self.a(each).relu()) for each in (h.mean((2, 3)), h.amax((2, 3))))
        h = h * gate.sigmoid()[..., None, None]
        h = h * self.place(torch.cat((h.mean(1, True), h.max(1, True).values), 1)).sigmoid()
        return self.head(F.adaptive_max_pool2d(h, 1).flatten(1))


@odd(*IMAGE, targets=CLASSES, loss=F.cross_entropy, more={"recompute": "lift"})
class TurnedKernels(nn.Module):
    """One kernel in four directions, a maximum over them."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.lift, self.head = nn.Parameter(torch.randn(4, 3, 3, 3)), nn.Conv2d(3, 3, 1), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        ways = [F.conv2d(x, self.kernel.rot90(iteration, (2, 3))) for iteration in range(4)]
        return self.head(torch.stack(ways).amax(0).sum((-1, -2)))


@odd(*IMAGE, targets=CLASSES, loss=lambda out, y: F.multi_margin_loss(out, y), tp={"votes": "-, tp, -, -"})
class Capsules(nn.Module):
    """Votes of small vectors, routed by agreement in three rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.votes = nn.Conv2d(3, 8, 4, stride=4), nn.Parameter(torch.randn(8, 5, 4, 6))

    @staticmethod
    def squashed(x: Tensor) -> Tensor:
        square = (x**2).sum(-1, keepdim=True)
        return square / (1 + square) * x / (square + 1e-8).sqrt()

    def forward(self, x: Tensor) -> Tensor:
        u = self.squashed(self.first(x).unflatten(1, (2, 4)).permute(0, 1, 3, 4, 2).flatten(1, 3))
        votes = torch.einsum("bnd,nkde->bnke", u, self.votes)
        logits = torch.zeros(votes.shape[:3], dtype=x.dtype)
        for _ in range(3):
            out = self.squashed((logits.softmax(2)[..., None] * votes).sum(1))
            logits = logits + (votes * out[:, None]).sum(-1).detach()
        return torch.linalg.vector_norm(out, dim=-1)


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


@odd(*IMAGE, targets=CLASSES, loss=F.cross_entropy, tp={"centres": "tp, -"})
class Residues(nn.Module):
    """Sums of residues to centres, by shares (NetVLAD), then roots with signs."""

    def __init__(self) -> None:
        super().__init__()
        self.centres, self.share, self.head = nn.Parameter(torch.randn(4, 3)), nn.Conv2d(3, 4, 1), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        share, flat = self.share(x).flatten(2).softmax(1), x.flatten(2)
        sums = torch.einsum("bkn,bdn->bkd", share, flat) - share.sum(2, keepdim=True) * self.centres
        sums = F.normalize(sums, dim=2).flatten(1)
        return self.head(F.normalize(sums.sign() * (sums.abs() + 1e-6).sqrt(), dim=1))


@odd(*IMAGE, targets=(normal(4, 16),), tp={"conv.weight": "tp, -, -, -"})
class SecondOrder(nn.Module):
    """Covariances of channels, and their root by Newton's steps."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x).flatten(2)
        h = h - h.mean(2, keepdim=True)
        c = h @ h.mT / h.shape[2] + 0.1 * torch.eye(4, dtype=x.dtype)
        trace = c.diagonal(dim1=1, dim2=2).sum(-1)[:, None, None]
        y, z, three = c / trace, torch.eye(4, dtype=x.dtype).expand_as(c), 3 * torch.eye(4, dtype=x.dtype)
        for _ in range(3):
            t = (three - z @ y) / 2
            y, z = y @ t, t @ z
        return (y * trace.sqrt()).flatten(1)


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


@odd(*IMAGE, targets=(normal(4, 4, 6, 6),), tp={"w": "tp, -, -"})
class Deformed(nn.Module):
    """Nine places around each pixel, each moved by a learned offset, read between pixels by four gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets, self.w = nn.Conv2d(3, 18, 3), nn.Parameter(torch.randn(4, 3, 9))

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(6, dtype=x.dtype)
        steps = torch.tensor([(i, j) for i in range(3) for j in range(3)], dtype=x.dtype)
        dy, dx = self.offsets(x).tanh().unflatten(1, (2, 9)).unbind(1)
        y = (at[:, None] + steps[:, 0, None, None] + dy).clamp(0, 6.999)
        z = (at + steps[:, 1, None, None] + dx).clamp(0, 6.999)
        read, flat = 0.0, x.flatten(2)
        for i in (0, 1):
            for j in (0, 1):
                rows, columns = y.floor() + i, z.floor() + j
                share = (1 - (y - rows).abs()) * (1 - (z - columns).abs())
                index = (rows * 8 + columns).long().flatten(1)[:, None].expand(-1, 3, -1)
                read = read + flat.gather(2, index).unflatten(2, (9, 6, 6)) * share[:, None]
        return torch.einsum("bcphw,ocp->bohw", read, self.w)


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
