"""Which parameters get a gradient, and that it is the model's own; buffers that are written with one."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardfx as sx

from .test_calls import batch, parallel, same_step

TP = sx.Mesh(dp=2, tp=2)
SHARDING = {"args.0": "dp, -", "targets.0": "dp", "first.weight": "tp, -"}


class Rounded(torch.autograd.Function):
    """Rounds, and lets gradients through (times three)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.mul(4).round()

    @staticmethod
    def backward(ctx: Any, *above: torch.Tensor) -> Any:
        return above[0] * 3


class Scaled(torch.autograd.Function):
    """Keeps tensors, takes numbers, gives two results."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by: float, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x, w)
        ctx.by = by
        return x * by, x * w

    @staticmethod
    def backward(ctx: Any, *above: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return above[0] * ctx.by - above[1] * w, None, (above[1] * x).sum(0) * 0.5


class Reversed(torch.autograd.Function):
    """In the newer way: the context is set up apart."""

    @staticmethod
    def forward(x: torch.Tensor, by: float) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.by = inputs[1]

    @staticmethod
    def backward(ctx: Any, *above: torch.Tensor) -> Any:
        return -above[0] * ctx.by, None


class Net(nn.Module):
    """Something between two layers."""

    def __init__(self, between: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.scale, self.last = nn.Linear(8, 8), nn.Parameter(torch.rand(8)), nn.Linear(8, 4)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.between(self.first(x), self.scale))


rounded = Rounded.apply
BETWEEN: dict[str, Callable[..., Any]] = {
    "of several tensors": lambda x, w: sum(Scaled.apply(x, 2.0, w)),
    "twice, with a context apart": lambda x, w: Reversed.apply(Rounded.apply(x) * w, 0.5),
    "in a reentrant checkpoint": lambda x, w: checkpoint(lambda x: rounded(x).sin(), x, use_reentrant=True) * w,
}


@pytest.mark.long
@pytest.mark.parametrize("which", BETWEEN)
def test_autograd_function_has_its_own_gradient(which: str) -> None:
    x, y = batch()
    torch.manual_seed(0)
    model = Net(BETWEEN[which]).double()
    pm = parallel(model, TP, specs=SHARDING)
    same_step(pm, copy.deepcopy(model), x, y)
    assert pm.verify()
    assert "__getattribute__" not in vars(type(torch.autograd.Function))
    assert rounded(x.clone().requires_grad_()).sum().grad_fn is not None


def test_a_function_that_changes_its_input_is_an_error() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.mark_dirty(x)
            return x.mul_(2)

        @staticmethod
        def backward(ctx: Any, *above: torch.Tensor) -> Any:
            return above[0] * 2

    with pytest.raises(sx.Error, match="Function gives one of its inputs back"):
        parallel(Net(lambda x, w: Doubled.apply(x * w)).double())


@pytest.mark.long
def test_parameters_that_the_loss_does_not_reach() -> None:
    x, y = batch()
    torch.manual_seed(0)
    model = Net(lambda x, w: x.detach() * w).double()
    with pytest.warns(sx.ShardfxWarning, match="no gradient for 2 of 5 trainable parameters: first.weight, first.bias"):
        pm = parallel(model)
    assert any("no gradient for 2 of 5" in warning for warning in pm.report().warnings)
    same_step(pm, copy.deepcopy(model), x, y)
    frozen = Net(lambda x, w: x.detach() * w).double()
    frozen.first.requires_grad_(False)
    parallel(frozen)
    with pytest.raises(sx.Error, match=r"no trainable parameter gets a gradient(.|\n)*0.weight, 0.bias"):
        parallel(nn.Sequential(nn.Linear(8, 4)).double(), loss=lambda out, y: F.cross_entropy(out.detach(), y))


class Deep(nn.Module):
    """Blocks, each of which is called by ``how``."""

    def __init__(self, how: Callable[..., Any], count: int) -> None:
        super().__init__()
        self.stem, self.how, self.head = nn.Linear(8, 8), how, nn.Linear(8, 4)
        blocks = (nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(count))
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = self.how(layer, x)
        return self.head(x)


CHECKPOINTS: dict[str, Callable[..., Any]] = {
    "a module": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "its forward, reentrant": lambda layer, x: checkpoint(partial(layer.forward), x, use_reentrant=True),
}


@pytest.mark.long
@pytest.mark.parametrize(("which", "count"), [("its forward, reentrant", 2), ("a module", 12)])
def test_blocks_that_a_model_checkpoints_are_recomputed(which: str, count: int) -> None:
    """Also equal blocks that capture leaves out; unless hints say otherwise."""
    x, y = batch()
    torch.manual_seed(0)
    model = Deep(CHECKPOINTS[which], count).double()
    kept, pm = parallel(copy.deepcopy(model), recompute=()), parallel(copy.deepcopy(model))
    assert any("layers.*: recomputed in the backward" in note for note in pm.planned.notes)
    same_step(pm, model, x, y)
    assert pm.verify() and pm.memory().peak < kept.memory().peak


@pytest.mark.long
def test_checkpoint_within_another_one_matches_eager() -> None:
    def within(layer: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, torch.sin(x), use_reentrant=False).cos()  # type: ignore[no-any-return]

    model = Deep(lambda layer, x: checkpoint(partial(within, layer), x, use_reentrant=True), 2).double()
    same_step(parallel(copy.deepcopy(model)), model, *batch())


def test_a_checkpoint_without_a_module_is_said() -> None:
    pm = parallel(Deep(lambda layer, x: checkpoint(torch.sin, layer(x), use_reentrant=False), 2).double())
    assert any("checkpoints calls no module" in note for note in pm.planned.notes)


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


def written_through_a_view(inner: Inner, y: Tensor) -> Tensor:
    inner.kept[1:3].copy_(y.mean(0)[:2])
    return y * inner.kept.detach()


def with_an_infinite_derivative(inner: Inner, y: Tensor) -> Tensor:
    inner.kept.copy_((y - y).pow(2).mean(0).sqrt())
    return y


WRITTEN = [(detached_read, "meta"), (written_through_a_view, "cpu"), (with_an_infinite_derivative, "cpu")]


@pytest.mark.long
@pytest.mark.parametrize(("how", "device"), WRITTEN)
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
