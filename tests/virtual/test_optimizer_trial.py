"""A step is in the program if it is that of each parameter by itself: what shows late or seldom is looked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import shardfx as sx
from shardfx.ir.capture.optimizer.initial_state import recipe
from shardfx.ir.capture.optimizer.optimizer_groups import make_groups_of
from shardfx.ir.capture.optimizer.optimizer_trial import OptimizerTrial
from tests.stepped import Optimizers, alone, apart, small_plan

DP2 = sx.Mesh(dp=2)


class Own(optim.Optimizer):
    """What users' optimizers begin with."""

    def __init__(self, params: Any, lr: float = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})
        self.calls = 0

    def each(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        yield from ((group, p) for group in self.param_groups for p in group["params"] if p.grad is not None)

    def one(self, group: dict[str, Any], p: Tensor) -> None:
        p.sub_(p.grad * group["lr"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, p in self.each():
            self.one(group, p)


class SeldomMore(Own):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        super().step()

    def one(self, group: dict[str, Any], p: Tensor) -> None:
        p.sub_(p.grad * (group["lr"] * (5 if self.calls % 10 == 0 else 1)))


class CountsInGroup(Own):
    def one(self, group: dict[str, Any], p: Tensor) -> None:
        group["k"] = group.get("k", 0) + 1
        p.sub_(p.grad * (group["lr"] if group["k"] < 100 else 0.0))


class CountsForAll(Own):
    def one(self, group: dict[str, Any], p: Tensor) -> None:
        self.state["k"] = self.state.get("k", 0) + 1
        p.sub_(p.grad * (group["lr"] if self.state["k"] < 100 else 0.0))


class ChangesItsRate(Own):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.param_groups[0]["lr"] *= 0.9


class ClipsLarge(Own):
    """By the norm of all gradients, where it is more than those that are tried have."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        norm = torch.stack([p.grad.norm() for _, p in self.each()]).norm()
        for group, p in self.each():
            p.sub_(p.grad * (100 / norm).clamp(max=1.0) * group["lr"])


class SkipsAll(Own):
    """Where one gradient is no number."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        fine = torch.stack([p.grad.isfinite().all() for _, p in self.each()]).all()
        for group, p in self.each():
            p.copy_(torch.where(fine, p - p.grad * group["lr"], p))


class KeepsAList(Own):
    def one(self, group: dict[str, Any], p: Tensor) -> None:
        last = self.state[p].setdefault("last", [])
        last[:] = [*last[-1:], p.grad.clone()]
        p.sub_(sum(last) * group["lr"])


class WantsAClosure(Own):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "as SAM does"


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (SeldomMore, "self.calls, which it changes"),
        (CountsInGroup, r"\['k'\], which it changes"),
        (CountsForAll, r"self.state\['k'\], which it changes"),
        (ChangesItsRate, "'lr' of a group, which a step changes"),
        (ClipsLarge, r"others have other gradients\n.*Hints\(clip"),
        (SkipsAll, "others have other gradients"),
        (KeepsAList, "several things in one\n(.*\n)*.*'last', a list of 1"),
        (WantsAClosure, r"cannot be traced\n(.*\n)*.*as SAM does\n.*with its closure"),
    ],
)
def test_step_that_depends_on_other_parameters_is_refused(kind: Callable[[Any], optim.Optimizer], what: str) -> None:
    with pytest.raises(sx.Error, match=what) as caught:
        tried(kind)
    assert "test_optimizer_trial.py" in str(caught.value.where)


def tried(factory: Callable[[Any], Any], **more: nn.Parameter) -> None:
    """As a plan tries it, on two parameters of one shape and one of another."""
    named = {"v": nn.Parameter(torch.ones(3)), "a": nn.Parameter(torch.ones(4, 2)), "b": nn.Parameter(torch.ones(4, 2))}
    groups = make_groups_of(factory, named | more)
    small = OptimizerTrial(factory, named | more, groups, named | more)
    for group in groups:
        recipe(small, group.number, [name for name in group.names if name in ("a", "b", *more)])


class Preconditioned(Own):
    """As Shampoo: states are squares of sides, which begin as a diagonal, and a factorization of what is there."""

    def one(self, group: dict[str, Any], p: Tensor) -> None:
        state, update = self.state[p], p.grad
        for i, size in enumerate(update.shape):
            along = p.grad.transpose(0, i).reshape(size, -1)
            side = state.setdefault(f"side{i}", 1e-3 * torch.eye(size, dtype=p.dtype))
            side.add_(along @ along.T)
            values, vectors = torch.linalg.eigh(side)
            root = vectors @ torch.diag(values.clamp(min=1e-12) ** -0.25) @ vectors.T
            update = (
                (root @ update.transpose(0, i).reshape(size, -1)).view(update.transpose(0, i).shape).transpose(0, i)
            )
        p.sub_(update * group["lr"])


class OfConstants(Own):
    """Its numbers are tensors of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.factors = torch.tensor([0.5, 0.25], dtype=torch.float64)

    def one(self, group: dict[str, Any], p: Tensor) -> None:
        linear, cubic = self.factors
        p.sub_((p.grad * linear + p.grad.pow(3) * cubic) * group["lr"])


class HalfStates(Own):
    """A state in bfloat16, also of a parameter without dims."""

    def one(self, group: dict[str, Any], p: Tensor) -> None:
        mean = self.state[p].setdefault("mean", torch.zeros_like(p, dtype=torch.bfloat16))
        mean.copy_(mean.to(p.dtype) * 0.9 + p.grad)
        p.sub_(mean.to(p.dtype) * group["lr"])


def plain(params: Any) -> Optimizers:
    return [optim.Adam(params, lr=0.01, betas=(0.9, 0.99))]


def of_tensors(params: Any) -> Optimizers:
    """On a GPU as it stands; here the same as plain."""
    rate, first, second = (torch.tensor(each, dtype=torch.float64) for each in (0.01, 0.9, 0.99))
    return [optim.Adam(params, lr=rate, betas=(first, second), foreach=False, capturable=True)]


@pytest.mark.long
def test_capturable_options_and_numbers_in_tensors() -> None:
    losses, params, _ = alone(plain, 5)
    assert apart(small_plan(of_tensors, DP2, zero=1), losses, params) < 1e-9


@pytest.mark.long
@pytest.mark.parametrize("kind", [pytest.param(Preconditioned, marks=pytest.mark.slow), OfConstants])
def test_custom_optimizers_are_captured(kind: Callable[[Any], Any]) -> None:
    losses, params, _ = alone(kind, 5)
    pm = small_plan(kind, sx.Mesh(dp=2, tp=2), zero=1)
    assert apart(pm, losses, params) < 1e-9 and pm.verify()


def test_bfloat16_state_of_a_parameter_without_dims() -> None:
    tried(HalfStates, scale=nn.Parameter(torch.tensor(1.5)))
