"""Work that is the same on all ranks of a data axis is said in a warning, with where it begins."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import shardfx as sx


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
    with pytest.warns(sx.ShardfxWarning, match=r"not shared over dp.* begins at aten.addmm \(first "):
        pm = planned(4, mixed=False)
    assert any("each of 3 ranks" in note for note in pm.after.notes)


def test_an_op_that_needs_the_whole_batch() -> None:
    with pytest.warns(sx.ShardfxWarning, match=r"from aten.addmm \(second .* begins at aten.sort"):
        planned(6, mixed=True)


def test_what_is_shared_is_not_spoken_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not any("not shared" in note for note in planned(6, mixed=False).after.notes)
