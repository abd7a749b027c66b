"""Which parameters get a gradient, and that it is the model's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
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
    "bound before": lambda x, w: rounded(x) * w,
    "of several tensors": lambda x, w: sum(Scaled.apply(x, 2.0, w)),
    "twice, with a context apart": lambda x, w: Reversed.apply(Rounded.apply(x) * w, 0.5),
    "in a checkpoint": lambda x, w: checkpoint(lambda x: rounded(x).sin() * w, x, use_reentrant=False),
    "in a reentrant checkpoint": lambda x, w: checkpoint(lambda x: rounded(x).sin(), x, use_reentrant=True) * w,
}


@pytest.mark.long
@pytest.mark.one_in(2)
@pytest.mark.parametrize("which", BETWEEN)
def test_a_function_has_its_own_gradient(which: str) -> None:
    x, y = batch()
    torch.manual_seed(0)
    model = Net(BETWEEN[which]).double()
    pm = parallel(model, TP, specs=SHARDING)
    same_step(pm, copy.deepcopy(model), x, y)
    assert pm.verify()
    assert "__getattribute__" not in vars(type(torch.autograd.Function))
    assert rounded(x.clone().requires_grad_()).sum().grad_fn is not None


class Block(nn.Module):
    """One of many."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + Reversed.apply(self.linear(x), 0.1)


def test_equal_blocks_with_a_function() -> None:
    x, y = batch()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(*(Block() for _ in range(12))), nn.Linear(8, 4)).double()
    pm = parallel(model)
    repeats = len(pm._compiled.captured.graph.repeats)
    assert repeats == 1
    same_step(pm, copy.deepcopy(model), x, y)


def test_a_function_that_changes_its_input_is_an_error() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.mark_dirty(x)
            return x.mul_(2)

        @staticmethod
        def backward(ctx: Any, *above: torch.Tensor) -> Any:
            return above[0] * 2

    with pytest.raises(sx.Error, match="Doubled gives one of its inputs back"):
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
    "a module, reentrant": lambda layer, x: checkpoint(partial(layer.forward), x, use_reentrant=True),
    "its forward": lambda layer, x: checkpoint(partial(nn.Sequential.forward, layer), x, use_reentrant=False),
    "what calls one": lambda layer, x: checkpoint(lambda x: layer(x) * 1.0, x, use_reentrant=False),
}


@pytest.mark.long
@pytest.mark.parametrize(("which", "count"), [*((which, 2) for which in CHECKPOINTS), ("a module", 12)])
@pytest.mark.one_in(4)
def test_what_a_model_checkpoints_is_recomputed(which: str, count: int) -> None:
    """As patterns for the hints, also of equal blocks that capture leaves out; unless hints say otherwise."""
    x, y = batch()
    torch.manual_seed(0)
    model = Deep(CHECKPOINTS[which], count).double()
    kept, pm = parallel(copy.deepcopy(model), recompute=()), parallel(copy.deepcopy(model))
    assert [str(each) for each in pm._compiled.passes if each.name == "recompute"] == [str(sx.Recompute("layers.*"))]
    assert any("layers.*: recomputed in the backward" in note for note in pm.planned.notes)
    same_step(pm, model, x, y)
    assert pm.verify() and pm.memory().peak < kept.memory().peak
    assert not [each for each in kept._compiled.passes if each.name == "recompute"]


@pytest.mark.long
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_within_another_one(reentrant: bool) -> None:
    def within(layer: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, torch.sin(x), use_reentrant=False).cos()  # type: ignore[no-any-return]

    model = Deep(lambda layer, x: checkpoint(partial(within, layer), x, use_reentrant=reentrant), 2).double()
    same_step(parallel(copy.deepcopy(model)), model, *batch())


def test_a_checkpoint_without_a_module_is_said() -> None:
    pm = parallel(Deep(lambda layer, x: checkpoint(torch.sin, layer(x), use_reentrant=False), 2).double())
    assert any("checkpoints calls no module" in note for note in pm.planned.notes)
