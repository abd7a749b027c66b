"""Optimizers that look at whole tensors, stepped on virtual shards: one device's weights, or an Error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardfx as sx
from shardfx.module.stepping import trial
from tests import whole_tensor
from tests.whole_tensor import AdaptiveClipping, Centralized, FanIn, Late, RowNorm, TrustRatio, WholeTensor

NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "matrix": (lambda: nn.Linear(32, 16, bias=False), (4, 32)),
    "vector": (lambda: nn.LayerNorm(512, bias=False), (4, 512)),
    "filters": (lambda: nn.Conv2d(4, 8, 3, bias=False), (4, 4, 5, 5)),
}
SHARDED = {
    "matrix rows": "tp, -",
    "matrix columns": "-, tp",
    "vector rows": "tp",
    "filters rows": "tp, -, -, -",
    "filters columns": "-, tp, -, -",
}
RIGHT = {
    RowNorm: {"matrix rows", "vector rows", "filters rows"},
    Centralized: {"matrix rows", "vector rows", "filters rows"},
    TrustRatio: set[str](),
    FanIn: {"matrix rows", "vector rows", "filters rows"},
    AdaptiveClipping: {"matrix rows", "filters rows"},
    Late: set[str](),
    torch.optim.AdamW: set(SHARDED),
    torch.optim.RAdam: set(SHARDED),
    torch.optim.Adagrad: set(SHARDED),
    torch.optim.Adafactor: set[str](),
}


def squares(out: torch.Tensor) -> torch.Tensor:
    return out.square().sum()


def net(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    make, shape = NETS[name]
    model = make().double()
    with torch.no_grad():
        model.weight.normal_()
    return model, torch.randn(shape, dtype=torch.float64)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, count: int = 3) -> torch.Tensor:
    for _ in range(count):
        optimizer.zero_grad()
        loss = model(x) if isinstance(model, sx.ParallelModule) else squares(model(x))
        loss.backward()
        optimizer.step()
    whole = model.full_state_dict() if isinstance(model, sx.ParallelModule) else model.state_dict()
    return whole["weight"]


@pytest.mark.parametrize("kind", RIGHT, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("sharding", SHARDED)
def test_each_sharding_of_a_parameter_is_tried_as_it_is(sharding: str, kind: Any) -> None:
    model, x = net(sharding.split()[0])
    pm = sx.parallelize(
        copy.deepcopy(model), sx.Mesh(tp=2), sx.Hints((x,), loss=squares, specs={"weight": SHARDED[sharding]})
    )
    if sharding in RIGHT[kind]:
        ours = stepped(pm, kind(pm.parameters(), lr=0.01), x)
        assert torch.allclose(ours, stepped(model, kind(model.parameters(), lr=0.01), x), rtol=1e-12, atol=1e-12)
    else:
        with pytest.raises(sx.Error, match=r"looks at whole tensors, and 'weight' is sharded"):
            kind(pm.parameters(), lr=0.01).step()


class Centring(WholeTensor):
    """Takes means away where its constructor is told to, which no group says."""

    def __init__(self, params: Any, lr: float = 0.1, centring: bool = False) -> None:
        super().__init__(params, lr)
        self.centring = centring

    def update(self, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return grad - grad.mean() if self.centring else grad


class Annealed(Centring):
    """Counts its steps in its groups."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            group["weight"] = 0.5 ** group["steps"]


def sharded() -> tuple[sx.ParallelModule, torch.Tensor]:
    model, x = net("matrix")
    return sx.parallelize(model, sx.Mesh(tp=2), sx.Hints((x,), loss=squares, specs={"weight": "tp, -"})), x


def test_what_only_the_instance_says_is_tried() -> None:
    pm, x = sharded()
    stepped(pm, Centring(pm.parameters()), x)
    for lr in (0.1, 1e-9):  # the difference is told from rounding by what a step changes
        with pytest.raises(sx.Error, match="Centring looks at whole tensors"):
            Centring(pm.parameters(), lr=lr, centring=True).step()


def test_numbers_that_a_step_changes_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    count, real = [0], trial._try
    monkeypatch.setattr(trial, "_try", lambda *args: (count.__setitem__(0, count[0] + 1), real(*args))[1])
    pm, x = sharded()
    optimizer = Annealed(pm.parameters(), lr=0.017)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: n / 10)  # begins with a rate of 0
    for _ in range(3):
        stepped(pm, optimizer, x, 1)
        scheduler.step()
    assert count == [2], "at the first step, and where the rate is no longer 0"


def test_the_optimizer_itself_is_left_as_it_is() -> None:
    """The trial works on other weights, states, counts and random numbers."""
    pm, x = sharded()
    optimizer = whole_tensor.WholeTensor(pm.parameters(), lr=0.0)
    optimizer.record = []  # type: ignore[attr-defined]
    before, random = pm.full_state_dict()["weight"], torch.get_rng_state()
    stepped(pm, optimizer, x, 1)
    assert torch.equal(pm.full_state_dict()["weight"], before) and not optimizer.record  # type: ignore[attr-defined]
    assert torch.equal(torch.get_rng_state(), random)


class Spectral(WholeTensor):
    """The rate of a matrix goes by the ratio of its sides."""

    def update(self, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return grad * max(1.0, p.shape[0] / p.shape[1])


@pytest.mark.parametrize(
    ("shape", "counts", "alike"),
    [((4096, 1024), (8, 1), False), ((1024, 4096), (1, 8), False), ((1024, 4096), (2, 1), True)],
)
def test_large_parameters_are_tried_small_with_the_same_ratio(
    shape: tuple[int, ...], counts: tuple[int, ...], alike: bool
) -> None:
    parameter = nn.Parameter(torch.zeros(1))
    trial.lay_out(parameter, trial.Layout("w", shape, counts))
    kind = trial.Kind.of(parameter)
    assert torch.Size(kind.shape).numel() <= trial.MOST and kind.shape[0] * shape[1] == kind.shape[1] * shape[0]
    assert (trial.tried(Spectral([parameter])).apart == 0) == alike
    assert trial.tried(torch.optim.AdamW([parameter])) == trial.Trial()
