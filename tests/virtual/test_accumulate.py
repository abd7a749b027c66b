"""``Hints(grad_accumulation=4, reduce=...)``: iterations of the batch, what they are added into, when it is reduced."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from shardfx.ir.ops import comm, pack
from shardfx.ir.program.loops.loop_regions import regions
from tests.live_memory import check_footprint, held_in_a_step
from tests.models import Language, next_tokens
from tests.plans import plan
from tests.reference import check_step
from tests.zoo import Case, make


@pytest.mark.long
def test_a_batch_that_has_too_few_rows_says_how_many_it_needs() -> None:
    case = make("gpt_fused")
    x, y = case.args[0][:6], case.targets[0][:6]
    hints = sx.Hints(args=(x,), loss=case.loss, targets=(y,), specs={"args.0": "dp, -"}, grad_accumulation=4)
    with pytest.raises(sx.Error, match="too few rows to be done in micro-batches") as error:
        sx.parallelize(case.model, sx.Mesh(dp=2), hints, virtual=True)
    said = str(error.value)
    assert "args.0" in said and "at least 8 rows, one for each of 4 micro-batches by 2 ranks" in said


@pytest.mark.long
def test_iterations_of_the_batch_stand_beside_iterations_of_another_dim() -> None:
    """What shards another dim over time already is split into iterations of the batch all the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, y = torch.randn(8, 4, 6, dtype=torch.float64), torch.randn(8, 4, 3, dtype=torch.float64)
    for mesh, spec, expected in (
        (sx.Mesh(chunk=sx.Loop(2)), "-, chunk, -", "[.{mb}, .{chunk}, .]"),
        (sx.Mesh(chunk=sx.Loop(2)), "chunk, -, -", "[.{mb,chunk}, ., .]"),
    ):
        hints = sx.Hints(args=(x,), loss=F.mse_loss, targets=(y,), specs={"args.0": spec}, grad_accumulation=2)
        pm = sx.parallelize(copy.deepcopy(model), mesh, hints, virtual=True)
        assert str(pm.planned.input("args.0").value.spec) == expected
        model.zero_grad()
        check_step(pm, model, F.mse_loss, (x,), (y,), bound=1e-12)


