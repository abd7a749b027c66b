"""The pass ``spatial``: one wider exchange for several convolutions; the borders that ranks compute twice count
once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

import shardfx as sx
from shardfx.ir.cost.amounts import total
from shardfx.ir.cost.node_cost import NodeCosts

from .test_space import MESHES, UNet, call, energy, image, specs, trained, with_argument

aten = torch.ops.aten
SLOW, FAST = sx.Link(bandwidth=1e12, latency=1.0), sx.Link(bandwidth=1.0, latency=0.0)
"""Links on which a message is dear, and on which bytes are."""


def exchanges(pm: sx.ParallelModule) -> int:
    """The exchanges in which something is sent."""
    mesh = pm.planned.mesh
    return sum(str(node.op) == "comm.halo" and node.op.sends(node, mesh).nbytes > 0 for node in pm.planned.nodes)


def convolutions(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *between, nn.Conv2d(4, 4, 3, padding=1))


def planned(net: nn.Module, mesh: sx.Mesh, merge: str, x: torch.Tensor) -> sx.ParallelModule:
    hints = sx.Hints(args=(x,), loss=energy, specs=specs(mesh), passes=[sx.images.Spatial(merge=merge)])
    return sx.parallelize(net, mesh, hints, virtual=True)


@pytest.mark.long
def test_a_run_of_strides_dilations_and_norms_is_merged() -> None:
    mesh = "dp2h2"
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.Conv2d(4, 4, 5, 2, 2), nn.Tanh(), nn.Conv2d(4, 4, 3, padding=2, dilation=2), nn.Sigmoid()),
        *(nn.ConvTranspose2d(4, 3, 3, 2, 1, 1), nn.ReLU(), nn.Conv2d(3, 2, 3)),
    )
    pm = trained(net, image(2, 3, 37, 11), MESHES[mesh], passes=[sx.images.Spatial(merge="always")])
    apart = planned(net, MESHES[mesh], "never", image(2, 3, 37, 11))
    assert pm.verify() and exchanges(pm) < exchanges(apart)


@pytest.mark.long
@pytest.mark.parametrize("link", [SLOW, FAST], ids=["messages are dear", "bytes are dear"])
def test_cost_takes_what_is_cheaper_by_its_own_figures(link: sx.Link) -> None:
    mesh = sx.Mesh(h=2, links={"h": link})
    net = nn.Sequential(nn.Conv2d(8, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 2, 3, padding=1)).double()
    seconds, counts = {}, {}
    for merge in ("never", "always", "cost"):
        pm = planned(net, mesh, merge, image(1, 8, 32, 32))
        context = pm._compiled.context
        prices = NodeCosts(pm.planned.mesh, context.rules)
        seconds[merge] = total(prices.of(node) for node in pm.planned.nodes).seconds(context.machine, pm.planned.mesh)
        counts[merge] = exchanges(pm)
    assert counts["cost"] == counts["always" if link is SLOW else "never"]
    assert counts["always"] < counts["never"]
    assert seconds["cost"] <= min(seconds["never"], seconds["always"]) * (1 + 1e-9)


@pytest.mark.long
@pytest.mark.parametrize(("between", "times"), [([], 4), ([nn.Tanh()], 5)], ids=["made for it alone", "kept as well"])
def test_a_tile_that_waits_for_the_backward_is_not_held_twice(between: list[nn.Module], times: int) -> None:
    """The image and what tanh gives wait in any case: what is laid beside them twice is one more than the exchanges for
    each; what only the second convolution takes waits with the rows of others."""
    pm = planned(convolutions(*between).double(), MESHES["h2"], "never", image(1, 3, 16, 5))
    assert str(pm.rank_program(1)).count("= pack.unpack_rows(") == times and pm.verify()


@pytest.mark.long
def test_what_is_drawn_is_drawn_once() -> None:
    """Dropout draws by tiles: it is not done twice on a border."""
    pm = planned(convolutions(nn.Dropout(0.5)).double(), MESHES["h2"], "always", image(1, 3, 12, 5))
    (drawn,) = [node for node in pm.planned.nodes if "dropout.default" in str(node.op)]
    assert all(value.spec == sx.Spec.parse("-, -, h, -", pm.planned.mesh) for value in drawn.outs) and pm.verify()


def border_counted_twice(program: fx.GraphModule) -> None:
    """The gradient of a bias adds up the border that another rank has as well."""
    total = next(n for n in program.graph.nodes if "sum.dim" in str(n.target) and "take" in str(n.args[0]))
    with_argument(total, 0, total.args[0].args[0])  # type: ignore[union-attr]


def shifted(program: fx.GraphModule) -> None:
    """The rows beside a rank's own are taken for its own."""
    taken = call(program, "take", -1)
    with_argument(taken, 3, 0 if taken.args[3] else 1)


