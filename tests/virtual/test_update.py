"""The optimizer's step in the program: equal to one device's on any mesh, proven, by few kernels."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils._python_dispatch import TorchDispatchMode

import shardfx as sx
from tests.plans import MESHES
from tests.stepped import KINDS, alone, apart, batches, of_two, small_plan

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "zero 1": {"zero": 1},
    "zero 1, clip": {"zero": 1, "clip_grad_norm": 0.1},
    "zero 3, recompute": {"zero": 3, "recompute": "1"},
}
CASES = [(kind, "zero 1", "dp2tp2") for kind in KINDS]
CASES += [("AdamW", "plain", "dp2"), ("AdamW", "zero 1, clip", "dp2"), ("two", "zero 3, recompute", "dp2")]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "feature", "mesh"), CASES)
def test_steps_equal_one_device(kind: str, feature: str, mesh: str) -> None:
    losses, params, _ = alone(KINDS[kind], 5, FEATURES[feature].get("clip_grad_norm"))
    pm = small_plan(KINDS[kind], MESHES[mesh], **FEATURES[feature])
    assert apart(pm, losses, params) < 1e-9
    verdict = pm.verify()
    assert verdict and "a full step" in str(verdict), verdict.why


@pytest.mark.long
def test_muon_which_computes_in_bfloat16_equals_one_device() -> None:
    """It does whatever its parameters are; products of shards are rounded elsewhere."""

    def kind(params: Any) -> Any:
        return of_two(params, torch.optim.Muon)

    losses, params, _ = alone(kind, 5)
    assert apart(small_plan(kind, MESHES["dp2"]), losses, params) < 1e-9
    pm = small_plan(kind, MESHES["dp2tp2"], zero=1)
    assert apart(pm, losses, params) < 2e-3
    assert pm.verify(), pm.verify().why


@pytest.mark.long
def test_a_plan_may_be_called_as_before() -> None:
    """Loss, gradients and results are those without an optimizer; gradients are clipped where that is hinted."""
    (x, y), *_ = batches(1)
    plain, pm = (small_plan(each, MESHES["dp2"], zero=1) for each in (None, KINDS["AdamW"]))
    clipped = small_plan(None, MESHES["dp2"], zero=1, clip_grad_norm=0.01)
    for each in (plain, pm, clipped):
        each(x, y).backward()
    whole = plain.full_grads()
    assert all(torch.equal(grad, whole[name]) for name, grad in pm.full_grads().items())
    norm = torch.nn.utils.get_total_norm(whole.values())
    for name, grad in clipped.full_grads().items():
        assert torch.allclose(grad, whole[name] * 0.01 / (norm + 1e-6), rtol=1e-12, atol=0)
    assert clipped.verify()
    assert torch.equal(pm(x), plain(x))


@pytest.mark.long
def test_parameters_stay_the_same_tensors() -> None:
    pm = small_plan(KINDS["AdamW"], MESHES["dp2"])
    before = {id(p): p._version for p in pm.parameters()}
    pm.step(*batches(1)[0])
    assert {id(p) for p in pm.parameters()} == set(before)
    assert all(p._version > before[id(p)] and p.grad is None for p in pm.parameters())


Factory = Callable[[Any], Any]


class Kernels(TorchDispatchMode):
    """Counts what is dispatched, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns
        views = returns and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)
        self.seen.update([] if views else [str(func)])
        return func(*args, **(kwargs or {}))


def dispatched(call: Callable[[], Any]) -> Counter[str]:
    """The kernels of a call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a mode sees the ranks' ops
        with Kernels() as kernels:
            call()
    return kernels.seen


def small() -> nn.Module:
    """Three layers, in float32."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def squared(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The squared error in float32, of results in any dtype."""
    return F.mse_loss(out.float(), y)


def plan(mesh: sx.Mesh, optimizer: Factory | None, **hints: Any) -> sx.ParallelModule:
    batch = {"args": (torch.rand(12, 6),), "targets": (torch.rand(12, 4),), "loss": squared}
    specs = {"args.0": "dp, -"} if "dp" in mesh.names else {}
    return sx.parallelize(small(), mesh, sx.Hints(**batch, specs=specs, optimizer=optimizer, zero_min_numel=0, **hints))


