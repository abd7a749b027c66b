"""``sx.LossScale``: a scale of the loss in the program, which grows and falls as that of a GradScaler does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx

STEPS = "..x....xx..."
"""Those of an x overflow."""
ADAPTS, MESH = sx.LossScale(), sx.Mesh(dp=2)


def data() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(6, 4), torch.randn(8, 6), torch.randint(0, 4, (8,))


def planned(scale: sx.LossScale, mesh: sx.Mesh, output: Any = torch.float32, **hints: Any) -> sx.ParallelModule:
    model, x, y = data()
    given: dict[str, Any] = {"args": (x,), "targets": (y,), "loss": F.cross_entropy, "specs": {"args.0": "dp, -"}}
    given |= {"optimizer": lambda ps: torch.optim.AdamW(ps, lr=1e-2), **hints}
    compute = sx.MixedPrecision(torch.float16, output_dtype=output, loss_scale=scale)
    return sx.parallelize(model, mesh, sx.Hints(**given, mixed_precision=compute), virtual=True)


def scales_of_torch(scale: sx.LossScale) -> list[float]:
    """Those of a GradScaler on one device, behind each step."""
    model, x, y = data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=scale.init,
        growth_factor=scale.growth,
        backoff_factor=scale.backoff,
        growth_interval=scale.interval,
    )
    found = []
    for step in STEPS:
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(overflowing(x) if step == "x" else x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(scaler.get_scale())
    return found


def overflowing(x: Tensor) -> Tensor:
    x = x.clone()
    x[7, 0] = torch.inf
    return x


@pytest.mark.long
@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "hints", [{"zero": 1, "zero_min_numel": 0}, {"offload": ("optimizer",)}], ids=["zero", "offload"]
)
def test_it_goes_as_that_of_a_grad_scaler(hints: dict[str, Any]) -> None:
    scale = sx.LossScale(2.0**12, interval=3)
    pm, (_, x, y) = planned(scale, sx.Mesh(dp=2), **hints), data()
    found = []
    for step in STEPS:
        before = pm.full_state_dict()
        loss = pm.step(overflowing(x) if step == "x" else x, y)
        after = pm.full_state_dict()
        assert all(torch.equal(before[name], after[name]) == (step == "x") for name in before)
        assert step == "x" or loss.isfinite()
        found.append(pm.optimizer.loss_scale)
    assert found == scales_of_torch(scale)
    verdict = pm.verify()
    assert verdict, verdict.why


@pytest.mark.long
def test_gradients_are_those_of_the_loss_also_before_the_first_step() -> None:
    pm, (model, x, y) = planned(sx.LossScale(2.0**10), sx.Mesh(dp=2)), data()
    F.cross_entropy(model(x), y).backward()
    for call in (lambda: pm(x, y), lambda: F.cross_entropy(pm(x), y)):
        pm.zero_grad()
        call().backward()
        torch.testing.assert_close(pm.full_grads()["weight"], model.weight.grad, rtol=5e-3, atol=5e-4)


@pytest.mark.long
def test_it_goes_on_under_another_plan() -> None:
    scale, (_, x, y) = sx.LossScale(2.0**10, interval=3), data()
    pm, other = planned(scale, sx.Mesh(dp=2)), planned(scale, sx.Mesh(dp=4), zero=1, zero_min_numel=0)
    for _ in range(4):
        pm.step(x, y)
    other.load_full_state_dict(pm.full_state_dict())
    other.optimizer.load_full_state_dict(copy.deepcopy(pm.optimizer.full_state_dict()))
    assert other.optimizer.loss_scale == pm.optimizer.loss_scale == 2.0**11
    assert [other.step(x, y) is not None and other.optimizer.loss_scale for _ in range(2)] == [2.0**11, 2.0**12]


@pytest.mark.long
def test_it_stays_where_the_loss_holds_no_more() -> None:
    pm, (_, x, y) = planned(sx.LossScale(2.0**14, interval=1), sx.Mesh(dp=2), None), data()
    found = []
    for _ in range(3):
        pm.step(x, y)
        found.append(pm.optimizer.loss_scale)
    assert found == [2.0**15] * 3  # of float16, 65504 is the largest


def test_other_plans_have_none() -> None:
    model, x, y = data()
    hints = sx.Hints((x,), targets=(y,), loss=F.cross_entropy, optimizer=torch.optim.SGD)
    assert sx.parallelize(model, sx.Mesh(dp=2), hints, virtual=True).optimizer.loss_scale is None


@pytest.mark.parametrize(
    ("what", "make"),
    [
        ("is stepped with the optimizer(.|\n)*scale=2.0", lambda: planned(ADAPTS, MESH, optimizer=None)),
        ("at most 65504(.|\n)*output_dtype=torch.float32", lambda: planned(ADAPTS, MESH, None)),
        (r"LossScale\(growth=...\)(.|\n)*above one", lambda: sx.LossScale(growth=1.0)),
        (r"LossScale\(backoff=...\)", lambda: sx.LossScale(backoff=2.0)),
        (r"LossScale\(interval=...\)", lambda: sx.LossScale(interval=0)),
        (r"LossScale\(init=...\)", lambda: sx.LossScale(init=float("nan"))),
    ],
)
def test_what_is_no_scale_is_said(what: str, make: Any) -> None:
    with pytest.raises(sx.Error, match=what):
        make()
