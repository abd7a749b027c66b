"""Buffers that a forward writes in place by a value with a gradient: losses, gradients and buffers of each step."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import shardfx as sx

F64 = torch.float64
X = torch.linspace(-1.0, 1.0, 32, dtype=F64).cos().reshape(8, 4)
HINTS = sx.Hints((X,), loss=lambda out: out.pow(2).sum(), specs={"args.0": "dp, -", "inner.weight": "-, tp"})


class Inner(nn.Linear):
    """A layer, and what it does with its buffer."""

    kept: Tensor

    def __init__(self, how: Callable[[Inner, Tensor], Tensor]) -> None:
        super().__init__(4, 4, dtype=F64)
        self.how = how
        self.register_buffer("kept", torch.ones(4, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, super().forward(x).tanh())


class Model(nn.Module):
    def __init__(self, how: Callable[[Inner, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = Inner(how)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


def detached_read(inner: Inner, y: Tensor) -> Tensor:
    inner.kept.mul_(0.9).add_(y.mean(0))
    return y + inner.kept.detach()


def not_read(inner: Inner, y: Tensor) -> Tensor:
    inner.kept.mul_(0.9).add_(y.mean(0))
    return y


def detached_before(inner: Inner, y: Tensor) -> Tensor:
    inner.kept.detach_()
    for row in y[:3]:
        inner.kept.mul_(0.5).add_(row)
        y = y + inner.kept
    return y


def written_through_a_view(inner: Inner, y: Tensor) -> Tensor:
    inner.kept[1:3].copy_(y.mean(0)[:2])
    return y * inner.kept.detach()


def with_an_infinite_derivative(inner: Inner, y: Tensor) -> Tensor:
    inner.kept.copy_((y - y).pow(2).mean(0).sqrt())
    return y


WRITTEN = [detached_read, not_read, detached_before, written_through_a_view, with_an_infinite_derivative]


@pytest.mark.long
@pytest.mark.one_in(2)
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("how", WRITTEN)
def test_buffer_written_in_place_with_gradient_matches_single_device(how: Callable[..., Tensor], device: str) -> None:
    torch.manual_seed(0)
    model = Model(how)
    reference = copy.deepcopy(model)
    pm = sx.parallelize(model.to(device), sx.Mesh(dp=2, tp=2), HINTS, virtual=True)
    pm.load_full_state_dict(reference.state_dict())
    for _ in range(3):
        pm.zero_grad()
        reference.zero_grad()
        loss, theirs = pm(X), reference(X).pow(2).sum()
        loss.backward()
        theirs.backward()
        torch.testing.assert_close(loss.detach(), theirs.detach())
        torch.testing.assert_close(pm.full_grads(), {name: p.grad for name, p in reference.named_parameters()})
        torch.testing.assert_close(
            pm.full_state_dict(), {n: each.detach() for n, each in reference.state_dict().items()}
        )
    assert pm.verify()


def only_where_small(inner: Inner, y: Tensor) -> Tensor:
    inner.kept.mul_(0.9).add_(y.mean(0))
    return y + inner.kept.detach() if y.sum() < 1e9 else y


def test_guarded_model_that_eager_stepped_before_matches_single_device() -> None:
    """Its buffer has a grad_fn already."""
    model = Model(only_where_small)
    reference = copy.deepcopy(model)
    for each in (model, reference):
        each(X).sum().backward()
        each.zero_grad()
    pm = sx.parallelize(model, sx.Mesh(dp=2, tp=2), dataclasses.replace(HINTS, guard=True))
    for _ in range(2):
        pm(X).backward()
        reference(X).pow(2).sum().backward()
    torch.testing.assert_close(pm.full_grads(), {name: p.grad for name, p in reference.named_parameters()})


def read_behind(inner: Inner, y: Tensor) -> Tensor:
    inner.kept.mul_(0.9).add_(y.mean(0))
    return y + inner.kept


def overwritten(inner: Inner, y: Tensor) -> Tensor:
    inner.kept.copy_(y.mean(0))
    return y + inner.kept


def nothing_saved(inner: Inner, y: Tensor) -> Tensor:
    inner.kept.add_(inner.bias)
    return inner.kept.sum()


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("how", "said"),
    [
        (read_behind, "backward through the graph a second time"),
        (overwritten, "backward through the graph a second time"),
        (nothing_saved, "sum over all calls so far"),
    ],
)
def test_backward_through_the_previous_call_is_refused(how: Callable[..., Tensor], said: str, device: str) -> None:
    model = Model(how).to(device)
    loss = (lambda out: out) if how is nothing_saved else (lambda out: out.pow(2).sum())
    with pytest.raises(sx.Error, match="carries an autograd graph") as caught:
        sx.parallelize(model, sx.Mesh(dp=2), sx.Hints((X,), loss=loss, specs={"args.0": "dp, -"}), virtual=True)
    assert said in str(caught.value.got) and "inner.kept  inner  test_written_buffers.py:" in str(caught.value.where)


@pytest.mark.long
@pytest.mark.parametrize("how", [read_behind, overwritten])
def test_remedy_for_a_backward_through_the_previous_call_works(how: Callable[..., Tensor]) -> None:
    def detached(inner: Inner, y: Tensor) -> Tensor:
        inner.kept.detach_()
        return how(inner, y)

    test_buffer_written_in_place_with_gradient_matches_single_device(detached, "cpu")
