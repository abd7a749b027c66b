"""``pm(x)`` inside of a larger computation, and the results beside a loss: as with the model itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardfx as sx

from .test_calls import F64, batch, mlp, near, parallel

MESH = sx.Mesh(dp=2, tp=2)
SPECS = {"args.0": "dp, -", "targets.0": "dp", "0.weight": "tp, -"}
X, Y = batch()


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)).double()


def behind(model: nn.Module, head: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(head(model(x)), Y)


def two_terms(model: nn.Module, head: nn.Module, x: torch.Tensor) -> torch.Tensor:
    inside = model(x, Y) if isinstance(model, sx.ParallelModule) else F.cross_entropy(model(x), Y)
    return inside * 0.5 + model(x.sin()).square().mean()


def before(model: nn.Module, head: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A stem, then an adversarial step by the sign of the input's gradient."""
    (grad,) = torch.autograd.grad(model(x * 2).square().sum(), x)
    return F.cross_entropy(model(x + 0.1 * grad.sign()), Y)


@pytest.mark.long
@pytest.mark.one_in(4)
@pytest.mark.parametrize("make", [mlp, normed])
@pytest.mark.parametrize("loss", [behind, two_terms, before])
def test_gradients_go_through(loss: Callable[..., torch.Tensor], make: Callable[[], nn.Module]) -> None:
    model = make()
    pm, alone = parallel(model, MESH, specs=SPECS), copy.deepcopy(model)
    torch.manual_seed(1)
    head = nn.Linear(4, 4).double()
    pairs = []
    for each in (pm, alone):
        own, x = copy.deepcopy(head), X.clone().requires_grad_()
        made = loss(each, own, x)
        made.backward()
        pairs.append((made, x.grad, [p.grad for p in own.parameters() if p.grad is not None]))
    (ours, of_x, of_head), (theirs, their_x, their_head) = pairs
    assert near(ours, theirs) and of_x is not None and their_x is not None and near(of_x, their_x)
    assert all(near(a, b) for a, b in zip(of_head, their_head, strict=True))
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
    assert any(programs.pulls for _, programs in pm._variants.known) and pm.verify()


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
