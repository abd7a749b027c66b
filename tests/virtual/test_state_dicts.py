"""State dicts, whole and in shards: copies, loaded where they belong; what is not the model's is an error."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfx as sx
from tests.captures import captured_once

from .test_calls import F64, batch, mlp, parallel

TP = {"args.0": "dp, -", "targets.0": "dp", "0.weight": "tp, -"}
X, Y = batch()


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
    otherwise = parallel(mlp(), pm.mesh, specs=TP | {"0.weight": "-, tp", "2.weight": "tp, -"})
    with pytest.raises(sx.Error, match=r"0.weight.* stored otherwise(.|\n)*full_state_dict"):
        otherwise.load_state_dict(saved(pm.state_dict()))
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
def make(device: str = "cpu") -> sx.ParallelModule:
    torch.manual_seed(0)
    with torch.device(device):
        model = Net().eval()
    hints = sx.Hints((torch.arange(8) % 12,), specs={"args.0": "dp", "embed.weight": "tp, -"})
    return sx.parallelize(model, sx.Mesh(dp=2, tp=2), hints)


def lacks(state: State) -> None:
    del state["bias"]


def lacks_tied(state: State) -> None:
    del state["embed.weight"], state["head.weight"]


def has_more(state: State) -> None:
    state["head.bias"] = torch.zeros(12)


def is_a_shard(state: State) -> None:
    state["embed.weight"] = state["embed.weight"][:6]
    del state["head.weight"]


def is_half(state: State) -> None:
    state["norm.running_mean"] = state["norm.running_mean"].half()


def is_whole_numbers(state: State) -> None:
    state["bias"] = state["bias"].long()


def is_no_tensor(state: State) -> None:
    state["bias"] = [0.0] * 12  # type: ignore[assignment]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lacks, ["not that of the model", "missing: bias", "strict=False"]),
        (lacks_tied, ["missing: embed.weight"]),
        (has_more, ["unexpected: head.bias"]),
        (is_a_shard, ["'embed.weight' has the wrong shape", "(12, 8)", "(6, 8)", "full tensors"]),
        (is_half, ["'norm.running_mean' has the wrong dtype", "torch.float32", "torch.float16", "convert"]),
        (is_whole_numbers, ["'bias' has the wrong dtype", "torch.int64"]),
        (is_no_tensor, ["'bias' has the wrong shape", "list"]),
    ],
)
def test_a_state_dict_with_something_wrong(spoil: Callable[[State], None], words: list[str], device: str) -> None:
    state = make().full_state_dict()
    pm = make(device)
    before = pm.full_state_dict() if device == "cpu" else {}
    spoil(state)
    with pytest.raises(sx.Error) as caught:
        pm.load_full_state_dict({name: t + 1 if isinstance(t, Tensor) else t for name, t in state.items()})
    text = str(caught.value)
    assert all(word in text for word in [*words, "load_full_state_dict"]), text
    assert all(torch.equal(tensor, before[name]) for name, tensor in (pm.full_state_dict() if before else {}).items())


def test_strict_false_takes_what_there_is() -> None:
    pm = make()
    before = pm.full_state_dict()
    pm.load_full_state_dict({"bias": before["bias"] + 1, "unknown": torch.zeros(3)}, strict=False)
    after = pm.full_state_dict()
    assert torch.equal(after["bias"], before["bias"] + 1)
    assert torch.equal(after["embed.weight"], before["embed.weight"])
