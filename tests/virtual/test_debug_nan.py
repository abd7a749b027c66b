"""``pm.debug_nan()``: the first node that makes a NaN or an inf, in forward and backward, over all ranks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from tests.captures import captured_once

MESH = sx.Mesh(dp=2, tp=2)
SPECS = {"args.0": "dp, -", "targets.0": "dp", "fc1.weight": "tp, -"}


class Net(nn.Module):
    """``kind`` says what is done between two linears."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, 4)
        self.register_buffer("mask", torch.zeros(8).masked_fill(torch.arange(8) == 3, -math.inf))

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        if self.kind == "log":
            h = torch.log(h)
        if self.kind == "root":
            h = (h * h).sqrt()
        if self.kind == "masks":
            h = (h + self.mask).masked_fill(h > 1e3, -math.inf).softmax(-1)
        return self.fc2(h)


@captured_once("test_debug_nan")
def make(kind: str = "", **hints: object) -> tuple[sx.ParallelModule, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Net(kind).double()
    with torch.no_grad():
        model.fc1.weight[6], model.fc1.bias[6] = 0, 0
    x, y = torch.randn(8, 6).double(), torch.arange(8) % 4
    given = sx.Hints((x,), loss=F.cross_entropy, targets=(y,), specs=SPECS, **hints)  # type: ignore[arg-type]
    return sx.parallelize(model, MESH, given), x, y


def hunt(pm: sx.ParallelModule, *inputs: Tensor, inf: bool = True) -> str:
    with pytest.raises(sx.Error) as caught, pm.debug_nan(inf=inf):
        pm(*inputs)
    return str(caught.value)


def test_a_nan_in_the_forward_is_named() -> None:
    pm, x, y = make("log")
    text = hunt(pm, x, y)
    assert text.startswith("a NaN was made from finite numbers, by aten.log"), text
    assert "rank 0; node 'log'" in text and "test_debug_nan.py" in text and "`h = torch.log(h)`" in text, text
    assert "forward" in text and "addmm float64[4, 4] from -" in text, text


def test_in_the_backward_and_on_the_rank_that_made_it() -> None:
    """The root of unit 6 is zero, and has no derivative there: rank 1 holds it, and rank 3."""
    pm, x, y = make("root")
    assert math.isfinite(pm(x, y).item())
    text = hunt(pm, x, y)
    assert text.startswith("an inf was made from finite numbers, by aten.div"), text
    assert "rank 1; node" in text and "backward" in text and ".sqrt()" in text, text
    text = hunt(pm, x, y, inf=False)
    assert text.startswith("a NaN was made from infinite numbers, by aten.mul"), text


def test_infinities_that_are_meant_are_let_through() -> None:
    pm, x, y = make("masks")
    with pm.debug_nan():
        loss = pm(x, y)
    loss.backward()
    assert loss.item() == pm(x, y).item()
    assert all(bool(grad.isfinite().all()) for grad in pm.full_grads().values())


def test_what_is_nan_already_is_named_as_such() -> None:
    pm, x, y = make()
    with torch.no_grad():
        x[5, 2] = math.nan
    text = hunt(pm, x, y)
    assert "argument 'args.0' is not finite" in text and "rank 2" in text and "1 NaN" in text, text
    state = pm.full_state_dict()
    state["fc1.weight"][7, 0] = math.nan
    pm.load_full_state_dict(state)
    text = hunt(pm, x.nan_to_num(), y)
    assert "parameter 'fc1.weight' is not finite" in text and "rank 1" in text, text


@pytest.mark.long
def test_in_evaluation_and_inference_too_and_only_within_the_context() -> None:
    pm, x, y = make("log")
    pm.eval()
    with torch.no_grad():
        assert "aten.log" in hunt(pm, x)
        assert math.isnan(pm(x, y).item())
    pm.train()
    assert math.isnan(pm(x, y).item())


def test_a_sum_over_ranks_that_overflows() -> None:
    """Each rank's part is finite, and their sum is not."""
    pm, x, y = make()
    state = pm.full_state_dict()
    state["fc2.weight"].fill_(1e308), state["fc1.weight"].zero_(), state["fc1.bias"].fill_(0.3)
    pm.load_full_state_dict(state)
    text = hunt(pm, x, y)
    assert text.startswith("an inf was made from finite numbers, by all_reduce"), text
    assert "fc2" in text and "tp" not in text.split("\n")[0].split("by")[0], text
