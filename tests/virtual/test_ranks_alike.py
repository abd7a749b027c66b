"""Few ranks that are run for many: the plan's own programs are the model then, too, and a changed one is not."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from shardfx.runtime.verify.plan_proof import Asked
from shardfx.runtime.verify.sample import compare, counterexample
from shardfx.runtime.verify.sample.ranks_alike import RanksAlike, ranks_alike

aten = torch.ops.aten
CHANGED = 21


class Net(nn.Module):
    """Tokens through two linears."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.norm, self.drop = nn.Embedding(48, 8), nn.LayerNorm(8), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(F.gelu(self.up(self.norm(self.embed(x))))))


@cache
def plan(dp: int = 8, tp: int = 3, dropout: float = 0.0, **hints: Any) -> sx.ParallelModule:
    torch.manual_seed(0)
    x, y = torch.randint(48, (2 * dp, 3)), torch.randn(2 * dp, 3, 8, dtype=torch.float64)
    specs = {"args.0": "dp, -", "up.weight": "tp, -", "embed.weight": "tp, -"}
    given = sx.Hints(args=(x,), loss=F.mse_loss, targets=(y,), specs=specs, **hints)
    return sx.parallelize(Net(dropout).double(), sx.Mesh(dp=dp, tp=tp), given, virtual=True)


def own(pm: sx.ParallelModule, *changed: int) -> tuple[RanksAlike | None, Any]:
    """The ranks that are run, and what their numbers show."""
    asked: Asked = pm._programs._asked({})[0]
    few = ranks_alike(pm.after, lambda rank: asked.program(pm.after, rank), changed)
    if few is None:
        return None, None
    given = {rank: asked.program(pm.after, rank) for rank in few.ranks}
    ends = given[0].inputs, given[0].outputs
    return few, compare.verify(
        pm.before, pm.after, pm._compiled.context.rules, given, given, *ends, {}, locate=False, alike=few
    )[0]


def test_ranks_of_a_vocabulary_are_all_run_and_of_a_batch_two() -> None:
    few, fault = own(plan())
    assert fault is None
    assert few is not None and few.ranks == (0, 1, 2, 3, 4, 5)


def test_a_rank_that_is_changed_stands_for_itself() -> None:
    few, fault = own(plan(), CHANGED, 2)
    assert fault is None
    assert few is not None and {coords["dp"] for coords in map(plan().mesh.coords, few.ranks)} == {7, 0, 1}
    assert {few.of(rank) for rank in (CHANGED, 2)} == {CHANGED, 2}


def test_masks_are_those_of_the_ranks_that_are_run() -> None:
    few, fault = own(plan(dropout=0.5), CHANGED)
    assert fault is None
    assert few is not None and few.ranks == (0, 1, 2, 21, 22, 23)


@pytest.mark.long
def test_what_differs_by_rank_is_not_alike() -> None:
    """A norm of gradients that are stored in pieces needs those of all."""
    assert own(plan(**NORM))[0] is None


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


NORM: dict[str, Any] = {"zero": 2, "zero_min": 1, "optimizer": adamw, "clip": 1.0}
STORED = {"zero 2": {"zero": 2}, "zero 3": {"zero": 3}, "zero 3, AdamW": {"zero": 3, "optimizer": adamw}}


@pytest.mark.long
@pytest.mark.parametrize("hints", STORED.values(), ids=STORED)
def test_gradients_in_pieces_are_those_of_the_ranks_that_are_run(hints: dict[str, Any]) -> None:
    few, fault = own(plan(zero_min=1, **hints), CHANGED)
    assert fault is None
    assert few is not None and few.ranks == (0, 1, 2, 21, 22, 23)


@pytest.mark.long
@pytest.mark.parametrize(
    ("cheap", "hints"),
    [(True, {}), (True, {"zero": 3, "zero_min": 1}), (True, {"dropout": 0.5}), (False, NORM)],
    ids=["plain", "zero-3", "dropout", "clip"],
)
@pytest.mark.one_in(4)
def test_a_changed_program_of_many_ranks_is_refuted_with_numbers(
    monkeypatch: pytest.MonkeyPatch, cheap: bool, hints: dict[str, Any]
) -> None:
    """By a few ranks that are run for all; by all of them, where all need what each has for itself."""
    pm = plan(**hints)
    if cheap:
        monkeypatch.setattr(counterexample, "MOST_CALLS", 12 * len(pm.after.nodes))
    changed = pm.rank_module(CHANGED)
    gelu = next(node for node in changed.graph.nodes if node.target is aten.gelu.default)
    gelu.target = aten.relu.default
    changed.recompile()
    verdict = pm.verify(modules={CHANGED: changed})
    assert verdict.status == "refuted" and verdict.fault is not None
    assert verdict.fault.node == gelu.name and verdict.fault.rank == CHANGED
    assert ("6 ranks run for 24" in verdict.fault.numbers) == cheap, verdict.why
    with pytest.raises(sx.Error, match="of the model"):
        pm.use({CHANGED: changed})


@pytest.mark.long
def test_numbers_that_are_nearly_the_same_are_told_apart() -> None:
    pm = plan()
    changed = pm.rank_module(CHANGED)
    gelu = next(node for node in changed.graph.nodes if node.target is aten.gelu.default)
    with changed.graph.inserting_after(gelu):
        twice = changed.graph.call_function(aten.mul.Tensor, (gelu, 1.000001))
    gelu.replace_all_uses_with(twice, lambda user: user is not twice)
    changed.recompile()
    verdict = pm.verify(modules={CHANGED: changed})
    assert verdict.status == "refuted" and verdict.fault is not None
    got, _, rest = verdict.fault.numbers.partition(" is ")[2].partition(", and ")
    assert float(got) != float(rest.split()[0])
