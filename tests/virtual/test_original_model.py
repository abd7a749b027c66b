"""The original model after ``parallelize``: an optimizer of it, weights that are changed, memory that is freed."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardfx as sx

from .test_calls import F64, SPECS, batch, mlp, near

X, Y = batch()
MESHES = {"dp": (sx.Mesh(dp=2), {}), "tp": (sx.Mesh(dp=2, tp=2), {"0.weight": "tp, -", "2.weight": "-, tp"})}


def parallel(model: nn.Module, mesh: str = "dp", **given: Any) -> sx.ParallelModule:
    made, specs = MESHES[mesh]
    hints = sx.Hints(args=(X,), loss=F.cross_entropy, targets=(Y,), specs={**SPECS, **specs})
    return sx.parallelize(model, made, hints, **given)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss = model(X, Y) if isinstance(model, sx.ParallelModule) else F.cross_entropy(model(X), Y)
    loss.backward()
    optimizer.step()


def with_groups(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [(n, p) for n, p in model.named_parameters() if p.dim() > 1]
    others = [(n, p) for n, p in model.named_parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.02}]
    return torch.optim.AdamW(groups, lr=0.01)


MADE: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": with_groups,
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize(("kind", "mesh"), [("AdamW", "tp"), ("SGD", "dp")])
def test_an_optimizer_goes_on_with_the_shards(kind: str, mesh: str) -> None:
    """Groups and states, of before and after; schedulers hold the same object."""
    model = mlp()
    optimizer = MADE[kind](model)
    step(model, optimizer)
    alone = copy.deepcopy(model)
    theirs = MADE[kind](alone)
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    pm = parallel(model, mesh, optimizer=optimizer)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (optimizer, theirs)]
    for _ in range(3):
        step(pm, optimizer), step(alone, theirs)
        for schedule in schedules:
            schedule.step()
    state = pm.full_state_dict()
    assert all(near(state[name], tensor) for name, tensor in alone.state_dict().items())
    assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in theirs.param_groups]
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {id(p) for p in pm.parameters()}
    assert len(optimizer.state) == len(list(pm.parameters()))


def test_an_optimizer_of_the_models_own_parameters_is_an_error() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pm = parallel(model)
    with pytest.raises(sx.Error, match=r"parameters of the model(.|\n)*optimizer=optimizer"):
        step(pm, optimizer)
    alone = copy.deepcopy(model)
    theirs = torch.optim.SGD(alone.parameters(), lr=0.1)
    step(model, optimizer), step(alone, theirs)  # trained on its own, it may
    assert all(near(mine, p) for mine, p in zip(model.parameters(), alone.parameters(), strict=True))


def test_weights_that_did_not_train_are_not_read() -> None:
    """Until they are brought up to date."""
    model = mlp()
    pm = parallel(model)
    optimizer = torch.optim.SGD(pm.parameters(), lr=0.1)
    reads: list[Callable[[], Any]] = [model.state_dict, torch.no_grad()(lambda: model(X)), lambda: model.eval()(X)]
    for _ in range(2):
        for read in reads:
            read()
        model.train()
        step(pm, optimizer)
        for read in reads:
            with pytest.raises(sx.Error, match="the model that it was made of was not"):
                read()
        model.load_state_dict(pm.full_state_dict())
    assert near(model(X), pm(X))
    step(pm, optimizer)
    parallel(model.train())
    assert F.cross_entropy(model(X), Y).requires_grad  # a training of its own begins
    for other in (copy.deepcopy(model), torch.load(io.BytesIO(saved(model)), weights_only=False)):
        assert other.eval()(X).shape == (8, 4) and other.state_dict()


def saved(model: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


@pytest.mark.long
def test_what_cannot_be_carried_over() -> None:
    model = mlp()
    for given, what in ((3, "no optimizer"), (model, "no optimizer")):
        with pytest.raises(sx.Error, match=what):
            parallel(model, optimizer=given)
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(8, 16, dtype=F64), nn.ReLU(), nn.Linear(16, 4, dtype=F64))
    with pytest.raises(sx.Error, match="without weights"):
        parallel(empty, optimizer=torch.optim.SGD(empty.parameters()))


# ---- what is done to the model's own weights ------------------------------------------------------------------


def halved(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor * 0.5 if tensor.is_floating_point() else tensor for name, tensor in model.state_dict().items()}


@torch.no_grad()
def average(model: nn.Module) -> None:
    for p in model.parameters():
        p.lerp_(torch.ones_like(p), 0.1)


WRITES: dict[str, Callable[[Any], Any]] = {
    "load_state_dict": lambda model: model.load_state_dict(halved(model)),
    "assign": lambda model: model.load_state_dict(halved(model), assign=True),
    "in place": average,
    "p.data": lambda model: [setattr(p, "data", p.data * 0.5) for p in model.parameters()],
    "another parameter": lambda model: setattr(model[0], "weight", nn.Parameter(model[0].weight * 0.5)),
    "a buffer": lambda model: model[1].running_mean.fill_(1.0),
}


def with_statistics() -> nn.Sequential:
    model = mlp()
    model[1] = nn.BatchNorm1d(16, dtype=F64)
    return model


@pytest.mark.long
def test_weights_of_the_model_that_are_changed_are_an_error_until_they_are_loaded() -> None:
    pm = parallel(model := with_statistics(), "tp")
    for what, write in WRITES.items():
        write(model)
        with pytest.raises(sx.Error, match="weights were changed after parallelize"):
            pm(X, Y)
        pm.load_full_state_dict(model.state_dict())
        assert near(pm(X, Y), F.cross_entropy(copy.deepcopy(model)(X), Y)), what
        model.load_state_dict(pm.full_state_dict())  # with the statistics of that call
        assert bool(pm.eval()(X).isfinite().all()) and pm.train()


def test_a_model_that_goes_its_own_way_or_has_the_weights_of_the_parallel_one() -> None:
    pm, alone = parallel(model := mlp()), copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (pm, alone))
    for _ in range(2):
        step(pm, ours), step(alone, theirs)
        model.load_state_dict(pm.full_state_dict())  # to be evaluated
        assert near(pm(X, Y), F.cross_entropy(alone(X), Y))
    step(pm, ours)
    WRITES["load_state_dict"](model)
    with pytest.warns(sx.ShardfxWarning, match="given weights that are not those of the parallel module"):
        pm(X, Y)
    pm = parallel(model)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1))  # a training of its own
    assert near(pm(X, Y), pm(X, Y))


@pytest.mark.long
def test_parameters_of_the_model_that_are_frozen_later() -> None:
    pm = parallel(model := mlp())
    model[0].requires_grad_(False)
    pm(X, Y).backward()
    assert set(pm.full_grads()) == {"2.weight", "2.bias"}
    model.requires_grad_(False)  # a teacher
    pm(X, Y).backward()
    model.requires_grad_(True)
    pm(X, Y).backward()
    assert set(pm.full_grads()) == {*dict(model.named_parameters())}


# ---- memory: nothing keeps the original's weights, which would be there twice


class Counts(nn.Module):
    """Writes into buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bn = nn.Linear(8, 4), nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return F.dropout(self.bn(self.fc(x)), 0.5, self.training)


