"""What capture takes as constants: tensors made from constants, not data, nor random numbers; and what ``x.data``
means."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardfx as sx
from tests.reference import check_step


class Asking(nn.Module):
    """A layer whose output goes through a function that asks for something."""

    def __init__(self, ask: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.ask = nn.Linear(4, 4), ask

    def forward(self, x: Tensor) -> Tensor:
        return self.ask(self, self.layer(x))


def planned(model: nn.Module, x: Tensor, **hints: Any) -> sx.ParallelModule:
    specs = {"args.0": ", ".join(["dp", *["-"] * (x.ndim - 1)])}
    return sx.parallelize(model, sx.Mesh(dp=2), sx.Hints(args=(x,), specs=specs, **hints), virtual=True)


def of_itself(asked: Any, y: Tensor) -> Tensor:
    causal = torch.full((len(y), len(y)), -torch.inf, dtype=y.dtype).triu(1)
    return causal.softmax(-1) @ y if torch.equal(causal, causal.triu(1)) else y


ASKED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "repeats": lambda m, y: y.repeat_interleave(torch.arange(4), 1),
    "a comparison": of_itself,
    "an assertion": lambda m, y: y if torch.allclose(torch.eye(3), torch.eye(3)) else y * 5,
}


@pytest.mark.long
@pytest.mark.parametrize("name", ASKED)
def test_what_a_model_makes_of_nothing_decides_without_a_guard(name: str) -> None:
    """Also in another specialization, and where weights and inputs have no content."""
    torch.manual_seed(0)
    model, x, other = Asking(ASKED[name]).double(), torch.randn(4, 4).double(), torch.randn(6, 4).double()
    pm = planned(model, x)
    assert not [output for output in pm.captured.outputs if output.guard is not None]
    for each in (x, other):
        assert torch.allclose(pm(each), model(each), rtol=1e-12)
    assert pm.verify()
    assert planned(Asking(ASKED[name]).double().to("meta"), x.to("meta")).verify()


DATA: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "its input": lambda m, y: y * 2 if y.sum() > -1e9 else y,
    "a parameter": lambda m, y: y * 2 if m.layer.bias.sum() > -1e9 else y,
    "a random number": lambda m, y: y * 2 if torch.rand(()) > -1 else y,
}


@pytest.mark.parametrize("name", DATA)
def test_what_may_be_another_at_the_next_call_is_still_refused(name: str) -> None:
    with pytest.raises(sx.Error, match="control flow depend on the data") as error:
        planned(Asking(DATA[name]), torch.randn(4, 4))
    assert "guard=True" in str(error.value)


def test_the_line_that_asks_for_data_is_named_though_another_asks_before() -> None:
    def both(model: Any, y: Tensor) -> Tensor:
        if torch.arange(4).sum() > 3:
            y = y * 2
        return y if y.sum() > 0 else -y

    with pytest.raises(sx.Error, match=r"return y if y.sum\(\) > 0"):
        planned(Asking(both), torch.randn(4, 4))


OUTSIDE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "Python": lambda m, y: y * random.gauss(0, 1),
    "numpy": lambda m, y: y[:, [int(i) for i in np.random.permutation(4)]],
}


@pytest.mark.parametrize(("name", "guard"), [("Python", False), ("numpy", True)])
def test_random_numbers_that_are_not_torchs_are_no_constants(name: str, guard: bool) -> None:
    """The same layers would be left out at every step; it was noticed where two draws differed, and else not."""
    with pytest.raises(sx.Error, match="draws random numbers of") as error:
        planned(Asking(OUTSIDE[name]), torch.randn(4, 4), guard=guard)
    assert "test_captured_constants.py" in str(error.value.where)


def test_a_generator_of_ones_own_with_a_seed_is_one() -> None:
    torch.manual_seed(0)
    model, x = Asking(lambda m, y: y * random.Random(3).random()), torch.randn(4, 4)
    assert torch.allclose(planned(model, x)(x), model(x))


class OwnSoftmax(torch.autograd.Function):
    """With a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.softmax(-1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return torch.ops.aten._softmax_backward_data.default(grad, y, -1, y.dtype)


def clamped(x: Tensor) -> Tensor:
    y = x.clone()
    y.data.clamp_(min=0)
    return y * x


def replaced(x: Tensor) -> Tensor:
    y = x.clone()
    y.data = x * 2
    return y


def written(x: Tensor) -> Tensor:
    y = x.exp()
    y.data.mul_(2)
    return y * x


USES: dict[str, Callable[[Tensor], Tensor]] = {
    "a factor": lambda x: x * x.T.data.T,
    "written into": clamped,
    "a function's own": OwnSoftmax.apply,
}


class Uses(nn.Module):
    """A layer, and a function of what it gives."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, dtype=torch.float64)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


def parallel(model: nn.Module, guard: bool = False) -> sx.ParallelModule:
    x = torch.ones(4, 4, dtype=torch.float64)
    hints = sx.Hints(args=(x,), loss=torch.sum, specs={"args.0": "dp, -"}, guard=guard)
    return sx.parallelize(model, sx.Mesh(dp=2), hints, virtual=True)


@pytest.mark.long
@pytest.mark.parametrize(("name", "guard"), [*((name, False) for name in USES), ("written into", True)])
def test_data_of_a_tensor_is_detached(name: str, guard: bool) -> None:
    torch.manual_seed(0)
    model, x = Uses(USES[name]), torch.randn(4, 4, dtype=torch.float64)
    pm = parallel(model, guard)
    check_step(pm, model, torch.sum, (x,), bound=1e-12)


def test_what_replaces_or_hides_a_value_is_an_error() -> None:
    with pytest.raises(sx.Error, match="replaces what a tensor holds") as raised:
        parallel(Uses(replaced))
    assert "y.data = x * 2" in str(raised.value.where)
    with pytest.raises(sx.Error, match="modified by an inplace operation"):
        parallel(Uses(written))
