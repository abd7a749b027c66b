"""Optimizers for tests: torch's with options that show, and such as users write; and training with them beside one
device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import shardfx as sx

Optimizers = list[torch.optim.Optimizer]


class Lion(torch.optim.Optimizer):
    """The sign of an average, as many write it."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                first, second = group["betas"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.sign(state["m"] * first + p.grad * (1 - first)), alpha=-group["lr"])
                state["m"].mul_(second).add_(p.grad, alpha=1 - second)


class Lamb(torch.optim.Optimizer):
    """Looks at full tensors: the norms of a parameter and of its update. Its count of steps is a Python number."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["step"] += 1
                state["m"].lerp_(p.grad, 0.1)
                state["v"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                v = state["v"] / (1 - 0.999 ** state["step"])
                update = state["m"] / (1 - 0.9 ** state["step"]) / (v.sqrt() + 1e-6) + 0.01 * p
                mine, its = p.norm(), update.norm()
                p.add_(update * torch.where((mine > 0) & (its > 0), mine / its, 1.0), alpha=-group["lr"])


class Orthogonal(torch.optim.Optimizer):
    """As Muon does it, in the precision of the parameter: products of whole matrices."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "buffer" not in state:
                    state["buffer"] = torch.zeros_like(p)
                x = state["buffer"].lerp_(p.grad, 1 - group["momentum"])
                tall = x.shape[0] > x.shape[1]
                x = x.T if tall else x
                x = x / x.norm().clamp(min=1e-7)
                for _ in range(3):
                    square = x @ x.T
                    x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
                p.add_(x.T if tall else x, alpha=-group["lr"])


class ReadsOut(torch.optim.Optimizer):
    """Scales its step by a number that it reads out of the parameter, and of two takes the smaller."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                size = p.norm().item()
                p.add_(p.grad, alpha=-group["lr"] * min(1.0, size) / (1 + size**0.5))


def of_two(params: list[nn.Parameter], matrices: Callable[..., Any] = Orthogonal) -> Optimizers:
    """One optimizer for the matrices, another one for the rest."""
    rest = optim.AdamW([p for p in params if p.ndim != 2], lr=1e-2)
    return [matrices([p for p in params if p.ndim == 2], lr=1e-2), rest]


KINDS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda ps: optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    "dampening": lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "Adam": lambda ps: optim.Adam(ps, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "AdamW": lambda ps: optim.AdamW(ps, lr=1e-2),
    "fused": lambda ps: optim.AdamW(ps, lr=torch.tensor(1e-2), fused=True),
    "Adagrad": lambda ps: optim.Adagrad(ps, lr=0.1, initial_accumulator_value=0.1, lr_decay=0.1),
    "RAdam": lambda ps: optim.RAdam(ps, lr=1e-2),
    "NAdam": lambda ps: optim.NAdam(ps, lr=1e-2),
    "Adamax": lambda ps: optim.Adamax(ps),
    "Adadelta": lambda ps: optim.Adadelta(ps),
    "ASGD": lambda ps: optim.ASGD(ps, t0=2),
    "RMSprop": lambda ps: optim.RMSprop(ps, momentum=0.5, centered=True),
    "Rprop": lambda ps: optim.Rprop(ps),
    "Adafactor": lambda ps: optim.Adafactor(ps, lr=0.1),
    "Lion": Lion,
    "Lamb": Lamb,
    "two": of_two,
    "reads out": ReadsOut,
}
"""Of each kind one; ``two`` are two optimizers."""


def small_model() -> nn.Module:
    """Two layers in float64, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).double()


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets of the small model."""
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(8, 6, dtype=torch.float64, generator=generator),
            torch.randn(8, 4, dtype=torch.float64, generator=generator),
        )
        for _ in range(count)
    ]


def small_plan(factory: Callable[[Any], Any] | None, mesh: sx.Mesh, **hints: Any) -> sx.ParallelModule:
    """The small model, parallel; all parameters may be sharded."""
    (x, y), *_ = batches(1)
    specs = {"args.0": "dp, -", **({"0.weight": "tp, -"} if "tp" in mesh.names else {})}
    given = sx.Hints(
        args=(x,),
        targets=(y,),
        loss=F.mse_loss,
        optimizer=factory,
        zero_min_numel=0,
        specs=specs | hints.pop("specs", {}),
    )
    return sx.parallelize(small_model(), mesh, replace(given, **hints))


def alone(
    factory: Callable[[Any], Any],
    steps: int,
    clip_grad_norm: float | None = None,
    rate: Callable[[int], float] | None = None,
) -> tuple[list[float], dict[str, Tensor], Optimizers]:
    """The losses of the small model on one device, its parameters behind them, and its optimizers."""
    model = deepcopy(small_model())
    made = factory(list(model.parameters()))
    optimizers = made if isinstance(made, list) else [made]
    losses = []
    for i, (x, y) in enumerate(batches(steps)):
        for optimizer in optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups if rate is not None else ():
                group["lr"] = rate(i)  # type: ignore[misc]
        loss = F.mse_loss(model(x), y)
        loss.backward()
        losses.append(float(loss.detach()))
        if clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
        for optimizer in optimizers:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of torch about its own tensors
                optimizer.step()
    return losses, {name: p.detach() for name, p in model.named_parameters()}, optimizers


def apart(pm: sx.ParallelModule, losses: list[float], params: dict[str, Tensor]) -> float:
    """Steps ``pm`` over the same batches; how far losses and parameters are from those of one device."""
    off = [abs(float(pm.step(x, y)) - loss) for (x, y), loss in zip(batches(len(losses)), losses, strict=True)]
    full = pm.full_state_dict()
    return max(*off, *(float((full[name] - value).abs().max()) for name, value in params.items()))


def refused(what: str, call: Callable[[], object]) -> sx.Error:
    """The error of a call, which says this and what to do."""
    with pytest.raises(sx.Error, match=what) as caught:
        call()
    assert caught.value.remedy or caught.value.expected
    return caught.value
