"""The parallel module as scripts see it: names, attributes, classes, methods and containers are the model's own."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn

import shardfx as sx

from .test_calls import batch, near, parallel

X, Y = batch()


class Net(nn.Module):
    """With what scripts look at."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(width=16, name="net")
        self.first, self.norm, self.drop = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.0)
        self.last = nn.Linear(16, 4)

    @property
    def width(self) -> int:
        return int(self.config.width)

    def no_weight_decay(self) -> set[str]:
        return {"first.bias"}

    def configure_optimizers(self, lr: float) -> torch.optim.Optimizer:
        """As nanoGPT does it."""
        named = {name: p for name, p in self.named_parameters() if p.requires_grad}
        decayed = [p for p in named.values() if p.dim() >= 2]
        others = [p for p in named.values() if p.dim() < 2]
        return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=lr)

    def train(self, mode: bool = True) -> Net:
        """With frozen statistics, as detection models do it."""
        super().train(mode)
        self.norm.eval()
        return self

    def generate(self) -> str:
        return "words"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(F.relu(self.norm(self.first(x)))))


@pytest.fixture
def both() -> tuple[sx.ParallelModule, Net]:
    torch.manual_seed(0)
    model, specs = Net().double(), {"args.0": "dp, -", "targets.0": "dp", "first.weight": "tp, -"}
    return parallel(model, sx.Mesh(dp=2, tp=2), specs=specs), copy.deepcopy(model)


def test_attributes_and_methods_are_the_models(both: tuple[sx.ParallelModule, Net]) -> None:
    pm, model = both
    assert pm.config == model.config and pm.width == 16 and pm.no_weight_decay() == {"first.bias"}
    assert [len(group["params"]) for group in pm.configure_optimizers(0.01).param_groups] == [2, 4]
    assert pm.module is pm and pm.first.in_features == 8 and pm.drop.p == 0.0 and pm.norm.eps == model.norm.eps
    assert not hasattr(pm, "missing") and not hasattr(pm.first, "missing")
    with pytest.raises(AttributeError, match="neither a parallel module nor 'Net'"):
        _ = pm.missing
    with pytest.raises(sx.Error, match=r"full weights(.|\n)*pm.gathered"):
        pm.generate()
    with pytest.raises(sx.Error, match="parallelize it again"):
        pm.first = nn.Linear(8, 16)


@pytest.mark.long
def test_gathered_model_has_full_weights(both: tuple[sx.ParallelModule, Net]) -> None:
    """For ``generate``, ``save_pretrained`` and the like."""
    pm, model = both
    for each, loss in ((pm, lambda: pm(X, Y)), (model, lambda: F.cross_entropy(model(X), Y))):
        loss().backward()
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    pm.eval()
    with pm.gathered() as whole:
        assert type(whole) is Net and whole.generate() == "words" and not whole.training and whole.width == 16
        assert all(near(mine, model.state_dict()[name]) for name, mine in whole.state_dict().items())
        assert near(whole(X), pm(X))
    with pytest.raises(sx.Error, match=r"weights were changed within"), pm.gathered() as whole, torch.no_grad():
        whole.last.weight.zero_()


def test_no_sync_accumulates_as_ddp(both: tuple[sx.ParallelModule, Net]) -> None:
    pm, model = both
    with pm.no_sync():
        (pm(X, Y) / 2).backward()
    (pm(X.sin(), Y) / 2).backward()
    ((F.cross_entropy(model(X), Y) + F.cross_entropy(model(X.sin()), Y)) / 2).backward()
    grads = pm.full_grads()
    assert all(p.grad is not None and near(grads[name], p.grad) for name, p in model.named_parameters())


def test_names_and_types_of_modules_are_the_models(both: tuple[sx.ParallelModule, Net]) -> None:
    pm, model = both
    ours = {name.rpartition(".")[2] for name, _ in pm.named_parameters()}
    assert ours == {"weight", "bias"}
    owner = {name: ".".join(part for part in name.split(".") if part[0] != "@") for name, _ in pm.named_parameters()}
    assert set(owner.values()) == {name for name, _ in model.named_parameters()}
    assert len(owner) == len(list(pm.parameters()))

    kinds = (nn.Linear, nn.BatchNorm1d, nn.Dropout, nn.Linear)
    assert all(isinstance(module, kind) for module, kind in zip(pm.children(), kinds, strict=True))
    made = copy.deepcopy(pm)
    assert isinstance(made.norm, nn.BatchNorm1d) and near(made(X), pm(X))


