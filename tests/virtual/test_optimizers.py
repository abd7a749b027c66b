"""Optimizers of a parallel module's parameters: stepped, their states moved; those in a program, tried."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import shardfx as sx
from shardfx.ir.capture.optimizer.initial_state import recipe
from shardfx.ir.capture.optimizer.optimizer_groups import make_groups_of
from shardfx.ir.capture.optimizer.optimizer_trial import OptimizerTrial
from shardfx.ir.capture.optimizer.step_trace import WITH_NUMBERS, StepProbe
from tests.stepped import Optimizers, alone, apart, small_plan

from .test_calls import batch, mlp, near, parallel

TP = {"0.weight": "tp, -"}


def test_one_that_calls_a_closure() -> None:
    x, y = batch()
    pm, alone = parallel(mlp(), sx.Mesh(tp=2), specs=TP), copy.deepcopy(mlp())

    def train(model: nn.Module, loss: Any) -> None:
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            made: torch.Tensor = loss()
            made.backward()
            return made

        optimizer.step(closure)

    train(pm, lambda: pm(x, y))
    train(alone, lambda: nn.functional.cross_entropy(alone(x), y))
    state = pm.full_state_dict()
    assert all(near(state[name], tensor) for name, tensor in alone.state_dict().items())


BY = {"tp": (sx.Mesh(tp=2), TP), "dp": (sx.Mesh(dp=2), {"args.0": "dp, -", "0.weight": "dp, -", "2.bias": "dp"})}


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    decayed, others = ([p for n, p in model.named_parameters() if n.endswith(end)] for end in ("weight", "bias"))
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=0.01, amsgrad=True)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 2) -> None:
    x, y = batch()
    for _ in range(count):
        optimizer.zero_grad()
        loss = model(x, y) if isinstance(model, sx.ParallelModule) else nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()


@pytest.mark.long
def test_states_move_between_plans_and_the_model() -> None:
    """From one plan into another, from that into the model, from the model into the first: as if nothing had been."""
    alone, tp, dp = mlp(), parallel(mlp(), *BY["tp"][:1], specs=BY["tp"][1]), parallel(mlp(), specs=BY["dp"][1])
    made = {each: grouped(each) for each in (tp, dp, alone)}
    reference = mlp()
    straight = grouped(reference)
    for _ in range(2):
        for ours, following in ((tp, dp), (dp, alone), (alone, tp)):
            steps(ours, made[ours])
            steps(reference, straight)
            whole = ours.full_state_dict() if isinstance(ours, sx.ParallelModule) else ours.state_dict()
            states = (
                ours.full_optimizer_state_dict(made[ours])
                if isinstance(ours, sx.ParallelModule)
                else made[ours].state_dict()
            )
            assert states["param_groups"] == straight.state_dict()["param_groups"]
            for index, held in straight.state_dict()["state"].items():
                assert all(near(states["state"][index][key], value) for key, value in held.items() if value is not None)
            if isinstance(following, sx.ParallelModule):
                following.load_full_state_dict(whole)
                following.load_full_optimizer_state_dict(made[following], states)
            else:
                following.load_state_dict(whole)
                made[following].load_state_dict(states)
    assert all(near(tensor, whole[name]) for name, tensor in reference.state_dict().items())


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
        (ChangesItsRate, r"\['lr'\], which it changes"),
        (ClipsLarge, r"elsewhere: the parameter after step 8\n.*Hints\(clip"),
        (KeepsAList, "several things in one\n(.*\n)*.*'last', a list of 1"),
        (WantsAClosure, r"cannot be traced\n(.*\n)*.*as SAM does\n.*with its closure"),
    ],
)
def test_step_that_depends_on_other_parameters_is_refused(kind: Callable[[Any], optim.Optimizer], what: str) -> None:
    with pytest.raises(sx.Error, match=what) as caught:
        tried(kind)
    assert "test_optimizers.py" in str(caught.value.where)


def tried(factory: Callable[[Any], Any], **more: nn.Parameter) -> None:
    """As a plan tries it, on two parameters of one shape and one of another."""
    named = {"v": nn.Parameter(torch.ones(3)), "a": nn.Parameter(torch.ones(4, 2)), "b": nn.Parameter(torch.ones(4, 2))}
    groups = make_groups_of(factory, named | more)
    small = OptimizerTrial(factory, named | more, groups, named | more, {})
    for group in groups:
        recipe(small, group.number, [name for name in group.names if name in ("a", "b", *more)])


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


F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
NUMBER, COUNT = 0.77, 384
"""Elements: a multiple of what a kernel takes at once, for it rounds the rest of bfloat16s in another way."""


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        *((name, (dtype,) * 3) for name in ("addcmul", "addcdiv") for dtype in (F32, BF16)),
        ("sub", (BF16, BF16)),
        *(("add", dtypes) for dtypes in ((F64, BF16), (F32, BF16))),
    ],
)
def test_function_with_a_number_in_a_tensor_equals_its_kernel(name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    number, function = WITH_NUMBERS[name][0], getattr(torch, name)
    drawn = torch.Generator().manual_seed(0)
    operands = [(torch.rand(COUNT, generator=drawn, dtype=F64) + 0.5).to(dtype) for dtype in dtypes]
    expected = function(*operands, **{number: NUMBER})
    with StepProbe(""):
        made = function(*operands, **{number: torch.tensor(NUMBER, dtype=F64)})
    assert made.dtype == expected.dtype
    apart = (made.double() - expected.double()).abs()
    assert apart.max() <= 4 * torch.finfo(made.dtype).eps * expected.abs().max()
    if made.dtype is BF16:
        assert (apart > 0).double().mean() < 0.01
