"""Changes between calls, of the model or of the parallel module: each call gives eager's loss and gradients, and what
was planned before is known."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import shardfx as sx

from .test_calls import batch, near

X, Y = batch()
SCALE = {"by": 1.0}


def by_default(x: Tensor, by: list[float] = [1.0]) -> Tensor:  # noqa: B006
    return x * by[0]


class Reads(nn.Module):
    """Reads of what may change."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)
        self.norm, self.beta, self.deep, self.listed = nn.BatchNorm1d(8), 1.0, {"a": {"b": 1.0}}, [1.0]

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        h = self.act(self.norm(self.up(x))) * self.beta * self.deep["a"]["b"] * self.listed[0] * SCALE["by"]
        return by_default(self.down(h if shift is None else h + shift))


def frozen(model: Any) -> None:
    model.up.weight.requires_grad_(not model.up.weight.requires_grad)


HOOKS: list[Any] = []


def hooked(model: Any) -> None:
    if HOOKS:
        HOOKS.pop().remove()
    else:
        HOOKS.append(model.down.register_forward_hook(lambda module, args, out: out * 2))


def swapped(holder: Any, key: Any, one: Any, other: Any) -> None:
    holder[key] = other if holder[key] == one else one


CHANGES: dict[str, Callable[[Any], Any]] = {
    "an attribute": lambda m: setattr(m, "beta", 3.0 if m.beta == 1.0 else 1.0),
    "a nested dict": lambda m: swapped(m.deep["a"], "b", 1.0, 3.0),
    "a list": lambda m: swapped(m.listed, 0, 1.0, 3.0),
    "a mode": lambda m: m.norm.train(not m.norm.training),
    "all modes": lambda m: m.train(not m.training),
}
OF_MODEL: dict[str, Callable[[Any], Any]] = {
    "another module": lambda m: setattr(m, "act", nn.GELU() if isinstance(m.act, nn.ReLU) else nn.ReLU()),
    "a hook": hooked,
}
OF_SCRIPT: dict[str, Callable[[], Any]] = {
    "a global": lambda: swapped(SCALE, "by", 1.0, 3.0),
    "a default": lambda: swapped(by_default.__defaults__[0], 0, 1.0, 3.0),  # type: ignore[index]
}


def planned() -> tuple[Reads, sx.ParallelModule, Reads]:
    torch.manual_seed(0)
    model = Reads().double()
    reference = copy.deepcopy(model)
    hints = sx.Hints(args=(X,), loss=F.cross_entropy, targets=(Y,), specs={"args.0": "dp, -"}, max_specializations=30)
    return model, sx.parallelize(model, sx.Mesh(dp=2), hints), reference


def same_step(pm: sx.ParallelModule, reference: nn.Module, x: Tensor = X, **beside: Tensor) -> None:
    pm.zero_grad()
    reference.zero_grad()
    loss, expected = pm(x, Y[: len(x)], **beside), F.cross_entropy(reference(x, **beside), Y[: len(x)])
    assert near(loss, expected)
    loss.backward()
    expected.backward()
    wanted = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None and p.requires_grad}
    torch.testing.assert_close(pm.full_grads(), wanted)
    torch.testing.assert_close(pm.full_state_dict(), dict(reference.state_dict()))


@pytest.mark.long
@pytest.mark.parametrize("on", ["model", "pm"])
def test_changes_between_calls(on: str) -> None:
    model, pm, reference = planned()
    same_step(pm, reference)
    changed = model if on == "model" else pm
    for what, change in (CHANGES | (OF_MODEL if on == "model" else {})).items():
        known = []
        for _ in range(4):
            change(changed)
            change(reference)
            same_step(pm, reference)
            known.append(len(pm._variants.known))
        assert known[1] == known[-1] and known[0] <= known[1], what
    for what, turn in OF_SCRIPT.items():
        known = []
        for _ in range(4):
            turn()
            same_step(pm, reference)
            known.append(len(pm._variants.known))
        assert known[1] == known[-1], what


@pytest.mark.long
def test_changes_of_calls() -> None:
    """Another batch size, a further argument, a frozen weight, no gradients, autocast, and a mode that only looks."""
    _, pm, reference = planned()
    for _ in range(2):
        same_step(pm, reference)
        same_step(pm, reference, X[:4])
        same_step(pm, reference, shift=X)
        for each in (pm, reference):
            frozen(each)
        same_step(pm, reference)
        for each in (pm, reference):
            frozen(each)
        with torch.no_grad():
            assert near(pm(X), reference(X))
        with FlopCounterMode(display=False):
            same_step(pm, reference)
        torch._dynamo.reset()
        with torch.compiler.set_stance("force_eager"):
            same_step(pm, reference)
        known = len(pm._variants.known)
    for around in (nullcontext(), torch.autocast("cpu", torch.bfloat16)):
        with around:
            torch.testing.assert_close(pm(X, Y), F.cross_entropy(reference(X), Y), rtol=1e-2, atol=1e-2)
    assert known <= len(pm._variants.known) == 6


def test_new_parameters_are_an_error() -> None:
    model, pm, _ = planned()
    model.down = nn.Sequential(model.down, nn.Linear(4, 4).double())
    with pytest.raises(sx.Error, match=r"(?s)other parameters since it was parallelized.*down.0.weight"):
        pm(X, Y)
