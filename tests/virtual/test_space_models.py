"""Models that people train, on tiles of an image: numbers are those of one device, proven, and little is gathered."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import nn

import shardfx as sx
from tests.space_nets import DeepLab, Pyramid, ResNet18, Swin, UNet3d, convnext, segformer

from .test_space import UNet, image, ops, trained

MESHES = {
    "h": sx.Mesh(h=2),
    "w": sx.Mesh(w=2),
    "2x2": sx.Mesh(h=2, w=2),
    "3x1": sx.Mesh(h=3, w=1),
    "2x2x2": sx.Mesh(h=2, w=2, d=2),
}


class Net(NamedTuple):
    """A model, the shape of its image, and whether something of it is gathered in any case."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    gathers: bool = False


NETS = {
    "unet": Net(UNet, (1, 3, 32, 40)),
    "unet of odd sizes": Net(lambda: UNet("bilinear"), (2, 3, 20, 28)),
    "resnet": Net(ResNet18, (2, 3, 61, 77)),
    "pyramid": Net(Pyramid, (1, 3, 57, 71)),
    "deeplab": Net(DeepLab, (2, 3, 33, 25)),
    "swin": Net(Swin, (1, 3, 48, 32)),
    "convnext": Net(convnext, (1, 3, 64, 64)),
    "segformer": Net(segformer, (1, 3, 64, 64), gathers=True),
    "volume": Net(UNet3d, (1, 1, 12, 8, 8)),
}


def on_tiles(name: str, mesh: str) -> sx.ParallelModule:
    torch.manual_seed(0)
    net = NETS[name]
    with warnings.catch_warnings():
        if net.gathers:
            warnings.simplefilter("ignore", sx.ShardfxWarning)
        return trained(net.make(), image(*net.shape), MESHES[mesh], len(net.shape) - 2)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["h", "w", "2x2", "3x1"])
@pytest.mark.parametrize("name", NETS)
def test_models_train_on_tiles(name: str, mesh: str) -> None:
    pm = on_tiles(name, mesh)
    assert "comm.halo" in ops(pm) and pm.verify()
    assert NETS[name].gathers or "comm.all_gather" not in ops(pm)


@pytest.mark.slow
def test_a_volume_is_cut_three_ways() -> None:
    pm = on_tiles("volume", "2x2x2")
    assert pm.verify() and "comm.all_gather" not in ops(pm)


def test_a_stride_over_tiles_that_it_does_not_divide() -> None:
    """16 rows for three ranks are no blocks of two: the rows at the seams are exchanged."""
    torch.manual_seed(0)
    first = nn.Conv2d(3, 4, 3, padding=1)
    net = nn.Sequential(first, nn.AvgPool2d(2), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 2, 2))
    pm = trained(net, image(1, 3, 26, 8), MESHES["3x1"])
    assert {op for op in ops(pm) if op.startswith("comm.")} == {"comm.halo", "comm.all_reduce"}
    assert pm.verify()
