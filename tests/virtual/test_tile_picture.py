"""The picture of tiles: all that is sent is in it, and how far layers reach."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import shardfx as sx
from shardfx.images.receptive_field import layer_margins
from shardfx.ir.ops.comm import rows_sent
from shardfx.visualize.tile_chart import messages
from tests.virtual.test_space import UNet, image, planned, squares


def unet(mesh: sx.Mesh) -> sx.ParallelModule:
    torch.manual_seed(0)
    x, axes = torch.zeros(2, 3, 32, 40), mesh.names
    sharding = ", ".join(axis if axis in axes else "-" for axis in ("dp", "-", "h", "w"))
    hints = sx.Hints(args=(x,), targets=(torch.zeros(2, 2, 32, 40),), loss=squares, specs={"args.0": sharding})
    return sx.parallelize(UNet("bilinear").eval(), mesh, hints, virtual=True)


@pytest.mark.long
def test_what_is_drawn_is_what_is_sent(tmp_path: Path) -> None:
    mesh = sx.Mesh(h=3)
    pm = unet(mesh)
    halos = [node for node in pm.planned.nodes if str(node.op) == "comm.halo"]
    for node in halos:
        drawn = messages(node, mesh)
        most = max(sum(each.nbytes for each in drawn if each.source == rank) for rank in range(mesh.size))
        assert most == rows_sent(node, mesh) and all(each.source != each.target for each in drawn)
    path = sx.images.draw_tiles(pm, tmp_path / "out" / "tiles.svg")
    text = path.read_text()
    arrows = len(re.findall(r"<title>rank \d to rank \d: ", text))
    assert arrows == sum(len(messages(node, mesh)) for node in halos)
    sent = sum(bool(messages(node, mesh)) for node in halos)
    assert f"{sent} halo exchanges" in text and ">Forward<" in text and ">Backward<" in text
    assert sent < len(halos) and " in 0 messages" not in text  # a part of what a rank has is no exchange


@pytest.mark.long
def test_margins_by_layer() -> None:
    margins = layer_margins(unet(sx.Mesh(h=2)))
    rows = [each.rows for each in margins]
    assert [each.layer for each in margins if "test_space" not in each.layer] == ["one", "two", "three", "four"]
    assert rows == [1, 2, 4, 8, 10, 11]
    far = nn.Sequential(nn.Conv2d(3, 4, 7, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    found = layer_margins(planned(far, image(1, 3, 16, 16), sx.Mesh(h=2)))
    assert [(each.layer, each.rows, each.note) for each in found] == [("0", 4, ""), ("1", 0, "the full image")]


def test_what_is_no_image_of_tiles(tmp_path: Path) -> None:
    pm = planned(nn.Conv2d(3, 2, 3, padding=1), image(2, 3, 8, 8), sx.Mesh(dp=2))
    with pytest.raises(sx.Error, match=r"args\.0 is not sharded into tiles"):
        sx.images.draw_tiles(pm, tmp_path / "tiles.svg")
    with pytest.raises(sx.Error, match=r"there is no input 'args\.1'"):
        sx.images.draw_tiles(pm, tmp_path / "tiles.svg", "args.1")