def other_border(program: fx.GraphModule) -> None:
    """What one convolution gives of the border is what padding gives."""
    convolution = call(program, "aten.convolution", 1)
    rows = convolution.args[0]
    with program.graph.inserting_before(convolution):
        cropped = program.graph.call_function(aten.slice.Tensor, (rows, 2, 1, -1))
        padded = program.graph.call_function(aten.constant_pad_nd.default, (cropped, [0, 0, 1, 1]))
    with_argument(convolution, 0, padded)


@pytest.mark.long
@pytest.mark.parametrize("damage", [border_counted_twice, shifted, other_border])
def test_a_damaged_border_is_refused(damage: Callable[[fx.GraphModule], None]) -> None:
    torch.manual_seed(0)
    pm = planned(convolutions(nn.Tanh()).double(), sx.Mesh(h=3), "always", image(1, 3, 12, 5))
    program = pm.rank_module(1)
    damage(program)
    program.recompile()
    program.graph.lint()
    assert not pm.verify(modules={1: program})


def slow_machine(flops: float) -> sx.Machine:
    return sx.Machine("slow", {"float64": flops}, 1e9, 1e9, sx.Machine.load("accelerator").links)


@pytest.mark.long
def test_small_maps_leave_the_sharding_of_space() -> None:
    torch.manual_seed(0)
    hints = {"passes": [sx.images.Spatial(merge="never", leave="three")], "machine": slow_machine(1e6)}
    pm = trained(UNet(), image(1, 3, 32, 40), MESHES["2x2"], **hints)
    said = "maps are sharded by channels, and not sharded by space, from three"
    assert pm.verify() and any(note.startswith(said) for note in pm.planned.notes)
    inside = [n for n in pm.planned.nodes if n.where.module.startswith("three") and not str(n.op).startswith("comm.")]
    maps = [value.spec for node in inside for value in node.outs if value.shape[2:] == (8, 10)]
    assert maps and not any(sharding for spec in maps if spec is not None for sharding in spec.dims[2:])


def test_options_that_are_none_are_refused() -> None:
    hints = sx.Hints(args=(image(1, 3, 8, 8),), specs=specs(MESHES["h2"]), passes=[sx.images.Spatial(leave="head")])
    with pytest.raises(sx.Error, match="no op of this module") as nowhere:
        sx.parallelize(convolutions().double(), MESHES["h2"], hints, virtual=True)
    assert "0, 1" in str(nowhere.value.expected)
    with pytest.raises(sx.Error, match=r"Spatial\(merge=") as caught:
        sx.images.Spatial(merge="sometimes")
    assert "'never'" in str(caught.value.expected)


@pytest.mark.long
def test_the_report_says_what_tiles_cost_by_layer() -> None:
    net = convolutions(nn.Tanh()).double()
    report = planned(net, sx.Mesh(h=3), "always", image(1, 3, 12, 5)).report()
    (halos,) = [row for row in report.communication.rows if row.kind == "halo"]
    assert sum(row.exchanges for row in report.tiles) == halos.calls
    assert sum(row.nbytes for row in report.tiles) == halos.nbytes
    borders = {row.module: row.border_flops for row in report.tiles}
    middle = 4 * 5  # rank 1 makes two rows on both sides, for its gradient too; of each place 2 * 9 * 3 * 4 operations
    assert borders["0"] == middle * 2 * 9 * 3 * 4
    assert "work done twice" in str(report)
    apart = planned(net, sx.Mesh(h=3), "never", image(1, 3, 12, 5)).report()
    assert apart.tiles and not any(row.border_flops for row in apart.tiles)


class Across(nn.Module):
    """A line of rows that is halved twice, and shard along its features behind that."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.head = nn.Linear(12, 12), nn.Upsample(scale_factor=2), nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.twice(self.first(x).transpose(1, 2)[:, :, None])
        y = nn.functional.max_pool1d(nn.functional.avg_pool2d(y, 2).flatten(2), 2).transpose(1, 2)
        return self.head(y.view(y.shape[0], 3, 1, -1).transpose(1, 2).tanh().transpose(1, 2).flatten(2))


@pytest.mark.long
def test_an_axis_that_shards_rows_and_then_features_is_no_exchange_to_merge() -> None:
    model, x, y = Across().double(), torch.randn(4, 6, 12).double(), torch.randn(4, 3, 12).double()
    given = {"first": "-, a, -", "head.weight": "-, a"}
    pm = sx.parallelize(model, sx.Mesh(a=2), sx.Hints(args=(x,), loss=nn.MSELoss(), targets=(y,), specs=given))
    assert abs(pm(x, y).item() - nn.functional.mse_loss(model(x), y).item()) < 1e-12
