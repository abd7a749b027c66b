"""Optimizers that look at full tensors, stepped on virtual shards: one device's weights, or an Error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardfx as sx
from shardfx.module import elementwise_trial as trial
from tests import whole_tensor
from tests.whole_tensor import (
    AdaptiveClipping,
    Centralized,
    FanIn,
    Late,
    RarelyClipped,
    RowNorm,
    SkipsOverflow,
    TrustRatio,
    WholeTensor,
)

NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "matrix": (lambda: nn.Linear(32, 16, bias=False), (4, 32)),
    "vector": (lambda: nn.LayerNorm(512, bias=False), (4, 512)),
    "filters": (lambda: nn.Conv2d(4, 8, 3, bias=False), (4, 4, 5, 5)),
}
TRIED: list[tuple[Any, str, bool]] = [
    (RowNorm, "matrix: tp, -", True),
    (RowNorm, "matrix: -, tp", False),
    (Centralized, "filters: tp, -, -, -", True),
    (Centralized, "filters: -, tp, -, -", False),
    (TrustRatio, "vector: tp", False),
    (FanIn, "vector: tp", True),
    (FanIn, "matrix: -, tp", False),
    (AdaptiveClipping, "filters: tp, -, -, -", True),
    (AdaptiveClipping, "vector: tp", False),
    (Late, "matrix: tp, -", False),
    (SkipsOverflow, "matrix: tp, -", False),
    (RarelyClipped, "matrix: tp, -", False),
    (torch.optim.RAdam, "filters: -, tp, -, -", True),
    (torch.optim.Adafactor, "matrix: tp, -", False),
]
"""Optimizers, the net and the sharding of its weight, and whether steps of shards are those of the weight."""


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


@pytest.mark.parametrize(("kind", "sharding", "right"), TRIED)
def test_each_sharding_of_a_parameter_is_tried_as_it_is(kind: Any, sharding: str, right: bool) -> None:
    name, _, spec = sharding.partition(": ")
    model, x = net(name)
    pm = sx.parallelize(copy.deepcopy(model), sx.Mesh(tp=2), sx.Hints((x,), loss=squares, specs={"weight": spec}))
    if right:
        ours = stepped(pm, kind(pm.parameters(), lr=0.01), x)
        assert torch.allclose(ours, stepped(model, kind(model.parameters(), lr=0.01), x), rtol=1e-12, atol=1e-12)
    else:
        with pytest.raises(sx.Error, match=r"looks at full tensors, and 'weight' is sharded"):
            kind(pm.parameters(), lr=0.01).step()


def sharded() -> tuple[sx.ParallelModule, torch.Tensor]:
    model, x = net("matrix")
    return sx.parallelize(model, sx.Mesh(tp=2), sx.Hints((x,), loss=squares, specs={"weight": "tp, -"})), x


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
    [((1024, 4096), (1, 8), False), ((1024, 4096), (2, 1), True)],
)
def test_large_parameters_are_tried_small_with_the_same_ratio(
    shape: tuple[int, ...], counts: tuple[int, ...], alike: bool
) -> None:
    parameter = nn.Parameter(torch.zeros(1))
    trial.lay_out(parameter, trial.Layout("w", shape, counts))
    kind = trial.ParameterKind.of(parameter)
    assert torch.Size(kind.shape).numel() <= trial.MOST and kind.shape[0] * shape[1] == kind.shape[1] * shape[0]
    assert (trial.tried(Spectral([parameter])) is None) == alike
    assert trial.tried(torch.optim.AdamW([parameter])) is None


# ---- gradients that a script changes shard by shard ---------------------------------------------------------------


Change = Callable[[list[nn.Parameter]], object]


def of_each(change: Callable[[Any], object]) -> Change:
    return lambda parameters: [change(p) for p in parameters]


def normalised_by_lists(parameters: list[nn.Parameter]) -> None:
    grads = [p.grad for p in parameters]
    torch._foreach_div_(grads, torch._foreach_norm(grads))


def stepped_by_hand(parameters: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for p in parameters:
            p.sub_(p.grad / p.grad.norm())


def clipped_by_hand(parameters: list[nn.Parameter]) -> None:
    """As scripts from before ``clip_grad_norm_`` do."""
    total = sum(p.grad.data.norm(2).item() ** 2 for p in parameters) ** 0.5
    for p in parameters:
        p.grad.data.mul_(0.1 / (total + 1e-6))


def clipped_together(parameters: list[nn.Parameter]) -> None:
    nn.utils.clip_grad_norm_(parameters, 0.1)
    nn.utils.clip_grad_value_(parameters, 0.05)


def unscaled(p: nn.Parameter) -> None:
    p.grad = torch.nan_to_num(p.grad / 8).clamp(-1, 1) + 0.01 * p.detach()


SHARD_BY_SHARD: dict[str, Change] = {
    "clipped": of_each(lambda p: nn.utils.clip_grad_norm_(p, 0.1)),
    "normalised by lists": normalised_by_lists,
    "by an array": of_each(lambda p: p.grad.mul_(1 / float((p.grad.numpy(force=True) ** 2).sum() ** 0.5))),
    "by a branch": of_each(lambda p: p.grad.zero_() if p.grad.norm() > 0 else None),
    "clipped by hand": clipped_by_hand,
    "stepped by hand": stepped_by_hand,
}
TOGETHER: dict[str, Change] = {"clipped": clipped_together, "unscaled": of_each(unscaled)}


def ran(change: Any, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The weights after two steps of gradients that are added up and changed."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        for _ in range(2):
            loss = model(x) if isinstance(model, sx.ParallelModule) else squares(model(x))
            loss.backward()
        change(list(model.parameters()))
        optimizer.step()
    whole = model.full_state_dict() if isinstance(model, sx.ParallelModule) else model.state_dict()
    return whole["weight"]


@pytest.mark.parametrize("change", SHARD_BY_SHARD.values(), ids=SHARD_BY_SHARD)
def test_gradients_that_are_changed_shard_by_shard_are_an_error(change: Any) -> None:
    pm, x = sharded()
    with pytest.raises(sx.Error, match="the gradient of 'weight' is used shard by shard"):
        ran(change, pm, x)


def test_a_gradient_of_some_shards_alone_is_an_error() -> None:
    pm, x = sharded()
    with pytest.raises(sx.Error, match=r"'weight' is used shard by shard(.|\n)*a gradient of some of its shards alone"):
        ran(lambda parameters: setattr(parameters[0], "grad", None), pm, x)


@pytest.mark.parametrize("change", TOGETHER.values(), ids=TOGETHER)
def test_gradients_that_are_changed_by_all_shards_are_those_of_one_device(change: Any) -> None:
    pm, x = sharded()
    copied = copy.deepcopy(pm)
    expected = ran(change, net("matrix")[0], x)
    assert all(torch.allclose(ran(change, each, x), expected, rtol=1e-12, atol=1e-12) for each in (pm, copied))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_gradients_of_shards_on_a_gpu() -> None:
    """Where ``clip_grad_norm_`` and optimizers work on lists, and the backward has a thread of its own."""
    model, x = (each.cuda() for each in net("matrix"))
    hints = sx.Hints((x,), loss=squares, specs={"weight": "tp, -"}, device="cuda")
    pm = sx.parallelize(copy.deepcopy(model), sx.Mesh(tp=2), hints)
    assert torch.allclose(ran(clipped_together, pm, x), ran(clipped_together, model, x), rtol=1e-12, atol=1e-12)
    with pytest.raises(sx.Error, match="used shard by shard"):
        ran(normalised_by_lists, pm, x)


def test_gradients_of_shards_are_read_copied_and_saved_as_any(tmp_path: Path) -> None:
    pm, x = sharded()
    pm(x).backward()
    grad = next(pm.parameters()).grad
    assert grad is not None and grad.shape == (8, 32)
    mine = pm.full_grads()["weight"][:8]
    torch.save(grad, tmp_path / "grad.pt")
    assert torch.equal(torch.load(tmp_path / "grad.pt"), mine) and repr(grad) == repr(copy.deepcopy(grad)) == repr(mine)
    assert type(pm.full_grads()["weight"]) is torch.Tensor


def test_an_optimizer_sees_plain_gradients() -> None:
    pm, x = sharded()
    seen: list[type] = []

    class Seeing(WholeTensor):
        def update(self, p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
            seen.append(type(grad))
            return grad

    stepped(pm, Seeing(pm.parameters()), x, 1)
    assert set(seen) == {torch.Tensor}
    optimizer = torch.optim.LBFGS(pm.parameters(), max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = pm(x)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert type(optimizer.state_dict()["state"][0]["prev_flat_grad"]) is torch.Tensor
