"""Stages under a budget of memory, and where other call signatures find the weights."""

from __future__ import annotations

import copy
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from shardfx.ir.text.printer import size_text
from shardfx.passes.stages.balance import MemoryBudget, balanced_split, smallest_split
from tests.reference import check_step

BLOCKS, RANKS = 5, 2


class Chain(nn.Module):
    """An embedding of many rows, which computes nothing, and blocks of several widths."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(200, 8), nn.Linear(8, 4, bias=False)
        wide = (16, 32, 16, 48, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, n), nn.Tanh(), nn.Linear(n, 8)) for n in wide)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def loss_of(out: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), labels.flatten())


def made(mesh: sx.Mesh, pipeline: sx.Pipeline, **hints: Any) -> tuple[sx.ParallelModule, nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model, (x, y) = Chain().double(), torch.randint(4, (2, 8, 6)).unbind()
    given = sx.Hints(args=(x,), loss=loss_of, targets=(y,), pipeline=pipeline, **hints)
    return sx.parallelize(model, mesh, given, virtual=True), model, x, y


def planned(stages: Any = None, schedule: str = "1f1b", **hints: Any) -> sx.ParallelModule:
    return made(sx.Mesh(pp=RANKS, mb=sx.Loop(4)), sx.Pipeline(stages=stages, schedule=schedule), **hints)[0]


def peak(pm: sx.ParallelModule) -> int:
    return max(pm.memory(rank).peak for rank in range(RANKS))


def sharding_of(pm: sx.ParallelModule) -> tuple[int, ...]:
    at = [pm.planned.input(f"layers.{block}.0.weight").at[0] for block in range(BLOCKS)]
    return tuple(at.index(stage) for stage in range(RANKS))


@pytest.mark.long
def test_where_the_balanced_sharding_is_too_much_another_one_computes_the_same() -> None:
    free = planned()
    budget = peak(free) - 1
    pm, model, x, y = made(sx.Mesh(pp=RANKS, mb=sx.Loop(4)), sx.Pipeline(), memory=budget)
    assert sharding_of(pm) != sharding_of(free)
    assert peak(pm) <= budget
    (note,) = (each for each in pm.planned.notes if each.startswith("stages of "))
    assert f"holds more than {size_text(budget)}" in note and f"0, 1 hold {size_text(pm.memory(0).peak)}" in note
    check_step(pm, model, loss_of, (x,), (y,))


@pytest.mark.long
def test_stages_that_somebody_says_stay() -> None:
    with pytest.raises(sx.Error, match="a rank holds") as caught:
        planned((4, 1), memory=peak(planned((4, 1))) - 1)
    assert "of stage " in str(caught.value.where) and caught.value.remedy


# ---- the search alone


COSTS = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]
KEEPS = [5.0, 3.0, 5.0, 8.0, 9.0, 7.0, 9.0, 3.0]


def room_of(homes: tuple[int, ...], budget: float) -> MemoryBudget:
    def held(stage: int, first: int, end: int) -> float:
        return (len(homes) - stage) * sum(KEEPS[first:end])

    return MemoryBudget(homes, [budget] * (max(homes) + 1), held)


@pytest.mark.parametrize("budget", [40.0, 60.0, 75.0, 90.0])
@pytest.mark.parametrize("homes", [(0, 1, 2), (0, 1, 0, 1), (0, 1, 1, 0)], ids=str)
def test_of_all_splits_that_fit_it_is_the_fastest(homes: tuple[int, ...], budget: float) -> None:
    count, room, blocks = len(homes), room_of(homes, budget), len(COSTS)
    shardings = [(0, *rest) for rest in combinations(range(1, blocks), count - 1)]

    def price(sharding: tuple[int, ...]) -> float:
        return max(sum(COSTS[a:b]) for a, b in pairwise((*sharding, blocks)))

    fitting = [price(sharding) for sharding in shardings if max(room.of(sharding, blocks)) <= budget]
    found = balanced_split(COSTS, count, room)
    assert (found is None) == (not fitting)
    assert found is None or price(tuple(found)) == min(fitting)
    firsts, beyond = smallest_split(COSTS, count, room)
    least = min(max(room.of(sharding, blocks)) for sharding in shardings) - budget
    assert max(room.of(firsts, blocks)) - budget == beyond
    assert beyond <= least + 1.0


FLIGHT_RANKS, LOOP_OPS = 2, 6


class FlightChain(nn.Module):
    """Blocks and a wide head, so that the last stage holds more than the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 256)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def flight_planned(schedule: str, **hints: Any) -> tuple[sx.ParallelModule, Tensor, Tensor]:
    torch.manual_seed(0)
    model, x, y = FlightChain().double(), torch.randn(24, 16, dtype=torch.float64), torch.randint(256, (24,))
    made = sx.Hints(args=(x,), loss=F.cross_entropy, targets=(y,), pipeline=sx.Pipeline(schedule=schedule), **hints)
    pm = sx.parallelize(model, sx.Mesh(pp=FLIGHT_RANKS, mb=sx.Loop(LOOP_OPS)), made, virtual=True)
    loss, alone = pm(x, y), F.cross_entropy(model(x), y)
    torch.testing.assert_close(loss, alone)
    return pm, x, y


