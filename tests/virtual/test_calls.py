"""Calls: other sizes, modes, frozen weights, autocast, hooks; each does what eager PyTorch does, or is an error."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardfx as sx

F64 = torch.float64
SPECS = {"args.0": "dp, -", "targets.0": "dp"}


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(8, 8, dtype=F64), torch.randint(0, 4, (8,))


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).double()


def parallel(model: nn.Module, mesh: sx.Mesh | None = None, **hints: Any) -> sx.ParallelModule:
    x, y = batch()
    given = {"args": (x,), "loss": F.cross_entropy, "targets": (y,), "specs": SPECS} | hints
    return sx.parallelize(model, mesh or sx.Mesh(dp=2), sx.Hints(**given))


def near(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.allclose(ours.detach(), theirs.detach(), rtol=0, atol=1e-12)


def same_step(pm: sx.ParallelModule, alone: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    """Loss and gradients of a step."""
    pm.zero_grad(), alone.zero_grad()
    ours, theirs = pm(x, y), F.cross_entropy(alone(x), y)
    ours.backward(), theirs.backward()
    assert near(ours, theirs)
    grads = pm.full_grads()
    assert all(near(grads[name], p.grad) for name, p in alone.named_parameters() if p.grad is not None)
    assert set(grads) == {name for name, p in alone.named_parameters() if p.grad is not None}


def test_an_input_without_content_is_refused() -> None:
    pm, (x, y) = parallel(mlp()), batch()
    with pytest.raises(sx.Error, match=r"(?s)no content.*args\.0"):
        pm(x.to("meta"), y)


# ---- another call signature -----------------------------------------------------------------------------------


@pytest.mark.long
def test_batches_of_other_sizes(caplog: pytest.LogCaptureFixture) -> None:
    """The last batch of an epoch is planned when it comes, once, and one line of the log says so."""
    x, y = batch()
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)).double()
    alone = copy.deepcopy(model)
    pm = parallel(model, max_specializations=2)
    with caplog.at_level(logging.WARNING, "shardfx"):
        for rows in (8, 3, 8, 3):
            same_step(pm, alone, x[:rows], y[:rows])
    assert len(caplog.records) == 1 and "args.0 is (3, 8) float64, not (8, 8)" in caplog.text
    state = pm.full_state_dict()
    assert all(near(state[name], tensor) for name, tensor in alone.state_dict().items())
    same_step(pm, alone, x[:5], y[:5])
    with pytest.raises(sx.Error, match=r"as many plans as the hints allow(.|\n)*args.0 is \(6, 8\)(.|\n)*allow more"):
        pm(x[:6], y[:6])
    same_step(pm, alone, x[:3], y[:3])


class Scaled(nn.Module):
    """Branches on arguments that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, scale: float = 1.0, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = self.linear(x) * scale
        return y if mask is None else y * mask


@pytest.mark.long
def test_arguments_that_are_no_tensors_may_change() -> None:
    x, y = batch()
    model = Scaled().double()
    pm = parallel(model, kwargs={"scale": 2.0, "mask": None})
    mask = torch.rand(4, dtype=F64)
    for scale, given in ((2.0, None), (3.0, None), (3.0, mask)):
        assert near(pm(x, y, scale=scale, mask=given), F.cross_entropy(model(x, scale, given), y))


@pytest.mark.long
def test_inputs_with_gradients_and_frozen_parameters_match_eager() -> None:
    x, y = batch()
    model = mlp()
    model[0].weight.requires_grad_(False)
    pm, alone = parallel(model), copy.deepcopy(model)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    same_step(pm, alone, x, y)
    pm(ours * 2, y).backward(), F.cross_entropy(alone(theirs * 2), y).backward()
    assert ours.grad is not None and theirs.grad is not None and near(ours.grad, theirs.grad)
    pm.get_submodule("0").weight.requires_grad_(True), alone[0].weight.requires_grad_(True)  # type: ignore[union-attr]
    pm.get_submodule("2").bias.requires_grad_(False), alone[2].bias.requires_grad_(False)  # type: ignore[union-attr]
    alone.zero_grad(), pm.zero_grad()
    same_step(pm, alone, x, y)


@pytest.mark.long
def test_autocast_around_a_call() -> None:
    """Casts are captured, and programs run without casts of their own."""
    x, y = batch()
    x, model = x.float(), mlp().float()
    pm, alone = parallel(model, args=(x,)), copy.deepcopy(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = pm(x, y), F.cross_entropy(alone(x), y)
    ours.backward(), theirs.backward()
    assert ours.dtype == theirs.dtype and near(ours, theirs)
    assert torch.allclose(pm(x, y), F.cross_entropy(alone(x), y), rtol=1e-6)
    grads = pm.full_grads()
    for name, p in alone.named_parameters():
        assert p.grad is not None and torch.allclose(grads[name], p.grad, rtol=0.02, atol=2e-3)


class Autocast(nn.Module):
    """Computes in bfloat16, and casts back behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.norm(self.linear(x))
        return h.float()


@pytest.mark.long
def test_autocast_in_forward() -> None:
    x, y = batch()
    x, model = x.float(), Autocast()
    pm = parallel(copy.deepcopy(model), args=(x,))
    ours, theirs = pm(x, y), F.cross_entropy(model(x), y)
    ours.backward(), theirs.backward()
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    for name, p in model.named_parameters():
        torch.testing.assert_close(pm.full_grads()[name], p.grad, rtol=0.05, atol=5e-3)
    assert pm.verify()


# ---- inputs are bound by position ---------------------------------------------------------------------------


class Holds(nn.Module):
    """Multiplies with a buffer and a parameter of the input's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.linear = nn.Parameter(batch()[0].clone()), nn.Linear(8, 4)
        self.register_buffer("held", batch()[0].clone())

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.linear(a * b.cos() * self.weight * self.held)


@pytest.mark.parametrize("which", ["twice", "buffer", "parameter"])
def test_example_that_is_another_input_buffer_or_parameter_too(which: str) -> None:
    x, y = batch()
    model = Holds().double()
    example = {"twice": x, "buffer": model.held, "parameter": model.weight}[which]
    pm = parallel(model, args=(x, example))
    other = torch.randn_like(x)
    assert near(pm(x, other, y), F.cross_entropy(model(x, other), y))
    assert all(type(p) is nn.Parameter for p in model.parameters())


# ---- wherever it is called ----------------------------------------------------------------------------------


def test_training_step_is_planned_in_inference_mode() -> None:
    model = mlp()
    with torch.inference_mode():
        pm = parallel(model)
    same_step(pm, copy.deepcopy(model), *batch())


def test_deepcopy_shares_no_weights() -> None:
    x, y = batch()
    pm = parallel(mlp())
    made = copy.deepcopy(pm)
    before = pm(x, y).detach()
    made(x, y).backward()
    torch.optim.SGD(made.parameters(), lr=1.0).step()
    assert near(pm(x, y), before) and not near(made(x, y), before)
    assert copy.deepcopy(pm.rank_module(0)).code == pm.rank_module(0).code


def test_hooks_of_pm_are_called() -> None:
    x, y = batch()
    pm, seen = parallel(mlp()), list[str]()
    parameter = next(pm.parameters())
    parameter.register_hook(lambda grad: seen.append("parameter"))  # type: ignore[no-untyped-call]
    parameter.register_post_accumulate_grad_hook(lambda tensor: seen.append("accumulated"))
    pm.register_forward_hook(lambda *_: seen.append("module"))
    pm(x, y).backward()
    assert seen == ["module", "parameter", "accumulated"]
