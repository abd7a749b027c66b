"""``Hints(grad_accumulation=4)``: iterations of the batch beside what hints say, or why there are none."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardfx as sx
from shardfx.ir.ops import pack
from shardfx.module.programs import TRAIN
from tests.reference import check_step
from tests.zoo import make


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
    assert any(node.target is pack.unflatten for node in pm._programs.running(0, TRAIN).graph.nodes)
