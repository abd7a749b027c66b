"""Synthetic terrain, and two models that segment its land cover: for examples/large_image.py."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 4


def conv(a: int, b: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU())


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three, self.back = conv(3, 16), conv(16, 24), conv(24, 32), conv(56, 24)
        self.head = nn.Sequential(conv(40, 16), nn.Conv2d(16, CLASSES, 1))

    def forward(self, x: Tensor) -> Tensor:
        a = self.one(x)
        b = self.two(F.max_pool2d(a, 2))
        c = self.back(torch.cat([b, F.interpolate(self.three(F.max_pool2d(b, 2)), scale_factor=2.0)], 1))
        return self.head(torch.cat([a, F.interpolate(c, scale_factor=2.0, mode="bilinear")], 1))


class Pyramid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.two = conv(3, 32, 2), nn.Sequential(conv(32, 32), conv(32, 32)), conv(32, 48, 2)
        self.left, self.right = nn.Conv2d(32, 24, 1), nn.Conv2d(48, 24, 1)
        self.head = nn.Sequential(conv(24, 16), nn.Conv2d(16, CLASSES, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.one(x)
        x = self.left(x) + F.interpolate(self.right(self.two(x)), scale_factor=2.0, mode="bilinear")
        return F.interpolate(self.head(x), scale_factor=2.0, mode="bilinear")


def terrain(*scene: int) -> tuple[Tensor, Tensor]:
    """Heights from noise of several scales, as three bands; and the land cover by height."""
    drawn = torch.Generator().manual_seed(0)
    sizes = [(2**i + 1, 2**i + 1) for i in range(1, 7)]
    noise = [torch.randn(1, 1, *size, generator=drawn) * 2.0**-i for i, size in enumerate(sizes)]
    height = sum(F.interpolate(each, scene, mode="bicubic", align_corners=True) for each in noise)[0, 0]
    bands = torch.stack([height, *torch.gradient(height)]) + 0.1 * torch.randn(3, *scene, generator=drawn)
    return bands, torch.bucketize(height, torch.tensor([-0.8, 0.0, 0.8]))
