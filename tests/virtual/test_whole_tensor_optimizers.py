"""Optimizers that look at full tensors, and gradients that are changed by norms, on virtual ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfx as sx
from tests.whole_tensor import TrustRatio


def squares(out: Tensor) -> Tensor:
    return out.square().sum()


def normalised(parameters: list[nn.Parameter]) -> None:
    grads = [p.grad for p in parameters]
    torch._foreach_div_(grads, torch._foreach_norm(grads))


def clipped_by_hand(parameters: list[nn.Parameter]) -> None:
    """As scripts from before ``clip_grad_norm_`` do."""
    total = sum(p.grad.data.norm(2).item() ** 2 for p in parameters) ** 0.5
    for p in parameters:
        p.grad.data.mul_(0.1 / (total + 1e-6))


def written_behind_versions(parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        p.data.mul_(0.9)


STEPS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], Callable[[list[nn.Parameter]], object]]] = {
    "trust ratio": (TrustRatio, list),
    "Adafactor": (torch.optim.Adafactor, list),
    "clipped": (torch.optim.SGD, lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.1)),
    "normalised": (torch.optim.SGD, normalised),
    "clipped by hand": (torch.optim.SGD, clipped_by_hand),
    "p.data": (torch.optim.SGD, written_behind_versions),
}


@pytest.mark.parametrize("what", STEPS)
def test_steps_of_full_tensors(what: str) -> None:
    make, change = STEPS[what]
    torch.manual_seed(0)
    model, x = nn.Linear(32, 16).double(), torch.randn(4, 32, dtype=torch.float64)
    specs = {"weight": "-, tp", "bias": "tp"}
    pm = sx.parallelize(copy.deepcopy(model), sx.Mesh(tp=2), sx.Hints((x,), loss=squares, specs=specs))
    for module in (model, pm, copy.deepcopy(pm)):
        optimizer = make(module.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            (squares(module(x)) if module is model else module(x)).backward()
            change(list(module.parameters()))
            optimizer.step()
        whole = module.state_dict() if module is model else module.full_state_dict()
        assert all(torch.allclose(whole[name], p, rtol=1e-12, atol=1e-12) for name, p in model.named_parameters())
        if module is not model:
            assert torch.allclose(module(x), squares(model(x)), rtol=1e-12)
