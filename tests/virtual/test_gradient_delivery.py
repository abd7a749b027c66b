"""Gradients that a loss of ``pm(...)`` hands out: multiplied by nothing, or by one call for all of them."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from tests.plans import MESHES
from tests.virtual.test_update_kernels import dispatched

X, Y = torch.rand(12, 6), torch.rand(12, 4)


@pytest.fixture(scope="module")
def trained() -> tuple[sx.ParallelModule, list[Tensor]]:
    """A plan on two ranks, and the gradients of one batch on one device."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    F.mse_loss(model(X), Y).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    hints = sx.Hints(args=(X,), targets=(Y,), loss=F.mse_loss, specs={"args.0": "dp, -"})
    return sx.parallelize(model, MESHES["dp2"], hints), grads


def delivered(pm: sx.ParallelModule, backward: Callable[[Tensor], Any]) -> list[Tensor]:
    """The gradients of a loss whose backward is started so."""
    pm.zero_grad()
    backward(pm(X, Y))
    return [p.grad for p in pm.parameters() if p.grad is not None]


def hooked(hook: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Any]:
    """A backward behind a hook on the loss."""

    def backward(loss: Tensor) -> None:
        loss.register_hook(hook)
        loss.backward()

    return backward


WAYS: dict[str, tuple[float, Callable[[Tensor], Any]]] = {
    "its own": (1.0, lambda loss: loss.backward()),
    "a quotient": (0.25, lambda loss: (loss / 4).backward()),
    "a sum": (2.0, lambda loss: (loss + loss).backward()),
    "a given gradient": (3.0, lambda loss: loss.backward(torch.tensor(3.0))),
    "by name": (3.0, lambda loss: loss.backward(gradient=torch.tensor(3.0))),
    "torch.autograd.backward": (1.0, torch.autograd.backward),
    "scaled": (8.0, lambda loss: torch.amp.GradScaler("cpu", init_scale=8.0).scale(loss).backward()),
    "a hook that scales": (2.0, hooked(lambda grad: grad * 2)),
    "a hook that writes": (2.0, hooked(lambda grad: grad.mul_(2))),
    "its own, after one that wrote": (1.0, lambda loss: loss.backward()),
    "retained": (1.0, lambda loss: loss.backward(retain_graph=True)),
    "twice": (2.0, lambda loss: (loss.backward(retain_graph=True), loss.backward())),
}


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_the_loss_times_its_own(way: str, trained: Any) -> None:
    (pm, grads), (scale, backward) = trained, WAYS[way]
    for mine, theirs in zip(delivered(pm, backward), grads, strict=True):
        torch.testing.assert_close(mine, scale * theirs)


def test_a_loss_of_its_own_dispatches_nothing_and_others_one_product(trained: Any) -> None:
    pm, _ = trained
    pm(X, Y).backward()
    loss = pm(X, Y)
    pm.zero_grad()
    assert not dispatched(loss.backward)
    loss = pm(X, Y) / 4
    pm.zero_grad()
    assert dispatched(loss.backward) == {
        "aten.ones_like.default": 1,
        "aten.div.Tensor": 1,
        "aten._foreach_mul_.Tensor": 1,
    }


def test_asked_of_autograd(trained: Any) -> None:
    """What was given out is the caller's own, and what is retained stays as it is."""
    pm, grads = trained
    loss = pm(X, Y)
    first = torch.autograd.grad(loss, list(pm.parameters()), retain_graph=True)
    for grad in first:
        grad.zero_()
    second = torch.autograd.grad(loss, list(pm.parameters()))
    for mine, theirs in zip(second, grads, strict=True):
        torch.testing.assert_close(mine, theirs)
    with pytest.raises(sx.Error, match="handed out already"):
        loss.backward()


def test_gradients_are_the_memory_that_programs_wrote(trained: Any) -> None:
    """And added to those that are there; hooks on parameters see them."""
    pm, grads = trained
    seen = []
    pm.zero_grad()
    hook = next(iter(pm.parameters())).register_hook(lambda grad: seen.append(grad.clone()))
    pm(X, Y).backward()
    pm(X, Y).backward()
    hook.remove()
    torch.testing.assert_close(next(iter(pm.parameters())).grad, 2 * grads[0])
    assert len(seen) == 2
    torch.testing.assert_close(seen[1], grads[0])


def test_a_retained_gradient_of_the_loss_is_nobody_elses(trained: Any) -> None:
    pm, grads = trained
    loss = pm(X, Y)
    loss.retain_grad()
    pm.zero_grad()
    loss.backward()
    assert loss.grad == 1
    loss.grad.zero_()
    for mine, theirs in zip(delivered(pm, lambda loss: loss.backward()), grads, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_loss_is_a_tensor_like_others(trained: Any) -> None:
    """Plain where it is computed with, shown and pickled; let go with its gradients when nobody holds it."""
    pm, _ = trained
    loss = pm(X, Y)
    assert isinstance(loss, Tensor)
    assert not loss.is_leaf
    assert type(loss * 1) is type(loss.detach()) is Tensor
    assert f"{loss:.3f}" == f"{loss.item():.3f}"
    assert repr(loss).startswith("tensor(")
    assert type(pickle.loads(pickle.dumps(loss))) is Tensor
    file = io.BytesIO()
    torch.save({"loss": loss}, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["loss"], loss)
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(loss)
    gradient = weakref.ref(next(g for g in loss.grad_fn.grads if g is not None))  # type: ignore[union-attr]
    gc.collect()
    gc.disable()
    try:
        del loss
        assert gradient() is None
    finally:
        gc.enable()


def test_a_hook_that_writes_unnoticed_counts_and_is_nobody_elses(trained: Any) -> None:
    """``.data`` and collectives write without a new version."""
    pm, grads = trained
    twice = delivered(pm, hooked(lambda grad: grad.data.mul_(2) and None))
    for mine, theirs in zip(twice, grads, strict=True):
        torch.testing.assert_close(mine, 2 * theirs)
    for mine, theirs in zip(delivered(pm, lambda loss: loss.backward(retain_graph=True)), grads, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # torch.compile's own
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_functions_take_a_loss(backend: str, trained: Any) -> None:
    pm, grads = trained

    def backward(loss: Tensor) -> None:
        (loss / 2).backward()

    def whole(x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = pm(x, y)
        loss.backward()
        return loss

    compiled: dict[float, Callable[[Tensor], Any]] = {
        3.0: lambda loss: torch.compile(lambda q: q * 3 + 1, backend=backend)(loss).backward(),
        0.5: torch.compile(backward, backend=backend),
        1.0: torch.compile(lambda loss: loss.backward(), backend=backend),
    }
    for scale, way in compiled.items():
        for mine, theirs in zip(delivered(pm, way), grads, strict=True):
            torch.testing.assert_close(mine, scale * theirs)
    pm.zero_grad()
    torch.compile(whole, backend=backend)(X, Y)
    for shard, theirs in zip(pm.parameters(), grads, strict=True):
        torch.testing.assert_close(shard.grad, theirs)
