"""``Hints(accumulate=4)``: turns of the batch beside what hints say, or why there are none."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardfx as sx
from tests.zoo import make


def test_a_batch_that_has_too_few_rows_says_how_many_it_needs() -> None:
    case = make("gpt_fused")
    x, y = case.args[0][:6], case.targets[0][:6]
    hints = sx.Hints(args=(x,), loss=case.loss, targets=(y,), specs={"args.0": "dp, -"}, accumulate=4)
    with pytest.raises(sx.Error, match="too few rows to be done in turns") as error:
        sx.parallelize(case.model, sx.Mesh(dp=2), hints, virtual=True)
    assert "args.0" in str(error.value) and "at least 8 rows, one for each of 4 turns by 2 ranks" in str(error.value)


def test_turns_of_the_batch_stand_beside_turns_of_another_dim() -> None:
    """What cuts another dim over time already is cut into turns of the batch all the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, y = torch.randn(8, 4, 6, dtype=torch.float64), torch.randn(8, 4, 3, dtype=torch.float64)
    for mesh, spec, expected in (
        (sx.Mesh(chunk=sx.Time(2)), "-, chunk, -", "[.{mb}, .{chunk}, .]"),
        (sx.Mesh(chunk=sx.Time(2)), "chunk, -, -", "[.{mb,chunk}, ., .]"),
    ):
        hints = sx.Hints(args=(x,), loss=F.mse_loss, targets=(y,), specs={"args.0": spec}, accumulate=2)
        pm = sx.parallelize(copy.deepcopy(model), mesh, hints, virtual=True)
        assert str(pm.after.input("args.0").value.spec) == expected
        made, alone = pm(x, y), F.mse_loss(model(x), y)
        made.backward()
        model.zero_grad()
        alone.backward()
        assert abs(made.item() - alone.item()) < 1e-12
        assert model[0].weight.grad is not None
        assert (pm.full_grads()["0.weight"] - model[0].weight.grad).abs().max() < 1e-12
        assert pm.verify()
