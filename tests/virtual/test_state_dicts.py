"""State dicts, whole and in shards: copies, and loaded where they belong."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

import shardfx as sx

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


class Square(nn.Module):
    """Weights of one shape: two are sharded alike, and of one each rank has a part of both halves."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.other, self.halves = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.halves(x).chunk(2, -1)
        return self.up(x) * self.other(x) + (a * b).sum(-1, keepdim=True)


def square() -> sx.ParallelModule:
    specs = {f"{name}.weight": "tp, -" for name in ("up", "other", "halves")}
    made = Square().double()
    return parallel(made, sx.Mesh(tp=2), specs=specs, targets=(X,), loss=nn.functional.mse_loss)


@pytest.mark.parametrize("keep", [lambda state: state, saved], ids=["as it is", "saved"])
@pytest.mark.parametrize("put", ["up.@1.weight", "halves.@0.weight"])
def test_a_shard_under_the_name_of_another_is_refused(put: str, keep: Any) -> None:
    """Shards of one shape change places."""
    pm = square()
    state = keep(pm.state_dict())
    state["up.@0.weight"], state[put] = state[put], state["up.@0.weight"]
    with pytest.raises(sx.Error, match=r"weight' of this state dict is (another shard|stored otherwise)"):
        pm.load_state_dict(state)


def test_weights_that_are_sharded_alike_may_change_places() -> None:
    pm = square()
    state, whole = pm.state_dict(), pm.full_state_dict()
    names = {"up": "other", "other": "up", "halves": "halves"}

    def changed(name: str) -> str:
        path, _, rest = name.partition(".")
        return f"{names[path]}.{rest}"

    pm.load_state_dict(saved({name: state[changed(name)] for name in state}))
    assert all(torch.equal(tensor, whole[changed(name)]) for name, tensor in pm.full_state_dict().items())


def test_what_is_computed_from_shards_is_loaded() -> None:
    pm = square()
    whole = pm.full_state_dict()
    pm.load_state_dict({name: 2 * shard for name, shard in pm.state_dict().items()})
    assert all(torch.equal(tensor, 2 * whole[name]) for name, tensor in pm.full_state_dict().items())