FACTORIES: dict[str, Factory] = {
    "AdamW": lambda ps: optim.AdamW(ps, lr=1e-3),
    "amsgrad": lambda ps: optim.Adam(ps, lr=1e-3, amsgrad=True, weight_decay=0.1),
    "momentum": lambda ps: optim.SGD(ps, lr=1e-3, momentum=0.9),
}
FUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("dp2", "AdamW", {}),
    ("one", "AdamW", {"clip_grad_norm": 0.1}),
    ("dp2", "AdamW", {"zero": 3, "clip_grad_norm": 0.1}),
    ("dp2", "AdamW", {"mixed_precision": torch.bfloat16, "zero": 1}),
    ("dp2", "momentum", {}),
    ("dp2", "amsgrad", {"zero": 1}),
]
MORE = {"one": sx.Mesh(dp=1)}


@pytest.mark.long
@pytest.mark.parametrize(("mesh", "kind", "hints"), FUSED, ids=str)
def test_an_update_dispatches_at_most_three_kernels(mesh: str, kind: str, hints: dict[str, Any]) -> None:
    ranks, factory = (MESHES | MORE)[mesh], FACTORIES[kind]
    x, y = torch.rand(12, 6), torch.rand(12, 4)
    stepped, graded = plan(ranks, factory, **hints), plan(ranks, None, **hints)
    for _ in range(2):
        stepped.step(x, y)
        graded(x, y)
    step, forward_and_backward = dispatched(lambda: stepped.step(x, y)), dispatched(lambda: graded(x, y))
    more = step.total() - forward_and_backward.total()
    parameters = len(list(small().parameters()))
    assert sum(count for name, count in step.items() if "_fused_" in name) >= ranks.size, step
    assert more <= 3 * parameters * ranks.size, (step - forward_and_backward, more)
    assert stepped.verify(), stepped.verify().why


FLAGGED: dict[str, Factory] = {
    "_fused_adamw_ wide": lambda ps: optim.AdamW(
        ps, lr=1e-2, betas=(0.7, 0.8), eps=1e-4, weight_decay=0.3, amsgrad=True, maximize=True
    ),
    "_fused_adam_ maximize decays": lambda ps: optim.Adam(ps, lr=1e-2, weight_decay=0.1, maximize=True),
    "_fused_sgd_ maximize": lambda ps: optim.SGD(ps, lr=1e-2, momentum=0.8, nesterov=True, maximize=True),
}


@pytest.mark.long
@pytest.mark.parametrize("name", FLAGGED)
def test_steps_of_fused_kernels_are_those_of_one_device(name: str) -> None:
    """What torch traces of each optimizer is what its kernel stands for, whatever the user's own uses."""
    pm = small_plan(FLAGGED[name], MESHES["dp2"])
    losses, params, _ = alone(FLAGGED[name], 4)
    off: list[float] = []
    seen = dispatched(lambda: off.append(apart(pm, losses, params)))
    assert off[0] < 1e-12
    assert {kernel.split(".")[1] for kernel in seen if "_fused_" in kernel} == {name.split()[0]}


@pytest.mark.long
@pytest.mark.parametrize(("mesh", "zero"), [("one", 0), ("dp2", 1)])
def test_parameters_of_16_bits_are_stepped_by_the_fused_kernel(mesh: str, zero: int) -> None:
    """It computes in float32 and rounds once, as torch's ``fused=True``; the captured calls round each result."""
    x, y = torch.rand(12, 6).bfloat16(), torch.rand(12, 4).bfloat16()
    model, ranks = small().bfloat16(), (MESHES | MORE)[mesh]
    specs = {"args.0": "dp, -"} if mesh == "dp2" else {}
    hints = sx.Hints(
        (x,), targets=(y,), loss=F.mse_loss, specs=specs, optimizer=FACTORIES["AdamW"], zero=zero, zero_min_numel=0
    )
    pm = sx.parallelize(model, ranks, hints)
    own = optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for _ in range(3):
        own.zero_grad()
        F.mse_loss(model(x), y).backward()
        own.step()
        seen = dispatched(lambda: pm.step(x, y))
    assert seen["aten._fused_adamw_.tensor_lr"] >= ranks.size and not seen["aten.addcdiv.out"]
    assert pm.verify()
    for name, value in pm.full_state_dict().items():
        assert (value - model.get_parameter(name)).abs().max() < 5e-3


def test_run_on_random_numbers_agrees_for_a_kernel_that_takes_steps_in_float32() -> None:
    model, x, y = nn.Linear(8, 4).double(), torch.randn(8, 8, dtype=torch.float64), torch.randint(4, (8,))
    hints = sx.Hints(args=(x,), targets=(y,), loss=F.cross_entropy, optimizer=optim.AdamW, specs={"args.0": "dp, -"})
    assert sx.parallelize(model, MESHES["dp2"], hints, virtual=True).verify(run=True)
