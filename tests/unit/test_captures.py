"""Tests share a capture only of what is captured alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
import shardfx.compile
from shardfx.ir.capture.trace import Captured
from tests.captures import captured_once


class Net(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor] = torch.relu, by: float = 2.0, rows: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, rows), nn.Linear(rows, 3)
        self.between, self.by = between, by

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)) * self.by)


def frozen() -> Net:
    net = Net()
    net.first.bias.requires_grad_(False)
    return net


def hooked() -> Net:
    net = Net()
    net.first.register_forward_hook(lambda *_: None)
    return net


def plan(model: nn.Module, rows: int = 8, loss: Any = F.mse_loss, **mesh: int) -> sx.ParallelModule:
    hints = sx.Hints((torch.rand(rows, 6),), loss=loss, targets=(torch.rand(rows, 3),), specs={})
    with captured_once("test_captures"):
        return sx.parallelize(model, sx.Mesh(**mesh or {"dp": 2}), hints)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Captured]:
    """What was captured since the first, plain, plan."""
    plan(Net())
    made: list[Captured] = []
    capture = shardfx.compile.capture_model

    def noted(*given: Any) -> Captured:
        made.append(capture(*given))
        return made[-1]

    monkeypatch.setattr(shardfx.compile, "capture_model", noted)
    return made


def test_equal_captures_are_made_once(captures: list[Captured]) -> None:
    first, second = plan(Net()), plan(Net(), tp=4)
    assert not captures
    assert first.mesh == sx.Mesh(dp=2) and second.captured.mesh == sx.Mesh(tp=4)
    assert first.captured is not second.captured


@pytest.mark.long
@pytest.mark.parametrize(
    "other",
    [
        lambda: plan(Net(torch.tanh)),
        lambda: plan(Net(by=3.0)),
        lambda: plan(Net(rows=5)),
        lambda: plan(Net().eval()),
        lambda: plan(frozen()),
        lambda: plan(Net(), rows=6),
        lambda: plan(Net(), loss=F.l1_loss),
    ],
    ids=["function", "number", "shapes", "mode", "frozen", "batch", "loss"],
)
def test_different_captures_are_made(other: Callable[[], object], captures: list[Captured]) -> None:
    other()
    assert len(captures) == 1


def test_refused_capture_is_refused_again() -> None:
    plan(Net())
    with pytest.raises(sx.Error, match="would never be called"):
        plan(hooked())
