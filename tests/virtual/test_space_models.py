"""Models that people train, on tiles of an image: numbers are those of one device, proven, and little is gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import shardfx as sx
from tests.collective_counts import count_collectives

from .test_space import energy, image, ops, specs, trained

MESHES = {
    "h": sx.Mesh(h=2),
    "2x2": sx.Mesh(h=2, w=2),
    "3x1": sx.Mesh(h=3, w=1),
}


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


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "deeplab": (DeepLab, (2, 3, 33, 25)),
    "swin": (Swin, (1, 3, 48, 32)),
}


@pytest.mark.long
@pytest.mark.parametrize(("name", "mesh"), [("deeplab", "2x2"), ("swin", "h")])
def test_models_train_on_tiles(name: str, mesh: str) -> None:
    torch.manual_seed(0)
    make, shape = NETS[name]
    pm = trained(make(), image(*shape), MESHES[mesh])
    assert "comm.halo" in ops(pm) and "comm.all_gather" not in ops(pm) and pm.verify()


class Between(nn.Module):
    """Something between two convolutions."""

    def __init__(self, what: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.two, self.what = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), what

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.what(torch.tanh(self.one(x))))


WHAT: dict[str, Callable[[Tensor], Tensor]] = {
    "circular": lambda x: F.pad(x, (2, 1, 0, 3), mode="circular"),
    "reflect": lambda x: F.pad(x, (2, 1, 0, 3), mode="reflect"),
    "every third": lambda x: x[:, :, 1::2, ::3],
    "differences": lambda x: x[:, :, 1:] - x[:, :, :-1],
    "bilinear": lambda x: F.interpolate(x, size=(23, 20), mode="bilinear"),
}


@pytest.mark.long
@pytest.mark.parametrize(("name", "mesh"), [("circular", "2x2"), *((name, "3x1") for name in WHAT)])
def test_rows_from_elsewhere(name: str, mesh: str) -> None:
    torch.manual_seed(0)
    pm = trained(Between(WHAT[name]), image(1, 3, 17, 13), MESHES[mesh])
    assert pm.verify() and "comm.all_gather" not in ops(pm)


@pytest.mark.long
def test_running_sums_gather_tiles_and_say_so() -> None:
    torch.manual_seed(0)
    with pytest.warns(sx.ShardfxWarning, match="aten.cumsum"):
        pm = trained(Between(lambda x: x.cumsum(2) * 0.1), image(1, 3, 18, 8), MESHES["3x1"])
    assert pm.verify() and any("comm.all_gather" in str(n.op) and "h" in n.kwargs["axes"] for n in pm.planned.nodes)


@pytest.mark.parametrize(("mesh", "merge"), [("2x2", "always"), ("3x1", "never")])
def test_an_exchange_sends_the_bytes_of_the_formula(mesh: str, merge: str) -> None:
    """Of a 3 x 3 convolution a rank sends a row to each side, a column, and the corners; two more where one exchange
    serves a convolution of 5 x 5 behind it as well."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 2, 5, padding=2)).double()
    x, sizes = image(1, 3, 20, 12), {axis.name: axis.size for axis in MESHES[mesh].axes}
    hints = sx.Hints(args=(x,), specs=specs(MESHES[mesh]), passes=[sx.images.Spatial(merge=merge)])
    pm = sx.parallelize(net, MESHES[mesh], hints, virtual=True)
    with count_collectives() as counts:
        pm(x)

    found = 0
    for channels, reach in ((3, 1), (4, 2)) if merge == "never" else ((3, 3),):
        up, side = reach * min(sizes["h"] - 1, 2), reach * min(sizes["w"] - 1, 2)  # of the rank in the middle
        h, w = -(-20 // sizes["h"]), -(-12 // sizes["w"])
        found += 8 * channels * (up * w + side * h + up * side)
    assert sum(count.nbytes for (op, _), count in counts.items() if op == "all_to_all_single") == found
    halos = [node for node in pm.planned.nodes if str(node.op) == "comm.halo"]
    assert sum(node.op.sends(node, pm.planned.mesh).nbytes for node in halos) == found


def changed(program: fx.GraphModule, op: str, place: int, value: Callable[[Any], Any]) -> None:
    """Change an argument of the first call of an op."""
    node = next(each for each in program.graph.nodes if op in str(each.target))
    node.args = (*node.args[:place], value(node.args[place]), *node.args[place + 1 :])


DAMAGE: dict[str, tuple[str, Callable[[fx.GraphModule], None]]] = {
    "rows of the other end are one further on": (
        "circular",
        lambda program: changed(program, "constant_pad_nd", 1, lambda pads: [*pads[:-2], pads[-2] - 1, pads[-1] + 1]),
    ),
    "a border is repeated that is a mirror": (
        "reflect",
        lambda program: changed(program, "resize_tile", 6, lambda kind: "repeated"),
    ),
    "a tile is taken for the one before it": (
        "bilinear",
        lambda program: changed(program, "resize_tile", 3, lambda first: [max(first[0] - 1, 0), *first[1:]]),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_rows_from_elsewhere_are_refused(name: str) -> None:
    torch.manual_seed(0)
    what, damage = DAMAGE[name]
    x, mesh = image(1, 3, 17, 13), MESHES["3x1"]
    hints = sx.Hints(args=(x,), loss=energy, specs=specs(mesh))
    pm = sx.parallelize(Between(WHAT[what]).double(), mesh, hints, virtual=True)
    program = pm.rank_module(0 if "end" in name else 1)
    damage(program)
    program.recompile()
    assert not pm.verify(modules={0 if "end" in name else 1: program})