class Recomputes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(checkpoint(lambda h: self.fc(h).relu(), x, use_reentrant=False))


class Branches(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out * 2 if out.sum() > -1e6 else out


LAYER = partial(nn.Linear, 8, 4)
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "buffers": (Counts, {}),
    "checkpoint": (Recomputes, {}),
    "sharding": (LAYER, {"specs": {"weight": "dp, -", "bias": "dp"}}),
    "guard": (lambda: Branches(8, 4), {"guard": True}),
    "optimizer": (LAYER, {"optimizer": torch.optim.AdamW}),
}


def places(tensors: Any) -> set[int]:
    """Where the content of tensors lies."""
    return {each.untyped_storage().data_ptr() for each in tensors if type(each) in (Tensor, nn.Parameter)} - {0}


@pytest.mark.long
@pytest.mark.parametrize(("name", "fails"), [*((name, False) for name in MODELS), ("buffers", True)])
def test_nothing_holds_the_weights_that_were_given(name: str, fails: bool) -> None:
    make, more = MODELS[name]
    model, x, y = make(), torch.rand(8, 8), torch.rand(8, 4)
    own = places((*model.parameters(), *model.buffers()))
    hints = sx.Hints((x[:, :5] if fails else x,), loss=F.mse_loss, targets=(y,), **more)
    pm: Any = None
    try:
        pm = sx.parallelize(model, sx.Mesh(dp=2), hints)
        assert not fails
        if "optimizer" in more:
            pm.step(x, y)
        else:
            pm(x, y).backward()
            pm.eval()(x[:4], y[:4])
    except sx.Error:
        assert fails
    del model
    gc.collect()
    there = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter) and each.device.type == "cpu"]
    assert own and not own & places(each for each in there if each.layout is torch.strided)
