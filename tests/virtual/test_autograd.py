"""Autograd through ``pm(x)``: in a larger computation, of results beside a loss, with gradients that it hands out."""

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

import shardfx as sx
from shardfx.runtime import rendezvous
from tests.plans import MESHES

from .test_calls import F64, batch, mlp, near, parallel

MESH = sx.Mesh(dp=2, tp=2)
SPECS = {"args.0": "dp, -", "targets.0": "dp", "0.weight": "tp, -"}
X, Y = batch()


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)).double()


def two_terms(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    inside = model(x, Y) if isinstance(model, sx.ParallelModule) else F.cross_entropy(model(x), Y)
    return inside * 0.5 + model(x.sin()).square().mean()


def before(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A stem, then an adversarial step by the sign of the input's gradient."""
    (grad,) = torch.autograd.grad(model(x * 2).square().sum(), x)
    return F.cross_entropy(model(x + 0.1 * grad.sign()), Y)


@pytest.mark.long
@pytest.mark.parametrize("loss", [two_terms, before])
def test_gradients_go_through(loss: Callable[..., torch.Tensor]) -> None:
    model = normed()
    pm, alone = parallel(model, MESH, specs=SPECS), copy.deepcopy(model)
    pairs = []
    for each in (pm, alone):
        x = X.clone().requires_grad_()
        made = loss(each, x)
        made.backward()
        pairs.append((made, x.grad))
    (ours, of_x), (theirs, their_x) = pairs
    assert near(ours, theirs) and of_x is not None and their_x is not None and near(of_x, their_x)
    grads = pm.full_grads()
    assert all(p.grad is not None and near(grads[name], p.grad) for name, p in alone.named_parameters())
    state = pm.full_state_dict()
    assert all(near(state[name], tensor) for name, tensor in alone.state_dict().items())


@pytest.mark.long
def test_what_is_random_is_the_same_in_the_backward() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 1, bias=False)).double()
    nn.init.ones_(model[2].weight)  # type: ignore[arg-type]
    pm = parallel(model, MESH, specs={"args.0": "dp, -", "0.weight": "tp, -"}, loss=F.mse_loss, targets=(X[:, :1],))
    x = X.clone().requires_grad_()
    out = pm(x)
    pm(X)  # another forward between, with another seed
    out.sum().backward()
    torch.testing.assert_close((x.grad * X).sum() + pm.full_grads()["0.bias"] @ model[0].bias, out.sum().detach())
    assert pm.verify()


@pytest.mark.long
def test_a_loss_with_the_results_beside_it() -> None:
    model = normed()
    pm, alone = parallel(model, MESH, specs=SPECS), copy.deepcopy(model)
    loss, out = pm(X, Y, with_results=True)
    expected = alone(X)
    theirs = F.cross_entropy(expected, Y)
    loss.backward(), theirs.backward()
    assert near(loss, theirs) and near(out, expected) and out.requires_grad
    grads = pm.full_grads()
    assert all(p.grad is not None and near(grads[name], p.grad) for name, p in alone.named_parameters())
    assert "loss, gradients and results" in str(pm.verify())
    with torch.no_grad():
        loss, out = pm.eval()(X, Y, with_results=True)
        assert near(out, alone.eval()(X)) and near(loss, F.cross_entropy(out, Y)) and not out.requires_grad
    with pytest.raises(sx.Error, match="no loss for results to come beside"):
        pm(X, with_results=True)
    out = pm.train()(X, Y, with_results=True)[1]
    with pytest.raises(sx.Error, match="results that came beside a loss"):
        out.sum().backward()


