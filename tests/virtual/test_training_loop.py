"""The loop that everyone already writes, its variations, threads, and gradients that a loss hands out."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Replicate, Shard

import shardfx as sx
from shardfx.ir.dim_sharding import DimSharding
from shardfx.runtime import rendezvous
from tests.plans import MESHES
from tests.reference import check_step, rel_err
from tests.virtual.test_calls import batch, near, parallel


@pytest.mark.parametrize(
    "hint",
    ["-, tp", sx.Spec((DimSharding(), DimSharding(("tp",)))), [Replicate(), Shard(1)]],
    ids=["text", "Spec", "placements"],
)
def test_hints_in_their_three_forms(hint: object) -> None:
    x, y = torch.randn(8, 6), torch.randint(0, 5, (8,))
    model = nn.Linear(6, 5)
    specs = {"args.0": "dp, -", "weight": hint}
    pm = sx.parallelize(
        copy.deepcopy(model), sx.Mesh(dp=2, tp=2), sx.Hints(args=(x,), loss=F.cross_entropy, targets=(y,), specs=specs)
    )
    assert str(pm.planned.input("weight").value.spec) == "[., .{tp}]"
    assert rel_err(pm(x, y), F.cross_entropy(model(x), y)) < 1e-6


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(7, 5, 3), (9, 6, 5)])
def test_sizes_that_do_not_divide(sizes: tuple[int, int, int]) -> None:
    batch, hidden, classes = sizes
    x, y = torch.randn(batch, 6).double(), torch.randint(0, classes, (batch,))
    model = nn.Sequential(nn.Linear(6, hidden), nn.ReLU(), nn.Linear(hidden, classes)).double()
    alone = copy.deepcopy(model)
    specs = {"args.0": "dp, -", "0.weight": "tp, -", "2.weight": "-, tp"}
    pm = sx.parallelize(
        model, sx.Mesh(dp=2, tp=3), sx.Hints(args=(x,), loss=F.cross_entropy, targets=(y,), specs=specs)
    )
    check_step(pm, alone, F.cross_entropy, (x,), (y,))


@pytest.mark.long
def test_threads_take_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that calls while another is in a call waits: no running statistics are lost."""
    x, y = batch()
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)).double()
    pm, alone = parallel(model), copy.deepcopy(model)
    within, done, perform = threading.Event(), threading.Event(), rendezvous.perform

    def wait(*given: Any) -> list[torch.Tensor]:
        if not within.is_set():
            within.set()
            done.wait(0.5)
        return perform(*given)

    def other() -> None:
        within.wait()
        pm(2 * x, y)
        done.set()

    thread = threading.Thread(target=other)
    monkeypatch.setattr(rendezvous, "perform", wait)
    thread.start()
    pm(x, y)
    thread.join()
    alone(x), alone(2 * x)
    ours, theirs = pm.full_state_dict(), alone.state_dict()
    assert all(near(ours[name], tensor) for name, tensor in theirs.items()), (ours, theirs)


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


def test_gradients_are_let_go_with_the_loss(trained: Any) -> None:
    pm, _ = trained
    loss = pm(X, Y)
    assert torch.equal(pickle.loads(pickle.dumps(loss)), loss)
    gradient = weakref.ref(next(g for g in loss.grad_fn.grads if g is not None))  # type: ignore[union-attr]
    gc.collect()
    gc.disable()
    try:
        del loss
        assert gradient() is None
    finally:
        gc.enable()
