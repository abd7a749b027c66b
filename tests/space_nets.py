"""Models that are run on tiles of an image: small, and of the shapes of those that people train."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.virtual.test_space import Block


class ResNet18(nn.Module):
    """A stem, four levels of two blocks each, the mean of all places, and a linear map."""

    def __init__(self, wide: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, wide, 7, 2, 3, bias=False), nn.BatchNorm2d(wide), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        sizes = [wide, wide, 2 * wide, 4 * wide, 8 * wide]
        self.levels = nn.ModuleList(
            nn.Sequential(Block(a, b, 1 if i == 0 else 2), Block(b, b, 1))
            for i, (a, b) in enumerate(itertools.pairwise(sizes))
        )
        self.head = nn.Linear(8 * wide, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for level in self.levels:
            x = level(x)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Pyramid(nn.Module):
    """A feature pyramid over a ResNet-18: levels are enlarged to the one above, by nearest neighbours."""

    def __init__(self) -> None:
        super().__init__()
        net = ResNet18()
        self.stem, self.levels = net.stem, net.levels
        self.beside = nn.ModuleList(nn.Conv2d(wide, 4, 1) for wide in (4, 8, 16, 32))
        self.out = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y, found = self.stem(x), []
        for level, beside in zip(self.levels, self.beside, strict=True):
            y = level(y)
            found.append(beside(y))
        z = found.pop()
        while found:
            z = found[-1] + F.interpolate(z, size=found.pop().shape[2:], mode="nearest")
        return F.interpolate(self.out(z), size=x.shape[2:], mode="bilinear", align_corners=False)


class DeepLab(nn.Module):
    """Dilated convolutions side by side, with the mean of the whole image among them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3, 1, 2, 2))
        self.branches = nn.ModuleList(
            [nn.Conv2d(6, 4, 1), *(nn.Conv2d(6, 4, 3, padding=d, dilation=d) for d in (2, 4, 6))]
        )
        self.all, self.head = nn.Conv2d(6, 4, 1), nn.Conv2d(20, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        mean = self.all(F.adaptive_avg_pool2d(y, 1))
        mean = F.interpolate(mean, size=y.shape[2:], mode="bilinear", align_corners=False)
        z = self.head(torch.cat([*(F.relu(branch(y)) for branch in self.branches), mean], 1))
        return F.interpolate(z, size=x.shape[2:], mode="bilinear", align_corners=False)


class WindowBlock(nn.Module):
    """Attention within windows, of an image that is rolled by a part of a window, and a perceptron."""

    def __init__(self, wide: int, side: int, roll: int) -> None:
        super().__init__()
        self.heads, self.side, self.roll = 2, side, roll
        self.norm, self.qkv, self.proj = nn.LayerNorm(wide), nn.Linear(wide, 3 * wide), nn.Linear(wide, wide)
        self.mlp = nn.Sequential(nn.LayerNorm(wide), nn.Linear(wide, 2 * wide), nn.GELU(), nn.Linear(2 * wide, wide))

    def forward(self, x: Tensor) -> Tensor:
        n, h, w, c = x.shape
        s, y = self.side, self.norm(x)
        if self.roll:
            y = torch.roll(y, (-self.roll, -self.roll), (1, 2))
        y = y.view(n, h // s, s, w // s, s, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, s * s, c)
        q, k, v = self.qkv(y).reshape(-1, s * s, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        y = self.proj(y.transpose(1, 2).reshape(-1, s * s, c))
        y = y.view(n, h // s, w // s, s, s, c).permute(0, 1, 3, 2, 4, 5).reshape(n, h, w, c)
        if self.roll:
            y = torch.roll(y, (self.roll, self.roll), (1, 2))
        x = x + y
        return x + self.mlp(x)


class Swin(nn.Module):
    """Patches, two blocks of windows, patches merged, a third block."""

    def __init__(self, wide: int = 8, side: int = 4) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, wide, 2, 2)
        self.first, self.second = WindowBlock(wide, side, 0), WindowBlock(wide, side, side // 2)
        self.merge, self.third = nn.Linear(4 * wide, 2 * wide, bias=False), WindowBlock(2 * wide, side, side // 2)
        self.head = nn.Linear(2 * wide, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(self.patch(x).permute(0, 2, 3, 1)))
        x = torch.cat([x[:, i::2, j::2] for j in range(2) for i in range(2)], -1)
        return self.head(self.third(self.merge(x))).permute(0, 3, 1, 2)


class UNet3d(nn.Module):
    """One level down and up again of a volume."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv3d(1, 2, 3, padding=1), nn.Conv3d(2, 4, 3, padding=1)
        self.norm, self.back = nn.InstanceNorm3d(4, affine=True), nn.ConvTranspose3d(4, 2, 2, stride=2)
        self.three = nn.Conv3d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.relu(self.one(x))
        b = torch.relu(self.norm(self.two(F.max_pool3d(a, 2))))
        y = F.avg_pool3d(self.three(torch.cat([a, self.back(b)], 1)), 2)
        return F.interpolate(y, scale_factor=2.0, mode="trilinear", align_corners=False)


class Logits(nn.Module):
    """The logits of a model of transformers alone."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(pixel_values=x).logits
        return logits


def convnext() -> nn.Module:
    """ConvNeXt of transformers."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    return Logits(
        ConvNextForImageClassification(ConvNextConfig(hidden_sizes=[4, 6, 8, 10], depths=[1, 1, 2, 1], num_labels=3))
    )


def segformer() -> nn.Module:
    """SegFormer of transformers: its attention sees the whole image, by keys of fewer places."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(
        depths=[1, 1, 1, 1],
        hidden_sizes=[4, 6, 8, 8],
        num_attention_heads=[1, 2, 2, 2],
        sr_ratios=[4, 2, 2, 1],
        decoder_hidden_size=8,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        classifier_dropout_prob=0.0,
        drop_path_rate=0.0,
    )
    return Logits(SegformerForSemanticSegmentation(config))
