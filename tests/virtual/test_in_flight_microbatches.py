"""A pipeline under a budget of memory: all stages count, and ``schedule="auto"`` keeps as many iterations live as
fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx

RANKS, LOOP_OPS = 2, 6


class Chain(nn.Module):
    """Blocks and a wide head, so that the last stage holds more than the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 256)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def planned(schedule: str, **hints: Any) -> tuple[sx.ParallelModule, Tensor, Tensor]:
    torch.manual_seed(0)
    model, x, y = Chain().double(), torch.randn(24, 16, dtype=torch.float64), torch.randint(256, (24,))
    made = sx.Hints(args=(x,), loss=F.cross_entropy, targets=(y,), pipeline=sx.Pipeline(schedule=schedule), **hints)
    pm = sx.parallelize(model, sx.Mesh(pp=RANKS, mb=sx.Loop(LOOP_OPS)), made, virtual=True)
    loss, alone = pm(x, y), F.cross_entropy(model(x), y)
    torch.testing.assert_close(loss, alone)
    return pm, x, y


def peaks(pm: sx.ParallelModule) -> list[int]:
    return [pm.memory(rank).peak for rank in range(RANKS)]


def live(pm: sx.ParallelModule) -> tuple[int, ...]:
    assert pm.schedule is not None
    return sx.schedules.check_schedule(pm.schedule, stages=RANKS, microbatches=LOOP_OPS).peaks


@pytest.mark.slow
def test_auto_keeps_as_many_iterations_live_as_fit() -> None:
    fastest = planned("auto")[0]
    budget = max(peaks(fastest)) - 1
    fitting = planned("auto", memory=budget)[0]
    assert max(peaks(fitting)) <= budget and max(live(fitting)) < max(live(fastest))
    assert any(note.startswith("schedule: at most") for note in fitting.planned.notes)
    assert fitting.verify()
    with pytest.raises(sx.Error, match="no schedule fits"):
        planned("auto", memory=min(peaks(fitting)) // 2)


@pytest.mark.long
def test_a_budget_is_that_of_every_stage() -> None:
    first, last = peaks(planned("gpipe")[0])
    assert first < last
    with pytest.raises(sx.Error, match="more than Hints"):
        planned("gpipe", memory=(first + last) // 2)