def peaks(pm: sx.ParallelModule) -> list[int]:
    return [pm.memory(rank).peak for rank in range(FLIGHT_RANKS)]


def live(pm: sx.ParallelModule) -> tuple[int, ...]:
    assert pm.schedule is not None
    return sx.schedules.check_schedule(pm.schedule, stages=FLIGHT_RANKS, microbatches=LOOP_OPS).peaks


@pytest.mark.long
def test_auto_keeps_as_many_iterations_live_as_fit() -> None:
    fastest = flight_planned("auto")[0]
    budget = max(peaks(fastest)) - 1
    fitting = flight_planned("auto", memory=budget)[0]
    assert max(peaks(fitting)) <= budget and max(live(fitting)) < max(live(fastest))
    assert any(note.startswith("schedule: at most") for note in fitting.planned.notes)
    assert fitting.verify()
    with pytest.raises(sx.Error, match="no schedule fits"):
        flight_planned("auto", memory=min(peaks(fitting)) // 2)


@pytest.mark.long
def test_a_budget_is_that_of_every_stage() -> None:
    first, last = peaks(flight_planned("gpipe")[0])
    assert first < last
    with pytest.raises(sx.Error, match="more than Hints"):
        flight_planned("gpipe", memory=(first + last) // 2)


class Turning(nn.Module):
    """In evaluation the embedding is the head too, and a buffer of the first stage scales what the last one makes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(24, 8), nn.Linear(8, 24)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("scale", torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x) * self.scale
        for layer in self.layers:
            y = torch.tanh(layer(y))
        out = self.head(y)
        return out if self.training else out + (y * self.scale) @ self.embed.weight.t()


def loss(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten())


@pytest.mark.long
def test_evaluation_sends_weights_from_where_training_holds_them() -> None:
    torch.manual_seed(0)
    model, x, y = Turning().double(), torch.randint(24, (8, 5)), torch.randint(24, (8, 5))
    pipeline = sx.Pipeline(stages_per_rank=2, schedule="interleaved")
    hints = sx.Hints(args=(x,), loss=loss, targets=(y,), pipeline=pipeline)
    pm = sx.parallelize(copy.deepcopy(model), sx.Mesh(pp=2, mb=sx.Loop(4)), hints, virtual=True)
    pm(x, y).backward()
    assert pm.planned.input("embed.weight").at == pm.planned.input("scale").at == (0,)
    pm.eval(), model.eval()
    with torch.no_grad():
        assert (pm(x) - model(x)).abs().max() < 1e-12
        assert (pm(x[:6]) - model(x[:6])).abs().max() < 1e-12
    more = torch.randint(24, (12, 5)), torch.randint(24, (12, 5))
    pm.zero_grad()
    check_step(pm, model, loss, more[:1], more[1:])
