"""Losses with tensors of their own (class weights, closures, a teacher), and ``sx.LossScale``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from tests.reference import check_step

from .test_calls import F64, SPECS, batch, mlp, near

X, Y = batch()
WEIGHT = torch.rand(4, dtype=F64)
MESH = sx.Mesh(dp=2, tp=2)
SHARDING = {**SPECS, "0.weight": "tp, -", "2.weight": "tp, -"}


class Tempered(nn.Module):
    """A temperature that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor(0.3, dtype=F64))

    def forward(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out * self.log.exp(), y)


def distilled(teacher: nn.Module) -> Callable[..., torch.Tensor]:
    return lambda out, y: F.cross_entropy(out, y) + F.mse_loss(out, teacher(out.detach()))


def teacher() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(4, 4).double().requires_grad_(False)


LOSSES: dict[str, Callable[..., Any]] = {
    "a module": nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1, reduction="sum"),
    "a global": lambda out, y: F.binary_cross_entropy_with_logits(out, F.one_hot(y, 4).to(out), pos_weight=WEIGHT),
    "a partial": partial(F.cross_entropy, weight=WEIGHT),
    "a teacher": distilled(teacher()),
}


def given(loss: Callable[..., Any]) -> sx.Hints:
    return sx.Hints(args=(X,), loss=loss, targets=(Y,), specs=SHARDING)


@pytest.mark.long
@pytest.mark.parametrize("which", LOSSES)
def test_tensors_of_the_loss_are_its_own_parameters_and_buffers(which: str) -> None:
    loss, model = LOSSES[which], mlp()
    alone, names = copy.deepcopy(model), list(model.state_dict())
    pm = sx.parallelize(model, MESH, given(loss))
    check_step(pm, alone, loss, (X,), (Y,), proven=False)
    assert [name for name in pm.full_state_dict() if not name.startswith("loss.")] == names
    if "teacher" not in which:
        alone.load_state_dict(pm.full_state_dict())
    with pm.gathered() as whole:
        assert type(whole) is nn.Sequential and list(whole.state_dict()) == names
    assert list(model.state_dict()) == names and near(pm.eval()(X[:3]), alone(X[:3])) and pm.verify()
    assert "loss" in str(sx.api.trace(mlp(), given(loss)))


@pytest.mark.long
def test_parameter_of_the_loss_is_trained() -> None:
    """By the optimizer that has it beside the model's parameters."""

    def make() -> tuple[nn.Module, Callable[..., Any], list[nn.Parameter]]:
        model, tempered = mlp(), Tempered()
        return model, lambda out, y: tempered(out, y), [*model.parameters(), *tempered.parameters()]

    model, loss, parameters = make()
    alone, their_loss, theirs = make()
    optimizers = [torch.optim.SGD(each, lr=0.1) for each in (parameters, theirs)]
    pm = sx.parallelize(model, MESH, given(loss), optimizer=optimizers[0])
    for _ in range(3):
        for optimizer, made in zip(optimizers, (pm(X, Y), their_loss(alone(X), Y)), strict=True):
            optimizer.zero_grad()
            made.backward()
            optimizer.step()
    state = pm.full_state_dict()
    (learned,) = [tensor for name, tensor in state.items() if name.startswith("loss.")]
    assert near(learned, theirs[-1]) and float((learned - 0.3).abs()) > 1e-4
    assert all(near(state[name], tensor) for name, tensor in alone.state_dict().items())


@pytest.mark.long
def test_a_penalty_on_the_weights() -> None:
    """The loss may look at the model that it is of."""
    model = mlp()
    alone = copy.deepcopy(model)

    def with_penalty(of: nn.Module) -> Callable[..., torch.Tensor]:
        return lambda out, y: F.cross_entropy(out, y) + 0.1 * torch.stack([p.norm() for p in of.parameters()]).sum()

    pm = sx.parallelize(model, MESH, given(with_penalty(model)))
    check_step(pm, alone, with_penalty(alone), (X,), (Y,), proven=False)


@pytest.mark.long
def test_tensor_of_the_loss_that_changes_is_an_error() -> None:
    """What pm has of it is its own."""
    weight = WEIGHT.clone()

    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out, y, weight)

    pm = sx.parallelize(mlp(), MESH, given(loss))
    before, other = pm(X, Y), copy.deepcopy(pm)
    weight[0] = 3
    for each in (pm, other):
        with pytest.raises(sx.Error, match=r"tensor of the loss has changed(.|\n)*pm.loss.weight"):
            each(X, Y)
    assert before.isfinite()


def test_smooth_l1_of_nan_has_a_nan_gradient() -> None:
    """Also of what is infinite on both sides; it was 0, and a step went on as if nothing were wrong."""
    beta = 0.3
    x, y = torch.randn(2, 6, 5, dtype=F64)
    hints = sx.Hints(args=(x.clone().requires_grad_(),), targets=(y,), loss=partial(F.smooth_l1_loss, beta=beta))
    pm = sx.parallelize(nn.Identity(), sx.Mesh(r=2), replace(hints, specs={"args.0": "-, r"}), virtual=True)
    x[0, 0], x[3, 1], y[3, 1], x[2, 2] = float("nan"), float("inf"), float("inf"), y[2, 2]
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    pm(ours, y).backward()
    F.smooth_l1_loss(theirs, y, beta=beta).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, equal_nan=True)


