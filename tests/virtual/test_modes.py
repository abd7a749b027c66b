"""Dropout draws by seed and box; evaluation is another program on the same shards."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shardfx as sx
from tests.plans import MESHES, plan
from tests.reference import rel_err
from tests.zoo import make


class Drops(nn.Module):
    """Dropout of ones, so that the result *is* the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(16, dtype=torch.float64))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(x * self.w)


def masks(seed: int, spec: str) -> torch.Tensor:
    x = torch.ones(8, 16, dtype=torch.float64)
    pm = sx.parallelize(Drops(), sx.Mesh(dp=2, tp=2), sx.Hints(args=(x,), specs={"args.0": spec}))
    torch.manual_seed(seed)
    return pm(x)


def test_shards_differ() -> None:
    mask = masks(0, "dp, tp") != 0
    shards = [mask[r : r + 4, c : c + 8] for r in (0, 4) for c in (0, 8)]
    for i, shard in enumerate(shards):
        assert 0 < shard.float().mean() < 1
        assert not any(torch.equal(shard, other) for other in shards[:i])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["dropout_mlp", "hf_gpt2_dropout"])
def test_replicas_agree(name: str) -> None:
    """Every replica of a value is the same on all ranks that hold it: gradients too, dropout or not."""
    case = make(name)
    pm = plan(case, MESHES["dp2tp2"])
    torch.manual_seed(0)
    first = pm(*case.args, *case.targets)
    first.backward()
    grads = pm.full_grads()
    pm.zero_grad()
    torch.manual_seed(0)
    again = pm(*case.args, *case.targets)
    again.backward()
    assert torch.equal(first, again)
    assert all(torch.equal(grads[k], v) for k, v in pm.full_grads().items())
    torch.manual_seed(1)
    assert not torch.equal(first, pm(*case.args, *case.targets))


@pytest.mark.long
@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["dropout_mlp", "resnet"])
def test_evaluation_equals_one_device(name: str) -> None:
    case = make(name)
    alone = copy.deepcopy(case.model).eval()
    pm = plan(case, MESHES["dp2tp2"])
    pm.eval()
    with torch.no_grad():
        assert rel_err(pm(*case.args), alone(*case.args)) < 1e-9
        assert rel_err(pm(*case.args, *case.targets), case.loss(alone(*case.args), *case.targets)) < 1e-9
    pm.train()
    before = {k: v.clone() for k, v in pm.full_state_dict().items()}
    pm(*case.args, *case.targets).backward()
    moved = [k for k, v in pm.full_state_dict().items() if not torch.equal(v, before[k])]
    assert bool(moved) == (name == "resnet")


def test_results_need_no_target_that_would_travel_with_an_argument() -> None:
    """Both ids are gathered, and are coalesced where there is a loss."""
    model = nn.Sequential(nn.Embedding(12, 6), nn.Linear(6, 5))
    x, y = torch.arange(20).view(4, 5) % 12, torch.ones(4, 5, dtype=torch.int64)
    hints = sx.Hints((x,), loss=lambda out, t: (out.sum(-1) * t).sum(), targets=(y,), specs={"args.0": "-, a"})
    pm = sx.parallelize(model, sx.Mesh(a=2), hints)
    with torch.no_grad():
        assert torch.allclose(pm(x), model(x))


class Fused(nn.Module):
    """Three products in one, of which two are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 36), nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).split(12, -1)
        return self.out(q * k + v)


@pytest.mark.long
@pytest.mark.parametrize(
    ("specs", "weight", "bias"),
    [
        ({"qkv.weight": "b a, -"}, "[.{b,a}, .]", "[.{a}]"),  # eight ranks have no third of twelve rows each
        ({"*kv.weight": "a, -"}, "[(3 12{a}), .]", "[(3 12{a})]"),  # the pattern says it in words, the mode exactly
    ],
)
def test_the_other_mode_and_a_plan_store_a_fused_layer_as_it_is(specs: dict[str, str], weight: str, bias: str) -> None:
    torch.manual_seed(0)
    x, mesh = torch.randn(4, 6, dtype=torch.float64), sx.Mesh(a=4, b=2)
    model = Fused().double()
    alone = copy.deepcopy(model)

    def planned(specs: dict[str, object]) -> sx.ParallelModule:
        hints = sx.Hints(args=(x,), loss=lambda out: (out**2).sum(), specs=specs)
        return sx.parallelize(copy.deepcopy(alone), mesh, hints, virtual=True)

    pm = planned({"args.0": "b, -", **specs})
    again = planned(pm.plan.specs)  # type: ignore[arg-type]
    for each in (pm, again):
        assert [str(each.planned.input(f"qkv.{name}").value.spec) for name in ("weight", "bias")] == [weight, bias]
    pm.eval()
    with torch.no_grad():
        torch.testing.assert_close(pm(x), (alone(x) ** 2).sum())


class Asks(nn.Module):
    """One thing where gradients are wanted, and another where they are not."""

    def __init__(self, of_torch: bool) -> None:
        super().__init__()
        self.lin, self.of_torch = nn.Linear(4, 4, dtype=torch.float64), of_torch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.lin(x)
        return h * 2 if (torch.is_grad_enabled() if self.of_torch else h.requires_grad) else h.sin()


@pytest.mark.parametrize("of_torch", [True, False])
@pytest.mark.parametrize("trains", [True, False])
def test_a_model_may_ask_whether_gradients_are_wanted(of_torch: bool, trains: bool) -> None:
    model, (x, y) = Asks(of_torch), torch.randn(2, 6, 4, dtype=torch.float64).unbind()
    loss = nn.functional.mse_loss
    told = sx.Hints(args=(x,), loss=loss if trains else None, targets=(y,) if trains else (), specs={"args.0": "dp, -"})
    pm = sx.parallelize(copy.deepcopy(model), sx.Mesh(dp=2), told, virtual=True)
    for _ in range(2):
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode():
                assert torch.allclose(pm(x), model(x))
                assert not trains or torch.allclose(pm(x, y), loss(model(x), y))
    assert pm.verify()
