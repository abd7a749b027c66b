"""Complex numbers: products and sums of shards, which are none of their parts; gradients of parameters, clipped."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from tests.reference import rel_err

OF: dict[str, Callable[[Tensor], Tensor]] = {
    "product, real": lambda z: z.prod(1).real,
    "product, parts": lambda z: torch.view_as_real(z.prod(1)).flip(-1),
    "product, size": lambda z: z.prod(1).reshape(2, -1).conj().abs(),
    "sum, real": lambda z: z.sum(1).real * 2,
    "mean, parts": lambda z: torch.view_as_complex(torch.view_as_real(z.mean(1)).flip(-1)).abs(),
}


class Turned(nn.Module):
    def __init__(self, of: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: Tensor) -> Tensor:
        return self.of(torch.complex(x, 2 - x))


@pytest.mark.long
@pytest.mark.parametrize("name", OF)
def test_what_is_made_of_complex_numbers_in_shards(name: str) -> None:
    model, x = Turned(OF[name]), torch.rand(4, 8, dtype=torch.float64) + 0.5
    pm = sx.parallelize(model, sx.Mesh(tp=2), sx.Hints((x,), specs={"args.0": "-, tp"}))
    assert rel_err(pm(x), model(x)) < 1e-12 and pm.verify()


class Waves(nn.Module):
    """Complex weights with dims and without, beside a real one."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.wave = nn.Parameter(torch.randn(8, 4, dtype=torch.complex128, generator=draw))
        self.phase = nn.Parameter(torch.randn((), dtype=torch.complex128, generator=draw))
        self.bias = nn.Parameter(torch.randn(8, dtype=torch.float64, generator=draw))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (torch.complex(x, 1 - x) @ self.wave.mT * self.phase).abs() + self.bias
        return out


X = torch.linspace(-1, 1, 16, dtype=torch.float64).cos().reshape(4, 4)
SHARDED: dict[str, dict[str, Any]] = {
    "replicated": {"specs": {"args.0": "dp, -"}},
    "sharded": {"specs": {"args.0": "dp, -", "wave": "tp, -"}},
    "zero": {"specs": {"args.0": "dp, -"}, "zero": 3, "zero_min_numel": 1},
    "accumulated": {"specs": {"args.0": "dp, -"}, "grad_accumulation": 2},
}


class Polar(nn.Module):
    """A complex number whose gradient is rounding of a sum that cancels."""

    def __init__(self) -> None:
        super().__init__()
        self.wave, self.layer = nn.Parameter(torch.randn((), dtype=torch.complex64)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.polar(F.softplus(self.layer(x)), x) * self.wave
        return (z * z.conj()).real / 9


@pytest.mark.long
def test_rounding_of_complex64_gradients_is_no_other_function() -> None:
    torch.manual_seed(4)
    x = torch.randn(64, 8)
    hints = sx.Hints((x,), loss=lambda out: F.log_softmax(out / 10, -1)[:, 0].mean(), specs={"args.0": "dp, -"})
    assert sx.parallelize(Polar(), sx.Mesh(dp=2), hints).verify()


def squares(out: Tensor) -> Tensor:
    return out.pow(2).sum()


def clipped(most: float, kind: float = 2.0) -> tuple[Tensor, dict[str, Tensor]]:
    """One device's norm, and its gradients."""
    model = Waves()
    squares(model(X)).backward()
    total = nn.utils.clip_grad_norm_(model.parameters(), most, kind)
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.long
@pytest.mark.parametrize("how", SHARDED)
@pytest.mark.parametrize("most", [0.5, 1e6])
@pytest.mark.one_in(2)
def test_clip_of_complex_parameters_matches_single_device(most: float, how: str) -> None:
    pm = sx.parallelize(Waves(), sx.Mesh(dp=2, tp=2), sx.Hints((X,), loss=squares, clip_grad_norm=most, **SHARDED[how]))
    pm(X).backward()
    torch.testing.assert_close(pm.full_grads(), clipped(most)[1])
    assert pm.verify().checked["parts of the step compared with torch"] == 1


@pytest.mark.parametrize("how", SHARDED)
@pytest.mark.one_in(2)
def test_clip_grad_norm_of_complex_shards_is_the_norm_of_one_device(how: str) -> None:
    pm = sx.parallelize(Waves(), sx.Mesh(dp=2, tp=2), sx.Hints((X,), loss=squares, **SHARDED[how]))
    for kind in (1.0, 2.0, float("inf")):
        total, grads = clipped(0.5, kind)
        for clip in (pm.clip_grad_norm_, lambda *given: nn.utils.clip_grad_norm_(pm.parameters(), *given)):
            pm.zero_grad()
            pm(X).backward()
            torch.testing.assert_close(clip(0.5, kind), total)
            torch.testing.assert_close(pm.full_grads(), grads)


@pytest.mark.long
def test_step_with_complex_parameters_loss_scale_and_clip_matches_single_device() -> None:
    def optimizer(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.01, momentum=0.9)

    compute = sx.MixedPrecision(torch.float64, loss_scale=sx.LossScale(2.0**10))
    hints = sx.Hints(
        (X,), loss=squares, clip_grad_norm=0.5, mixed_precision=compute, optimizer=optimizer, **SHARDED["sharded"]
    )
    pm, model = sx.parallelize(Waves(), sx.Mesh(dp=2, tp=2), hints), Waves()
    own = optimizer(model.parameters())
    for _ in range(2):
        pm.step(X)
        own.zero_grad()
        squares(model(X)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        own.step()
    torch.testing.assert_close(pm.full_state_dict(), copy.copy(model.state_dict()))
