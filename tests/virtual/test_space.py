"""Images sharded over ranks by height and width: loss, gradients and buffers are those of the whole, and proven."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

import shardfx as sx
from tests.reference import check_step

aten = torch.ops.aten
MESHES = {
    "h2": sx.Mesh(h=2),
    "2x2": sx.Mesh(h=2, w=2),
    "3x1": sx.Mesh(h=3, w=1),
    "dp2h2": sx.Mesh(dp=2, h=2),
}


def squares(out: Tensor, wanted: Tensor) -> Tensor:
    return ((out - wanted) ** 2).mean()


def energy(out: Tensor) -> Tensor:
    return (out * out).sum()


def specs(mesh: sx.Mesh, space: int = 2) -> dict[str, str]:
    """The batch over dp, height and width over h and w, as far as the mesh has them."""
    axes = ["dp", "", "h", "w", "d"][: 2 + space]
    return {"args.0": ", ".join(axis if axis in mesh.names else "-" for axis in axes)}


def trained(model: nn.Module, x: Tensor, mesh: sx.Mesh, space: int = 2, **hints: object) -> sx.ParallelModule:
    """The model on tiles of ``x``, once forward and backward, against one device; gives the parallel one."""
    model = model.double()
    alone = {name: t.clone() for name, t in model.state_dict().items()}
    wanted = torch.randn_like(model(x))
    model.load_state_dict(alone)
    given = sx.Hints(args=(x,), loss=squares, targets=(wanted,), specs=specs(mesh, space), **hints)  # type: ignore[arg-type]
    pm = sx.parallelize(model, mesh, given, virtual=True)
    check_step(pm, model, squares, (x,), (wanted,), proven=False)
    return pm


def ops(pm: sx.ParallelModule) -> list[str]:
    return [str(node.op) for node in pm.planned.nodes]


def image(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    """A basic block of a ResNet."""

    def __init__(self, wide: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(wide, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.norm2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.skip = nn.Conv2d(wide, out, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(y + self.skip(x))


class UNet(nn.Module):
    """Two levels down and up again, with a max-pool, a transposed convolution, an interpolation and skips."""

    def __init__(self, up: str = "nearest") -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Conv2d(a, b, 3, padding=1) for a, b in ((3, 4), (4, 6), (6, 8)))
        self.norm, self.up = nn.BatchNorm2d(6), up
        self.back = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.four, self.five = nn.Conv2d(12, 4, 3, padding=1), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.relu(self.one(x))
        b = torch.relu(self.norm(self.two(nn.functional.max_pool2d(a, 2))))
        c = torch.relu(self.three(nn.functional.max_pool2d(b, 2)))
        d = torch.relu(self.four(torch.cat([b, self.back(c)], 1)))
        how = {} if self.up == "nearest" else {"align_corners": False}
        return self.five(torch.cat([a, nn.functional.interpolate(d, scale_factor=2.0, mode=self.up, **how)], 1))


NETS: dict[str, Callable[[], nn.Module]] = {
    "kernels of all kinds": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 5, stride=2, padding=2),
        nn.Conv2d(6, 6, 3, padding=2, dilation=2, groups=6),
        nn.GroupNorm(2, 6),
        nn.Conv2d(6, 4, (1, 3), padding=(0, 1), groups=2),
        nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1, output_padding=1),
    ),
    "resnet": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
        Block(4, 4, 1),
        Block(4, 6, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 5),
    ),
    "pools and sizes": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False),
        nn.Upsample(scale_factor=2.0, mode="bilinear"),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.MaxPool2d(3, stride=2, ceil_mode=True),
        nn.Upsample((13, 17), mode="bicubic", align_corners=True),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "mesh"), [("kernels of all kinds", "2x2"), ("resnet", "dp2h2"), ("pools and sizes", "2x2")]
)
def test_tiles_train_as_the_whole_image_does(name: str, mesh: str) -> None:
    torch.manual_seed(0)
    pm = trained(NETS[name](), image(2, 3, 21, 18), MESHES[mesh])
    assert "comm.halo" in ops(pm) and "comm.all_gather" not in ops(pm) and pm.verify()


@pytest.mark.long
def test_tiles_of_a_volume() -> None:
    torch.manual_seed(0)
    volume = nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv3d(2, 2, 3, stride=2, padding=1))
    assert trained(volume, image(1, 1, 6, 7, 8), sx.Mesh(h=2, w=2, d=2), 3).verify()


@pytest.mark.long
def test_a_tile_smaller_than_the_halo_gets_rows_from_beyond_its_neighbour() -> None:
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Conv1d(1, 2, 9, padding=4), nn.Conv1d(2, 1, 9, padding=4))
    pm = trained(wide, image(1, 1, 9), sx.Mesh(h=4), 1)
    assert "comm.halo" in ops(pm) and pm.verify()


# ---- what tiles will not do for ----------------------------------------------------------------------------


class Smoothed(nn.Module):
    """An image that is made smaller by an op that has no windows: its corners are aligned."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.interpolate(x, size=(6, 5), mode="bilinear", antialias=True, align_corners=True)


def smoothed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), Smoothed(), nn.Conv2d(2, 2, 1)).double()


