"""Models that people train, on tiles of an image: numbers are those of one device, proven, and little is gathered."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import shardfx as sx
from tests.collective_counts import count_collectives
from tests.space_nets import DeepLab, Pyramid, ResNet18, Swin, UNet3d, convnext, segformer

from .test_space import UNet, energy, image, ops, specs, trained

MESHES = {
    "h": sx.Mesh(h=2),
    "w": sx.Mesh(w=2),
    "2x2": sx.Mesh(h=2, w=2),
    "3x1": sx.Mesh(h=3, w=1),
}


class Net(NamedTuple):
    """A model, the shape of its image, and on which meshes something of it is gathered: attention over the whole image,
    maps of fewer rows than ranks."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    gathers: tuple[str, ...] = ()


NETS = {
    "unet": Net(UNet, (1, 3, 32, 40)),
    "unet of odd sizes": Net(lambda: UNet("bilinear"), (2, 3, 20, 28)),
    "resnet": Net(ResNet18, (2, 3, 61, 77), ("3x1",)),
    "pyramid": Net(Pyramid, (1, 3, 57, 71), ("3x1",)),
    "deeplab": Net(DeepLab, (2, 3, 33, 25)),
    "swin": Net(Swin, (1, 3, 48, 32)),
    "convnext": Net(convnext, (1, 3, 64, 64), ("3x1",)),
    "segformer": Net(segformer, (1, 3, 64, 64), tuple(MESHES)),
    "volume": Net(UNet3d, (1, 1, 12, 8, 8)),
}


def on_tiles(name: str, mesh: str) -> sx.ParallelModule:
    torch.manual_seed(0)
    net = NETS[name]
    with warnings.catch_warnings():
        if mesh in net.gathers:
            warnings.simplefilter("ignore", sx.ShardfxWarning)
        return trained(net.make(), image(*net.shape), MESHES[mesh], len(net.shape) - 2)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["h", "w", "2x2", "3x1"])
@pytest.mark.parametrize("name", NETS)
def test_models_train_on_tiles(name: str, mesh: str) -> None:
    pm = on_tiles(name, mesh)
    assert "comm.halo" in ops(pm) and pm.verify()
    assert mesh in NETS[name].gathers or "comm.all_gather" not in ops(pm)


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
    "replicate": lambda x: F.pad(x, (2, 1, 0, 3), mode="replicate"),
    "roll": lambda x: x.roll((3, -2), (2, 3)),
    "crop": lambda x: x[:, :, 2:-1, 1:],
    "every third": lambda x: x[:, :, 1::2, ::3],
    "differences": lambda x: x[:, :, 1:] - x[:, :, :-1],
    "bilinear": lambda x: F.interpolate(x, size=(23, 20), mode="bilinear"),
    "bicubic": lambda x: F.interpolate(x, size=(11, 20), mode="bicubic"),
    "spread": lambda x: x / (x.std((2, 3), keepdim=True) + 0.1),
    "means of all": lambda x: x * F.adaptive_avg_pool2d(x, 1),
    "shuffle": lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2),
}
SLOW = {name for name in WHAT if name not in ("circular", "reflect", "differences", "bilinear")}


@pytest.mark.long
@pytest.mark.parametrize("mesh", [pytest.param("2x2", marks=pytest.mark.slow), "3x1"])
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in WHAT])
@pytest.mark.one_in(6)
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


@pytest.mark.slow
@pytest.mark.parametrize(("merge", "size"), [("never", 256), ("cost", 256), ("cost", 512)])
def test_a_rank_holds_a_fourth_and_its_halos_at_most(merge: str, size: int) -> None:
    """The peak of a UNet on 2 x 2 ranks, beside that of a plan for one; a border is little of tiles of this size."""
    x, peaks = torch.randn(1, 3, size, size), []
    for mesh in (sx.Mesh(h=1, w=1), MESHES["2x2"]):
        torch.manual_seed(0)
        hints = sx.Hints(args=(x,), loss=energy, specs=specs(mesh), passes=[sx.images.Spatial(merge=merge)])
        pm = sx.parallelize(UNet(), mesh, hints, virtual=True)
        halos = sum(node.op.sends(node, mesh).nbytes for node in pm.planned.nodes if str(node.op) == "comm.halo")
        peaks.append(pm.memory().peak - halos)
    assert peaks[1] <= 1.1 * peaks[0] / 4


@pytest.mark.parametrize("merge", ["never", "always"])
@pytest.mark.parametrize("mesh", ["2x2", "3x1"])
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
    "the other end is left out": (
        "circular",
        lambda program: changed(program, "aten.add.Tensor", 1, lambda other_end: 0),
    ),
    "a border is repeated that is a mirror": (
        "reflect",
        lambda program: changed(program, "resize_tile", 6, lambda kind: "repeated"),
    ),
    "a tile is taken for the one before it": (
        "bilinear",
        lambda program: changed(program, "resize_tile", 3, lambda first: [max(first[0] - 1, 0), *first[1:]]),
    ),
    "a row of a slice is another one": (
        "every third",
        lambda program: changed(program, "aten.slice.Tensor", 2, lambda start: start + 1),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.one_in(3)
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
