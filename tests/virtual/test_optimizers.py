"""Optimizers of a parallel module's parameters, which may be pieces."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import shardfx as sx

from .test_calls import batch, mlp, near, parallel

TP = {"0.weight": "tp, -"}


class Scaled(torch.optim.SGD):
    """Steps by a fraction of each tensor's norm, where a group says so."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * (p.norm() if group.get("by_norm") else 1.0), alpha=group["lr"])


class Wants(Scaled):
    """Cannot be made of its options, and draws random numbers."""

    def __init__(self, params: Any, named: Any = None, lr: float = 0.1) -> None:
        if torch.rand(()) < 2 and named is None:
            raise TypeError("wants names")
        super().__init__(params, lr=lr)


def stepped(pm: sx.ParallelModule) -> sx.ParallelModule:
    pm.zero_grad()
    pm(*batch()).backward()
    return pm


def test_one_that_cannot_be_tried_is_warned_of_once() -> None:
    pm = stepped(parallel(mlp(), sx.Mesh(tp=2), specs=TP))
    before = torch.get_rng_state()
    optimizer = Wants(pm.parameters(), named=True)
    torch.set_rng_state(before)
    with pytest.warns(sx.ShardfxWarning, match=r"Wants could not be tried on pieces \(TypeError: wants names\)"):
        optimizer.step()
    assert torch.equal(torch.get_rng_state(), before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_each_group_is_tried() -> None:
    pm = stepped(parallel(mlp(), sx.Mesh(tp=2), specs=TP))
    first, *rest = pm.parameters()
    Scaled([{"params": [first, *rest]}], lr=0.1).step()
    with pytest.raises(sx.Error, match="Scaled looks at whole tensors"):
        Scaled([{"params": rest}, {"params": [first], "by_norm": True}], lr=0.1).step()


def test_one_that_calls_a_closure_is_tried_with_one() -> None:
    x, y = batch()
    pm, alone = parallel(mlp(), sx.Mesh(tp=2), specs=TP), copy.deepcopy(mlp())

    def train(model: nn.Module, loss: Any) -> None:
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            made: torch.Tensor = loss()
            made.backward()
            return made

        optimizer.step(closure)

    train(pm, lambda: pm(x, y))
    train(alone, lambda: nn.functional.cross_entropy(alone(x), y))
    state = pm.full_state_dict()
    assert all(near(state[name], tensor) for name, tensor in alone.state_dict().items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("options", [{"capturable": True}, {"fused": True}])
def test_they_are_tried_where_the_pieces_are(options: dict[str, Any]) -> None:
    x, y = batch()
    pm = parallel(mlp(), sx.Mesh(tp=2), specs=TP, device="cuda")
    pm(x.cuda(), y.cuda()).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.optim.AdamW(pm.parameters(), lr=1e-3, **options).step()