@pytest.mark.long
def test_an_op_that_gathers_a_sharding_of_space_is_named() -> None:
    x = image(1, 3, 12, 10)
    with pytest.warns(sx.ShardfxWarning, match=r"upsample_bilinear2d_aa .*1 .*shards over h, w are gathered"):
        pm = trained(smoothed(), x, MESHES["2x2"])
    assert any("upsample_bilinear2d_aa" in warning for warning in pm.report().warnings)


def test_strict_refuses_to_gather_a_sharding_of_space() -> None:
    given = sx.Hints(args=(image(1, 3, 12, 10),), specs=specs(MESHES["2x2"]), strict=True)
    with pytest.raises(sx.Error, match="needs space replicated") as caught:
        sx.parallelize(smoothed(), MESHES["2x2"], given, virtual=True)
    assert "gathered" not in str(caught.value) and "a max-pool of fixed size" in str(caught.value)


def test_an_image_that_is_too_small_on_one_device_as_well(caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Sequential(nn.Conv2d(3, 2, 3, 2), nn.Conv2d(2, 2, 5))
    hints = sx.Hints(args=(image(1, 3, 7, 20),), specs=specs(MESHES["2x2"]))
    with pytest.raises(sx.Error, match=r"on one device as well(.|\n)*Kernel size can't be greater") as caught:
        sx.parallelize(net.double(), MESHES["2x2"], hints, virtual=True)
    assert caught.value.where == "1 (Conv2d)" and "other examples" in str(caught.value) and not caplog.records


# ---- what a rank reads -------------------------------------------------------------------------------------


def planned(net: nn.Module, x: Tensor, mesh: sx.Mesh) -> sx.ParallelModule:
    """The plan of a model on tiles of ``x``, for inference."""
    return sx.parallelize(net.double(), mesh, sx.Hints(args=(x,), specs=specs(mesh)), virtual=True)


def test_the_tile_of_a_rank() -> None:
    x = image(2, 3, 21, 18)
    pm = planned(nn.Conv2d(3, 2, 3, padding=1), x, MESHES["2x2"])
    tiles = [pm.tile("args.0", rank) for rank in range(4)]
    assert tiles[3] == (slice(0, 2), slice(0, 3), slice(11, 21), slice(9, 18))
    assert pm.tile("args.0", 0, halo=2)[2:] == (slice(0, 13), slice(0, 11))
    assert sum(x[tile].numel() for tile in tiles) == x.numel()
    with pytest.raises(sx.Error, match="there is no input"):
        pm.tile("args.1", 0)
    with pytest.raises(sx.Error, match="virtual ranks read a tile each"):
        pm.tile("args.0")
    with pytest.raises(sx.Error, match="a halo is a number of rows"):
        pm.tile("args.0", 0, halo=-1)


# ---- damage ------------------------------------------------------------------------------------------------


def call(program: fx.GraphModule, name: str, number: int = 0) -> fx.Node:
    """A call of a program, by the name of its function."""
    return [node for node in program.graph.nodes if node.op == "call_function" and name in str(node.target)][number]


def with_argument(node: fx.Node, place: int, value: object) -> None:
    node.args = (*node.args[:place], value, *node.args[place + 1 :])


FOUR = sx.Mesh(h=4)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], sx.Mesh]] = {
    "windows and norms": (
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 2, 3, padding=1), nn.MaxPool2d(3, 4, 1), nn.InstanceNorm2d(2, affine=True)),
            nn.ConvTranspose2d(2, 1, 4, 4),
        ),
        (1, 1, 12, 4),
        FOUR,
    ),
    "two dims": (
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(3, 3, 1)),
            *(nn.Conv2d(4, 4, 3, padding=1), nn.ConvTranspose2d(4, 2, 4, 4)),
        ),
        (2, 3, 6, 5),
        sx.Mesh(h=4, w=3),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize(("name", "merge"), [("windows and norms", "never"), ("two dims", "cost")])
def test_maps_of_fewer_rows_than_ranks_train_as_on_one_device(name: str, merge: str) -> None:
    torch.manual_seed(0)
    make, shape, mesh = CASES[name]
    hints = {"passes": [sx.images.Spatial(merge=merge)], "strict": True}
    pm = trained(make(), image(*shape), mesh, len(shape) - 2, **hints)
    assert pm.verify() and "comm.all_gather" not in ops(pm)


def with_nothing() -> tuple[sx.ParallelModule, fx.GraphModule]:
    """A plan of which rank 3 has nothing, and the program of that rank."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv1d(2, 1, 3, padding=1)).double()
    hints = sx.Hints(
        args=(image(1, 1, 3),), loss=energy, specs=specs(FOUR, 1), passes=[sx.images.Spatial(merge="never")]
    )
    pm = sx.parallelize(net, FOUR, hints, virtual=True)
    return pm, pm.rank_module(3)


@pytest.mark.long
def test_a_rank_without_rows_adds_nothing() -> None:
    pm, program = with_nothing()
    assert pm.verify(modules={3: program})
    assert not [node for node in program.graph.nodes if "aten.convolution" in str(node.target)]
    total = next(n for n in program.graph.nodes if "new_full" in str(n.target) and n.args[1] == [])
    with_argument(total, 2, 1.0)  # its share of the loss
    program.recompile()
    assert not pm.verify(modules={3: program})
