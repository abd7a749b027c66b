"""Once a model is parallel, nothing holds the weights of the one that was given: they would be in memory twice."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardfx as sx


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


LINEAR = partial(nn.Linear, 8, 4)
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "plain": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), LINEAR()), {}),
    "buffers": (Counts, {}),
    "checkpoint": (Recomputes, {}),
    "sharding": (LINEAR, {"specs": {"weight": "dp, -", "bias": "dp"}}),
    "guard": (lambda: Branches(8, 4), {"guard": True}),
    "optimizer": (LINEAR, {"optimizer": torch.optim.AdamW}),
    "mixed_precision": (LINEAR, {"mixed_precision": torch.bfloat16}),
}


def places(tensors: Any) -> set[int]:
    """Where the content of tensors lies."""
    return {each.untyped_storage().data_ptr() for each in tensors if type(each) in (Tensor, nn.Parameter)} - {0}


@pytest.mark.long
@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fails", [False, True])
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
