"""Work that would be the same on all ranks of a data axis is shared; what is not is redundant compute, and reported."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import shardfx as sx
from shardfx.ir.graph import op_name
from tests.reference import check_step


class Layers(nn.Module):
    def __init__(self, mixed: bool) -> None:
        super().__init__()
        self.first, self.second, self.mixed = nn.Linear(8, 8), nn.Linear(8, 8), mixed

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(torch.sort(y, 0)[0] if self.mixed else y)


def planned(rows: int, mixed: bool) -> sx.ParallelModule:
    hints = sx.Hints(args=(torch.zeros(rows, 8),), specs={"args.0": "dp, -"}, loss=torch.sum)
    return sx.parallelize(Layers(mixed), sx.Mesh(dp=3), hints, virtual=True)


def test_a_batch_that_does_not_feed_all_ranks() -> None:
    with pytest.warns(sx.ShardfxWarning, match=r"compute over dp \(3 ranks\).* begins at aten.addmm \(first "):
        planned(2, mixed=False)


def test_a_batch_that_feeds_all_ranks_unevenly_is_shared() -> None:
    with pytest.warns(sx.ShardfxWarning, match="which dp shards unevenly"):
        pm = planned(4, mixed=False)
    shapes = [pm.rank_program(rank).inputs[-1].value.spec for rank in range(3)]
    assert [spec.local_shape((4, 8), pm.mesh, pm.mesh.coords(r)) for r, spec in enumerate(shapes)] == [
        (2, 8),
        (1, 8),
        (1, 8),
    ]


def test_what_comes_behind_an_op_that_needs_the_whole_batch_is_shared() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pm = planned(6, mixed=True)
    products = [node for node in pm.planned.nodes if node.where.module == "second" and op_name(node.op) == "aten.addmm"]
    assert [node.strategy.shardings for node in products] == [(("m", ("dp",)),)]


class Ranked(nn.Module):
    """Rows are mixed between two layers of which a row is the whole of a column."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sort(self.first(x), 0)[0]
        return torch.softmax(self.second(y), 0).cumsum(0)


@pytest.mark.long
def test_what_is_shared_equals_one_device() -> None:
    torch.manual_seed(0)
    x, weights = torch.randn(6, 8, dtype=torch.float64), torch.randn(6, 6, dtype=torch.float64)
    alone = Ranked().double()
    hints = sx.Hints(args=(x,), targets=(weights,), specs={"args.0": "dp, -"}, loss=lambda out, w: (out * w).sum())
    pm = sx.parallelize(copy.deepcopy(alone), sx.Mesh(dp=4), hints, virtual=True)
    check_step(pm, alone, lambda out, w: (out * w).sum(), (x,), (weights,), bound=1e-12)


def test_what_is_shared_is_not_spoken_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not any("redundant" in note for note in planned(6, mixed=False).planned.notes)
