"""``Hints(compute=...)``: masters in one dtype, the model in another, as one device computes it written by hand."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

import shardfx as sx
from tests.plans import MESHES, plan
from tests.reference import rel_err
from tests.zoo import Case, make

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
CLOSE = 1e-5
"""Sums in another order, in float32."""
STEPS = 2


def cast(tree: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)


def as_hinted(model: nn.Module, case: Case, dtype: torch.dtype = F32) -> Tensor:
    """The loss of one device that computes in ``dtype``; batch norms in the masters' dtype."""
    kept = {
        f"{path}.{name}" for path, m in model.named_modules() if isinstance(m, _BatchNorm) for name in m._parameters
    }
    weights = {n: p if n in kept else cast(p, dtype) for n, p in model.named_parameters()}
    args, kwargs = cast((case.args, dict(case.kwargs)), dtype)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.forward = lambda x, bn=module: type(bn).forward(bn, x.to(F64)).to(dtype)  # type: ignore[method-assign]
    return case.loss(torch.func.functional_call(model, weights, args, kwargs, tie_weights=True), *case.targets)


def made(name: str) -> Case:
    """A case in float64, whose tables are in the dtype that it computes in, as those of a model in float32 would be."""
    case = make(name)
    for module in case.model.modules():
        if not isinstance(module, _BatchNorm):
            module._buffers.update(cast(dict(module._buffers), F32))
    return case


def alone(case: Case, clip: float | None = None) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, the first gradients, and the state after some steps."""
    model = deepcopy(case.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, grads = [], dict[str, Tensor]()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = as_hinted(model, case)
        loss.backward()
        losses.append(loss.item())
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if step == 0:
            grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return losses, grads, model.state_dict()


def beside(name: str, mesh: sx.Mesh, proven: bool = True, **hints: Any) -> sx.ParallelModule:
    """Train a case in float64 masters, computed in float32, beside one device."""
    case = made(name)
    losses, grads, state = alone(case, hints.get("clip"))
    pm = plan(made(name), mesh, compute=F32, **hints)
    in_program = "optimizer" in hints
    optimizer = None if in_program else torch.optim.SGD(pm.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        if optimizer is None:
            loss = pm.step(*case.args, *case.targets, **case.kwargs)
        else:
            optimizer.zero_grad()
            loss = pm(*case.args, *case.targets, **case.kwargs)
            loss.backward()
            if step == 0:
                mine = pm.full_grads()
                assert set(mine) == set(grads) and all(g.dtype == F64 for g in mine.values())
                assert max(rel_err(mine[n], g) for n, g in grads.items()) < CLOSE
            optimizer.step()
        assert rel_err(loss.item(), losses[step]) < CLOSE
    mine = pm.full_state_dict()
    assert all(mine[n].dtype == t.dtype and rel_err(mine[n], t) < CLOSE for n, t in state.items() if n in mine)
    if proven:
        assert pm.verify(), pm.verify().why
    return pm


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("name", ["mlp3", "gpt_fused", "llama", "resnet"])
@pytest.mark.parametrize("mesh", ["dp2", "tp2", "dp2tp2"])
def test_equals_one_device(name: str, mesh: str) -> None:
    beside(name, MESHES[mesh])


@pytest.mark.parametrize("name", ["mlp3", "gpt_fused", "llama", "resnet"])
@pytest.mark.parametrize(
    "hints",
    [{"zero": 1}, {"zero": 3}, {"zero": 2, "optimizer": sgd, "clip": 0.5}, {"zero": 3, "optimizer": sgd}],
    ids=["zero1", "zero3", "zero2-step-clip", "zero3-step"],
)
def test_stored_in_pieces(name: str, hints: dict[str, Any]) -> None:
    beside(name, MESHES["dp2"], zero_min=0, **hints)


@pytest.mark.parametrize("name", ["gpt_fused", "llama"])
def test_recomputed(name: str) -> None:
    beside(name, MESHES["dp2tp2"], recompute="layers.*", zero=3, zero_min=0)