@pytest.mark.long
def test_sums_that_are_fused_may_be_as_long_as_a_iterations_rows() -> None:
    """The check of a program took the lengths of iterations that are not alike for numbers: TypeError of torch.Size."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    specs = {"0.weight": "a, -", "1.weight": "a", "2.weight": "-, a"}
    hints = sx.Hints(args=(x,), loss=lambda out: out.pow(2).mean(), specs=specs, grad_accumulation=2)
    pm = sx.parallelize(copy.deepcopy(model), sx.Mesh(a=2), hints, virtual=True)
    check_step(pm, model, lambda out: out.pow(2).mean(), (x,), bound=1e-12, proven=False)
    assert any(node.target is pack.unflatten for node in pm.rank_program(0).graph.nodes)


def planned(**hints: Any) -> sx.ParallelModule:
    return plan(make("mlp3"), sx.Mesh(dp=2), grad_accumulation=4, zero_min_numel=0, **hints)


def reduced_in_iterations(pm: sx.ParallelModule) -> bool:
    """Whether a gradient is reduced among ranks in iterations."""
    nodes = pm.rank_program(0).graph.nodes
    inside = regions(nodes)
    return any("reduce_scatter" in node.name and inside[node] for node in nodes)


@pytest.mark.parametrize("zero", [1, 2])  # with zero=3 buckets are finer, and "last" holds no more than "each"
@pytest.mark.slow
def test_it_is_what_fits(zero: int) -> None:
    last, each = (planned(zero=zero, reduce=way) for way in ("last", "each"))
    assert not reduced_in_iterations(last) and reduced_in_iterations(each)
    peaks = [pm.memory(0).peak for pm in (last, each)]
    assert peaks[1] < peaks[0]
    ample, tight = (planned(zero=zero, memory=peak) for peak in (peaks[0], peaks[0] - 1))
    assert not reduced_in_iterations(ample) and reduced_in_iterations(tight)
    assert ample.memory(0).peak == peaks[0] and tight.memory(0).peak == peaks[1]
    for pm, said in ((ample, "reduced once, behind the last iteration"), (tight, "reduced in each iteration")):
        (sent,) = (node for node in pm.planned.nodes if node.op is comm.reduce_scatter)
        assert said in str(pm.explain(f"%{sent.name}"))
    assert any("which is faster" in note for note in ample.report().warnings)
    assert any("may hold" in note for note in tight.report().warnings)
    assert ample.verify() and tight.verify()


@pytest.mark.long
def test_a_machine_that_is_named_says_what_a_rank_may_hold() -> None:
    assert not reduced_in_iterations(planned(zero=2, machine="h100-dgx"))
    assert reduced_in_iterations(planned(zero=2))


def test_whole_gradients_are_reduced_once() -> None:
    pm = planned(zero=0, machine="h100-dgx")
    assert "all_reduce" in str(pm.rank_program(0)) and not any("reduced" in note for note in pm.report().warnings)


WORDS, WIDTH = 61, 8


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x, y = torch.randint(WORDS - 1, (8, 6)), torch.randint(WORDS - 1, (8, 6))
    y[0, :5] = -100
    return x, y


def add_planned(model: nn.Module, **hints: Any) -> sx.ParallelModule:
    x, y = batch()
    given = sx.Hints(args=(x,), loss=next_tokens, targets=(y,), specs={"args.0": "dp, -"}, grad_accumulation=3, **hints)
    return sx.parallelize(copy.deepcopy(model), sx.Mesh(dp=2), given, virtual=True)


@pytest.mark.long
@pytest.mark.parametrize("table", [{}, {"padding_idx": 5}, {"padding_idx": 0}, {"words": 60}], ids=str)
@pytest.mark.parametrize("hints", [{}, {"zero": 2, "zero_min_numel": 0, "reduce": "last"}], ids=str)
@pytest.mark.one_in(9)
def test_gradients_are_those_of_one_device(table: dict[str, Any], hints: dict[str, Any]) -> None:
    torch.manual_seed(1)
    model = Language(**{"words": WORDS, **table}).double()
    pm = add_planned(model, **hints)
    x, y = batch()
    check_step(pm, model, next_tokens, (x,), (y,), bound=1e-12)
    text = str(pm.rank_program(1))
    in_shards = "zero" in hints and "words" in table  # rows of both ranks stand together: so is a product added
    assert "loop.addmm" in text and ("loop.index_add" in text) != in_shards


@pytest.mark.long
def test_a_gradient_is_never_there_twice() -> None:
    x, y = batch()
    pm = add_planned(Language(WORDS).double())
    held = held_in_a_step(pm, Case("language", Language(WORDS).double(), (x,), {}, next_tokens, (y,)))
    for rank in range(2):
        check_footprint(pm.rank_program(rank), held[rank])
    table = WORDS * WIDTH * 8
    assert all(storage.nbytes != table for storage in pm.memory(0).footprint.storages)


Added = Callable[[Tensor, Tensor, Tensor], Tensor]


class Adds(nn.Module):
    def __init__(self, added: Added) -> None:
        super().__init__()
        self.w, self.v = (nn.Parameter(torch.randn(8, 6, dtype=torch.float64)) for _ in range(2))
        self.register_buffer("places", torch.tensor([1, 0, 2, 1, 3, 0, 1, 1]))
        self.added = added

    def forward(self, x: Tensor) -> Tensor:
        return self.added(x @ self.w, self.places, self.v)


ADDED: dict[str, Added] = {
    "index_add": lambda y, to, v: torch.index_add(y, 0, to, v, alpha=2),
    "scatter_add": lambda y, to, v: torch.scatter_add(torch.cat([y, y]), 0, to[:, None].expand(8, 6), v),
    "index_put": lambda y, to, v: torch.index_put(y, (to,), v, accumulate=True),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ADDED)
def test_what_is_added_to_a_partial_sum_is_reduced_once(name: str) -> None:
    torch.manual_seed(0)
    model, x = Adds(ADDED[name]), torch.randn(4, 8, dtype=torch.float64)
    hints = sx.Hints(args=(x,), specs={"args.0": "-, tp", "w": "tp, -", "v": "tp, -"}, loss=lambda y: (y**2).sum())
    pm = sx.parallelize(model, sx.Mesh(tp=2), hints)
    forward = [node for node in pm.planned.nodes if node.phase.name == "FORWARD" and str(node.op).startswith("comm.")]
    assert len(forward) == 1, pm.planned
    check_step(pm, model, lambda y: (y**2).sum(), (x,), bound=1e-12)