class OwnLoss(nn.Module):
    """Gives its loss and more, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        logits = self.linear(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits, "most": logits.argmax(-1)}


def test_the_whole_output_of_a_model_with_its_own_loss() -> None:
    model = OwnLoss().double()
    specs = {"args.0": "dp, -", "args.1": "dp"}
    pm = parallel(model, args=(X, Y), targets=(), loss=lambda out: out["loss"], specs=specs)
    loss, out = pm(X, Y, with_results=True)
    theirs = model(X, Y)
    assert near(loss, theirs["loss"]) and out.keys() == theirs.keys()
    assert all(near(out[name], theirs[name]) for name in out)


@pytest.mark.long
def test_what_cannot_be_pulled_back() -> None:
    pm = parallel(mlp(), MESH, specs=SPECS)
    x = X.clone().requires_grad_()
    for what in (pm(x).sum(), pm(x, Y)):
        with pytest.raises(sx.Error, match="have no gradients themselves"):
            torch.autograd.grad(what, x, create_graph=True)
    out = pm(X)
    with torch.no_grad():
        next(pm.parameters()).mul_(2)
    with pytest.raises(sx.Error, match="changed in place before the backward"):
        out.sum().backward()
    frozen = parallel(mlp(), loss=None, targets=(), specs={"args.0": "dp, -"}).requires_grad_(False)
    assert not frozen(X).requires_grad and frozen(x).requires_grad and not pm(X).detach().requires_grad
    assert frozen(X).dtype is F64


@pytest.mark.long
def test_calls_in_two_threads_wait_for_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
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


# ---- gradients that a loss hands out


DATA, WANTED = torch.rand(12, 6), torch.rand(12, 4)


@pytest.fixture(scope="module")
def trained() -> tuple[sx.ParallelModule, list[Tensor]]:
    """A plan on two ranks, and the gradients of one batch on one device."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    F.mse_loss(model(DATA), WANTED).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    hints = sx.Hints(args=(DATA,), targets=(WANTED,), loss=F.mse_loss, specs={"args.0": "dp, -"})
    return sx.parallelize(model, MESHES["dp2"], hints), grads


def delivered(pm: sx.ParallelModule, backward: Callable[[Tensor], Any]) -> list[Tensor]:
    """The gradients of a loss whose backward is started so."""
    pm.zero_grad()
    backward(pm(DATA, WANTED))
    return [p.grad for p in pm.parameters() if p.grad is not None]


def hooked(hook: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Any]:
    """A backward behind a hook on the loss."""

    def backward(loss: Tensor) -> None:
        loss.register_hook(hook)
        loss.backward()

    return backward


WAYS: dict[str, tuple[float, Callable[[Tensor], Any]]] = {
    "its own": (1.0, lambda loss: loss.backward()),
    "a sum": (2.0, lambda loss: (loss + loss).backward()),
    "a given gradient": (3.0, lambda loss: loss.backward(torch.tensor(3.0))),
    "scaled": (8.0, lambda loss: torch.amp.GradScaler("cpu", init_scale=8.0).scale(loss).backward()),
    "a hook that writes": (2.0, hooked(lambda grad: grad.mul_(2))),
    "its own, after one that wrote": (1.0, lambda loss: loss.backward()),
    "twice": (2.0, lambda loss: (loss.backward(retain_graph=True), loss.backward())),
}


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_the_loss_times_its_own(way: str, trained: Any) -> None:
    (pm, grads), (scale, backward) = trained, WAYS[way]
    for mine, theirs in zip(delivered(pm, backward), grads, strict=True):
        torch.testing.assert_close(mine, scale * theirs)


def test_autograd_grad_gives_the_callers_own_gradients(trained: Any) -> None:
    """What was given out is the caller's own, and what is retained stays as it is."""
    pm, grads = trained
    loss = pm(DATA, WANTED)
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
    pm(DATA, WANTED).backward()
    pm(DATA, WANTED).backward()
    hook.remove()
    torch.testing.assert_close(next(iter(pm.parameters())).grad, 2 * grads[0])
    assert len(seen) == 2
    torch.testing.assert_close(seen[1], grads[0])


def test_gradients_are_let_go_with_the_loss(trained: Any) -> None:
    pm, _ = trained
    loss = pm(DATA, WANTED)
    assert torch.equal(pickle.loads(pickle.dumps(loss)), loss)
    gradient = weakref.ref(next(g for g in loss.grad_fn.pull.grads if g is not None))  # type: ignore[union-attr]
    gc.collect()
    gc.disable()
    try:
        del loss
        assert gradient() is None
    finally:
        gc.enable()