STEPS = "..x....xx..."
"""Those of an x overflow."""
ADAPTS, SCALE_MESH = sx.LossScale(), sx.Mesh(dp=2)


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
def test_loss_scale_adapts_as_a_grad_scaler() -> None:
    scale = sx.LossScale(2.0**12, interval=3)
    pm, (_, x, y) = planned(scale, sx.Mesh(dp=2), zero=1, zero_min_numel=0), data()
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
def test_gradients_of_a_scaled_loss_are_unscaled() -> None:
    pm, (model, x, y) = planned(sx.LossScale(2.0**10), sx.Mesh(dp=2)), data()
    F.cross_entropy(model(x), y).backward()
    for call in (lambda: pm(x, y), lambda: F.cross_entropy(pm(x), y)):
        pm.zero_grad()
        call().backward()
        torch.testing.assert_close(pm.full_grads()["weight"], model.weight.grad, rtol=5e-3, atol=5e-4)


@pytest.mark.long
def test_loss_scale_is_carried_over_to_another_plan() -> None:
    scale, (_, x, y) = sx.LossScale(2.0**10, interval=3), data()
    pm, other = planned(scale, sx.Mesh(dp=2)), planned(scale, sx.Mesh(dp=4), zero=1, zero_min_numel=0)
    for _ in range(4):
        pm.step(x, y)
    other.load_full_state_dict(pm.full_state_dict())
    other.optimizer.load_full_state_dict(copy.deepcopy(pm.optimizer.full_state_dict()))
    assert other.optimizer.loss_scale == pm.optimizer.loss_scale == 2.0**11
    assert [other.step(x, y) is not None and other.optimizer.loss_scale for _ in range(2)] == [2.0**11, 2.0**12]


@pytest.mark.long
def test_loss_scale_stays_in_the_range_of_float16() -> None:
    pm, (_, x, y) = planned(sx.LossScale(2.0**14, interval=1), sx.Mesh(dp=2), None), data()
    found = []
    for _ in range(3):
        pm.step(x, y)
        found.append(pm.optimizer.loss_scale)
    assert found == [2.0**15] * 3  # of float16, 65504 is the largest


@pytest.mark.parametrize(
    ("what", "make"),
    [
        ("is stepped with the optimizer(.|\n)*scale=2.0", lambda: planned(ADAPTS, SCALE_MESH, optimizer=None)),
        ("at most 65504(.|\n)*output_dtype=torch.float32", lambda: planned(ADAPTS, SCALE_MESH, None)),
        (r"LossScale\(growth=...\)(.|\n)*above one", lambda: sx.LossScale(growth=1.0)),
        (r"LossScale\(backoff=...\)", lambda: sx.LossScale(backoff=2.0)),
        (r"LossScale\(interval=...\)", lambda: sx.LossScale(interval=0)),
        (r"LossScale\(init=...\)", lambda: sx.LossScale(init=float("nan"))),
    ],
)
def test_wrong_loss_scale_is_an_error(what: str, make: Any) -> None:
    with pytest.raises(sx.Error, match=what):
        make()


class Padded(nn.Module):
    """A loss whose targets end at -1: torch 2.13 decomposes it as if what is behind them were targets."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.multilabel_margin_loss(self.fc(x), y)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_multilabel_margin_loss_leaves_out_padding(device: str) -> None:
    torch.manual_seed(0)
    model, x = Padded(), torch.randn(4, 4)
    y = torch.tensor([[1, 2, -1, 0, 0, 0], [3, -1, 0, 0, 0, 0]] * 2)
    args = (x.to(device), y.to(device))
    specs = {"args.0": "dp, -", "args.1": "dp, -"}
    hints = sx.Hints(args=args, loss=lambda out: out, specs=specs, device="cpu")
    pm = sx.parallelize(Padded().to(device), sx.Mesh(dp=2), hints, virtual=True)
    pm.load_full_state_dict(model.state_dict())
    torch.testing.assert_close(pm(x, y), model(x, y))


@pytest.mark.parametrize("function", [torch.cov, torch.corrcoef])
def test_covariances_are_captured_without_guards(function: Callable[[Tensor], Tensor]) -> None:
    class Covariance(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return function(self.fc(x).T)

    torch.manual_seed(0)
    model, x = Covariance().double(), torch.randn(8, 4, dtype=torch.float64)
    hints = sx.Hints(args=(x,), loss=torch.sum, specs={"args.0": "dp, -"})
    pm = sx.parallelize(copy.deepcopy(model), sx.Mesh(dp=2), hints, virtual=True)
    check_step(pm, model, torch.sum, (x,), bound=1e-10)
