"""State dicts, whole and in shards: copies, loaded where they belong; what is not the model's is an error."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfx as sx
from tests.captures import captured_once

from .test_calls import F64, batch, mlp, parallel

TP = {"args.0": "dp, -", "targets.0": "dp", "0.weight": "tp, -"}
X, _ = batch()


class Tied(nn.Module):
    """Two names of one weight, a buffer, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.unused = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) * self.scale


@pytest.mark.parametrize("mesh", [sx.Mesh(dp=2), sx.Mesh(tp=2)])
def test_a_full_state_dict_is_a_copy(mesh: sx.Mesh) -> None:
    specs = {"args.0": "dp, -"} if "dp" in str(mesh) else {"first.bias": "tp"}
    pm = parallel(Tied().double(), mesh, specs=specs, targets=(X,), loss=nn.functional.mse_loss)
    pm(X, X).backward()
    state, grads = pm.full_state_dict(), pm.full_grads()
    assert state["first.weight"] is state["second.weight"]
    kept = {name: tensor.clone() for name, tensor in (*state.items(), *grads.items())}
    with torch.no_grad():
        for tensor in (*pm.parameters(), *pm.buffers(), *(p.grad for p in pm.parameters() if p.grad is not None)):
            tensor.add_(1)
    assert all(torch.equal(tensor, {**state, **grads}[name]) for name, tensor in kept.items())
    for tensor in state.values():
        tensor.fill_(7)
    assert not any((tensor == 7).any() for tensor in pm.full_state_dict().values())


def saved(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.long
def test_shards_are_loaded_where_they_belong() -> None:
    pm = parallel(mlp(), sx.Mesh(dp=2, tp=2), specs=TP)
    other = parallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).double(), pm.mesh, specs=TP)
    other.load_state_dict(saved(pm.state_dict()))
    assert torch.equal(other(X), pm(X))
    assert all(tensor.dtype is F64 for tensor in pm.full_state_dict().values())


def test_what_is_computed_from_shards_is_loaded() -> None:
    pm = parallel(mlp(), sx.Mesh(tp=2), specs={"0.weight": "tp, -"})
    whole = pm.full_state_dict()
    pm.load_state_dict({name: 2 * shard for name, shard in pm.state_dict().items()})
    assert all(torch.equal(tensor, 2 * whole[name]) for name, tensor in pm.full_state_dict().items())


State = dict[str, Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(12, 8), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.bias = nn.Parameter(torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(x))) + self.bias


@captured_once("test_state_dicts")
def make() -> sx.ParallelModule:
    torch.manual_seed(0)
    model = Net().eval()
    hints = sx.Hints((torch.arange(8) % 12,), specs={"args.0": "dp", "embed.weight": "tp, -"})
    return sx.parallelize(model, sx.Mesh(dp=2, tp=2), hints)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"bias": None}, ["not that of the model", "missing: bias", "strict=False"]),
        ({"head.bias": torch.zeros(12)}, ["unexpected: head.bias"]),
        ({"embed.weight": torch.zeros(6, 8), "head.weight": None}, ["'embed.weight' has the wrong shape", "(6, 8)"]),
        ({"norm.running_mean": torch.zeros(8).half()}, ["has the wrong dtype", "torch.float16", "convert"]),
        ({"bias": torch.zeros(12).long()}, ["'bias' has the wrong dtype", "torch.int64"]),
        ({"bias": [0.0] * 12}, ["'bias' has the wrong shape", "list"]),
    ],
)
def test_a_wrong_state_dict_is_refused_and_loads_nothing(wrong: dict[str, Any], words: list[str]) -> None:
    pm = make()
    before = pm.full_state_dict()
    state = {name: tensor + 1 for name, tensor in before.items()} | wrong
    with pytest.raises(sx.Error) as caught:
        pm.load_full_state_dict({name: each for name, each in state.items() if each is not None})
    assert all(word in str(caught.value) for word in [*words, "load_full_state_dict"]), caught.value
    assert all(torch.equal(tensor, before[name]) for name, tensor in pm.full_state_dict().items())


def test_strict_false_takes_what_there_is() -> None:
    pm = make()
    before = pm.full_state_dict()
    pm.load_full_state_dict({"bias": before["bias"] + 1, "unknown": torch.zeros(3)}, strict=False)
    after = pm.full_state_dict()
    assert torch.equal(after["bias"], before["bias"] + 1)
    assert torch.equal(after["embed.weight"], before["embed.weight"])