@pytest.mark.long
def test_modes_are_set_as_the_model_sets_them(both: tuple[sx.ParallelModule, Net]) -> None:
    pm, model = both
    for mode in (True, False, True):
        pm.train(mode), model.train(mode)
        modes = {path: module.training for path, module in pm.named_modules() if "@" not in path}
        assert modes == {path: module.training for path, module in model.named_modules()}
    pm.first.eval()
    assert not pm.first.training and pm.drop.training
    assert near(pm(X, Y), F.cross_entropy(model(X), Y))


@pytest.mark.long
def test_averaged_model_and_update_bn_match_eager(both: tuple[sx.ParallelModule, Net]) -> None:
    """``AveragedModel`` is right; ``update_bn`` is for the model with full weights, and its statistics are loaded."""
    pm, model = both
    averages = [AveragedModel(each, use_buffers=True) for each in (pm, model)]
    for each, average in zip((pm, model), averages, strict=True):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(2):
            loss: Any = pm(X, Y) if each is pm else F.cross_entropy(model(X), Y)
            loss.backward()
            optimizer.step()
            average.update_parameters(each)
    with torch.no_grad():
        assert near(averages[0](X), averages[1](X)) and not near(averages[0](X), pm(X))
    with averages[0].module.gathered() as whole:
        update_bn([X, X.sin()], whole)
    averages[0].module.load_full_state_dict(whole.state_dict())
    update_bn([X, X.sin()], averages[1])
    state = averages[0].module.full_state_dict()
    assert all(near(state[name], each) for name, each in averages[1].module.state_dict().items())


# ---- containers ---------------------------------------------------------------------------------------------


class Nested(nn.Module):
    """Has lists and dicts of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"a": nn.Linear(8, 4), "b": nn.Linear(8, 4)})
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.heads["a"](x) - self.heads["b"](x)


def test_lists_and_dicts_of_modules_are_the_models() -> None:
    pm = parallel(Nested().double())
    assert pm.heads["a"] is pm.heads.a and "b" in pm.heads and [*pm.heads] == ["a", "b"]
    assert [name for name, _ in pm.heads.items()] == ["a", "b"] and len(pm.heads) == 2
    assert pm.layers[-1] is [*pm.layers][2] and [*pm.layers[1:]] == [*pm.layers][1:]
    rows = parallel(nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.5)).double())
    rows[1].eval()
    assert len(rows) == 2 and [*rows][1] is rows[1] and rows.training and not rows[1].training
    assert pm and pm.heads.a
    for asked in (lambda: pm[0], lambda: len(pm), lambda: iter(pm), lambda: 0 in pm, lambda: len(pm.heads.a)):
        with pytest.raises(TypeError, match="object"):
            asked()


FACTOR = 2.0


def weighted(closure: list[float]) -> Any:
    def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return scaled(F.cross_entropy(out, target)) * closure[0]

    return loss


def scaled(value: torch.Tensor) -> torch.Tensor:
    return value * FACTOR


@pytest.mark.long
def test_numbers_that_the_loss_reads_are_those_of_the_call(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of its closure, of a global that a function reads which it calls, and of a module's attribute."""
    model, held, smooth = Net().double(), [1.0], nn.CrossEntropyLoss()
    pm, other = parallel(copy.deepcopy(model), loss=weighted(held)), parallel(copy.deepcopy(model), loss=smooth)
    again = copy.deepcopy(pm)
    held[0] = 3.0
    assert near(pm(X, Y), weighted([3.0])(model(X), Y)) and near(again(X, Y), weighted([3.0])(model(X), Y))
    monkeypatch.setitem(globals(), "FACTOR", 5.0)
    assert near(pm(X, Y), weighted([3.0])(model(X), Y))
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    held[0] = 1.0
    planned = len(caplog.records)
    assert near(pm(X, Y), weighted([1.0])(model(X), Y)) and len(caplog.records) == planned
    smooth.label_smoothing = 0.3
    assert near(other(X, Y), smooth(model(X), Y))
    assert all(each in caplog.text for each in ("L['loss'].__closure__", "FACTOR", "L['loss'].label_smoothing"))
