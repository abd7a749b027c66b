"""Dropout draws by seed and box; random numbers in the forward; evaluation is another program on the same shards."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardfx as sx
from tests.plans import MESHES, plan
from tests.reference import rel_err
from tests.zoo import make


@pytest.mark.long
def test_dropout_is_the_same_by_seed() -> None:
    """Every replica of a value is the same on all ranks that hold it: gradients too, dropout or not."""
    case = make("hf_gpt2_dropout")
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
def test_evaluation_and_a_saved_plan_store_a_fused_layer_alike(specs: dict[str, str], weight: str, bias: str) -> None:
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


F64 = torch.float64
X = torch.linspace(-1, 1, 64 * 32, dtype=F64).view(64, 32)
SPECS = {"one": {}, "both": {"args.0": "dp, tp"}}


class Drawing(nn.Module):
    """Draws something of the size of its input."""

    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight, self.draw = nn.Parameter(torch.ones(32, dtype=F64)), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.draw(x) * self.weight


def dropped(x: torch.Tensor) -> torch.Tensor:
    """Drop-path as timm has it, then as Hugging Face's models do."""
    first = x.new_empty(x.shape[0], 1).bernoulli_(0.75).div_(0.75)
    return x * first * (0.5 + torch.rand(x.shape[0], 1, dtype=x.dtype)).floor_().div(0.5)


DRAWS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], float, float]] = {
    "dropout": (lambda x: F.dropout(torch.ones_like(x), 0.5), 1.0, 1.0),
    "rand_like": (lambda x: torch.rand_like(x, dtype=torch.float32).double(), 0.5, 1 / 12),
    "uniform_": (lambda x: torch.empty_like(x).uniform_(-1, 3), 1.0, 16 / 12),
    "normal_": (lambda x: torch.empty_like(x).normal_(1, 2), 1.0, 4.0),
    "exponential_": (lambda x: torch.empty_like(x).exponential_(2.0), 0.5, 0.25),
    "rrelu": (lambda x: F.rrelu(-torch.ones_like(x), 1, 4, training=True), -2.5, 0.75),
    "bernoulli_ of a tensor": (lambda x: torch.empty_like(x).bernoulli_(torch.full_like(x, 0.3)), 0.3, 0.21),
}


def planned(draw: Callable[[torch.Tensor], torch.Tensor], sharding: str) -> sx.ParallelModule:
    mesh = sx.Mesh(dp=1) if sharding == "one" else sx.Mesh(dp=2, tp=2)
    hints = sx.Hints(args=(X,), loss=lambda out, y: (out * y).sum(), targets=(X,), specs=SPECS[sharding])
    return sx.parallelize(Drawing(draw), mesh, hints)


def drawn(pm: sx.ParallelModule, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    with torch.no_grad():
        out: torch.Tensor = pm(X)
    return out


@pytest.mark.long
@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_have_mean_and_variance_and_follow_the_seed(name: str) -> None:
    """Mean and variance, within five standard errors of 2048 numbers."""
    draw, mean, variance = DRAWS[name]
    pm = planned(draw, "both")
    out = drawn(pm, 0)
    assert abs(float(out.mean()) - mean) < 5 * (variance / out.numel()) ** 0.5
    assert abs(float(out.var()) / variance - 1) < 0.3
    assert not torch.equal(out, drawn(pm, 1)) and torch.equal(out, drawn(pm, 0))
    assert torch.equal(out, drawn(planned(draw, "one"), 0)), "another sharding draws the same"


@pytest.mark.long
def test_drop_path_trains_as_it_was_drawn() -> None:
    pm = planned(dropped, "both")
    torch.manual_seed(3)
    loss, out = pm(X, X, with_results=True)
    loss.backward()
    torch.testing.assert_close(loss.detach(), (out * X).sum().detach())
    torch.testing.assert_close(pm.full_grads()["weight"], (out * X).sum(0).detach())
    kept = (out.detach() / X)[:, 0].round(decimals=6)
    assert {float(each) for each in kept.unique()} == {0.0, round(1 / 0.375, 6)} and pm.verify()
    alone = planned(dropped, "one")
    torch.manual_seed(3)
    assert torch.equal(out, alone(X, X, with_results=True)[1])


@pytest.mark.long
def test_draws_of_equal_blocks_are_independent() -> None:
    """Also those of equal blocks, of which few are traced."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32, dtype=F64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.randn_like(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(Noisy() for _ in range(12)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks(x) - x

    pm = sx.parallelize(Net(), sx.Mesh(dp=2), sx.Hints(args=(X,), specs={"args.0": "dp, -"}))
    out = drawn(pm, 0)
    assert 10 < float(out.var()) < 14.5, "the variances of independent numbers add up"
