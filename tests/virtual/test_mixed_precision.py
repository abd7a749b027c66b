"""``Hints(mixed_precision=...)``: master weights in one dtype, the model in another, as one device computes it written
by
hand."""

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
    """The loss of one device that computes in ``dtype``; batch norms in the master weights' dtype."""
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


def alone(case: Case, clip_grad_norm: float | None = None) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, the first gradients, and the state after some steps."""
    model = deepcopy(case.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, grads = [], dict[str, Tensor]()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = as_hinted(model, case)
        loss.backward()
        losses.append(loss.item())
        if clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
        if step == 0:
            grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return losses, grads, model.state_dict()


def beside(name: str, mesh: sx.Mesh, proven: bool = True, **hints: Any) -> sx.ParallelModule:
    """Train a case in float64 master weights, computed in float32, against one device."""
    case = made(name)
    losses, grads, state = alone(case, hints.get("clip_grad_norm"))
    pm = plan(made(name), mesh, mixed_precision=F32, **hints)
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


MODELS = ("mlp3", "gpt_fused", "llama", "resnet")
SHARDS: dict[str, dict[str, Any]] = {
    "zero1": {"zero": 1},
    "zero3": {"zero": 3},
    "zero2-step-clip": {"zero": 2, "optimizer": sgd, "clip_grad_norm": 0.5},
    "zero3-step": {"zero": 3, "optimizer": sgd},
}
QUICK = {("mlp3", "dp2tp2"), ("mlp3", "zero2-step-clip"), ("mlp3", "zero1")}


def quick_first(others: Any) -> list[Any]:
    """All models with each of them, of which few are quick."""
    pairs = [(name, other) for name in MODELS for other in others]
    return [pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow) for pair in pairs]


@pytest.mark.long
@pytest.mark.parametrize(("name", "mesh"), quick_first(("dp2", "tp2", "dp2tp2")))
def test_equals_one_device(name: str, mesh: str) -> None:
    beside(name, MESHES[mesh])


@pytest.mark.long
@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "shards"), quick_first(SHARDS))
def test_stored_in_shards(name: str, shards: str) -> None:
    beside(name, MESHES["dp2"], zero_min_numel=0, **SHARDS[shards])


# ---- what is exact -----------------------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding that is the head too, and a scale that the loss's gradient comes to in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.tok.weight
        self.scale = nn.Parameter(torch.full((8,), 2.0))

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.tok(tokens) * self.scale)
        return out


def whole_numbers(model: nn.Module) -> nn.Module:
    """Small whole numbers for weights: what is computed with them is exact, in bfloat16 too."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape))
    return model


def exact_plan(mesh: sx.Mesh, **hints: Any) -> tuple[nn.Module, sx.ParallelModule, Tensor, Tensor]:
    model = whole_numbers(Tied())
    x, y = torch.randint(0, 12, (8,)), torch.randint(-1, 2, (8, 12)).float()
    specs = {"args.0": "dp"} | ({"tok.weight": "tp, -"} if "tp" in mesh.names else {})
    given: Any = {"args": (x,), "targets": (y,), "loss": inner, "specs": specs, "zero_min_numel": 0}
    return model, sx.parallelize(model, mesh, sx.Hints(**given, **hints), virtual=True), x, y


def inner(out: Tensor, y: Tensor) -> Tensor:
    return (out.float() * y).sum()


@pytest.mark.long
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "mixed_precision",
    [BF16, sx.MixedPrecision(BF16, reduce_dtype=BF16), sx.MixedPrecision(torch.float16, loss_scale=64.0)],
)
@pytest.mark.parametrize("mesh", ["dp2", "dp2tp2"])
def test_whole_numbers_are_exact(mixed_precision: Any, mesh: str) -> None:
    model, pm, x, y = exact_plan(MESHES[mesh], mixed_precision=mixed_precision, zero=3)
    dtype = sx.MixedPrecision.of(mixed_precision).dtype  # type: ignore[union-attr]
    weights = {name: parameter.to(dtype) for name, parameter in model.named_parameters()}
    expected = inner(torch.func.functional_call(model, weights, (x,), tie_weights=True), y)
    expected.backward()
    loss = pm(x, y)
    loss.backward()
    assert torch.equal(loss, expected)
    grads = pm.full_grads()
    assert all(torch.equal(grads[name], p.grad) for name, p in model.named_parameters() if p.grad is not None)
    assert {p.dtype for p in pm.parameters()} == {g.dtype for g in grads.values()} == {F32}
    assert pm.verify()
