"""Maps of fewer rows than ranks: some ranks have nothing of them, and what the others make is that of one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

import shardfx as sx

from .test_space import NETS, UNet, call, energy, image, ops, specs, trained, with_argument

FOUR = sx.Mesh(h=4)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], sx.Mesh]] = {
    "a signal": (
        lambda: nn.Sequential(nn.Conv1d(2, 3, 5, padding=2), nn.ReLU(), nn.Conv1d(3, 2, 3, padding=1)),
        (1, 2, 3),
        FOUR,
    ),
    "windows and norms": (
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 2, 3, padding=1), nn.MaxPool2d(3, 4, 1), nn.InstanceNorm2d(2, affine=True)),
            nn.ConvTranspose2d(2, 1, 4, 4),
        ),
        (1, 1, 12, 4),
        FOUR,
    ),
    "strides": (
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, stride=4, padding=1)),
            *(nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 2, 3, padding=1)),
        ),
        (2, 3, 12, 6),
        FOUR,
    ),
    "blocks and nearest rows": (
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(4), nn.Conv2d(4, 4, 3, padding=1)),
            *(nn.Upsample(scale_factor=4.0), nn.Conv2d(4, 2, 3, padding=1)),
        ),
        (2, 3, 12, 8),
        FOUR,
    ),
    "means and linear rows": (
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 4, 3, padding=1), nn.AvgPool2d(3, 4, 1), nn.GroupNorm(2, 4)),
            *(nn.Upsample(scale_factor=4.0, mode="bilinear"), nn.Conv2d(4, 2, 3, padding=1)),
        ),
        (2, 3, 12, 8),
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
    "resnet": (NETS["resnet"], (2, 3, 21, 18), FOUR),
    "unet": (lambda: UNet("bilinear"), (1, 3, 12, 12), FOUR),
}


REST = [name for name in CASES if name != "windows and norms"]


@pytest.mark.long
@pytest.mark.parametrize("merge", ["never", pytest.param("cost", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["windows and norms", *(pytest.param(n, marks=pytest.mark.slow) for n in REST)])
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


@pytest.mark.long
def test_a_rank_with_rows_may_not_take_itself_for_one_without() -> None:
    pm, _ = with_nothing()
    program = pm.rank_module(2)
    convolution = call(program, "aten.convolution")
    with program.graph.inserting_before(convolution):
        zeros = program.graph.call_function(
            torch.ops.aten.new_full.default, (convolution.args[0], [1, 2, 1], 0.0), {"dtype": torch.float64}
        )
    convolution.replace_all_uses_with(zeros)
    program.recompile()
    assert not pm.verify(modules={2: program})


@pytest.mark.long
def test_a_ring_of_tiles_that_hold_little_is_proven() -> None:
    """The last tile's rows are all three operands' in part, so that much may be what its call is made of."""
    x, weight = torch.randn(2, 3, 6, dtype=torch.float64), torch.randn(2, 3, 11, dtype=torch.float64)

    class Ring(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.pad(x, (2, 3), "circular")

    hints = sx.Hints(args=(x,), loss=lambda out, by: (out * by).sum(), targets=(weight,), specs={"args.0": "-, -, x"})
    pm = sx.parallelize(Ring(), sx.Mesh(x=3), hints, virtual=True)
    torch.testing.assert_close(pm(x, weight), (Ring()(x) * weight).sum())
    assert pm.verify(), pm.verify().why
