"""The loop that everyone already writes, and its variations."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.placement_types import Replicate, Shard

import shardfx as sx
from shardfx.ir.dim_sharding import DimSharding
from tests.plans import MESHES, plan
from tests.reference import check_step, rel_err
from tests.zoo import make


def test_two_losses_in_one_backward() -> None:
    """Gradients that are there before ``backward`` are scaled and added as autograd would."""
    case, alone = make("mlp3"), make("mlp3").model
    pm = plan(case, MESHES["dp2tp2"])
    (x,), (y,) = case.args, case.targets
    first, second = pm(x, y), pm(2 * x, y)
    (first + 3 * second).backward()
    (case.loss(alone(x), y) + 3 * case.loss(alone(2 * x), y)).backward()
    grads = pm.full_grads()
    assert all(rel_err(grads[n], p.grad) < 1e-9 for n, p in alone.named_parameters())


@pytest.mark.long
def test_gradients_accumulate_over_calls() -> None:
    case, alone = make("gpt_fused"), make("gpt_fused").model
    pm = plan(case, MESHES["dp2tp2"])
    for _ in range(2):
        pm(*case.args, *case.targets).backward()
        case.loss(alone(*case.args), *case.targets).backward()
    grads = pm.full_grads()
    assert all(rel_err(grads[n], p.grad) < 1e-9 for n, p in alone.named_parameters())


def test_parameters_are_the_distinct_shards_each_once() -> None:
    case = make("gpt_fused")
    pm = plan(case, MESHES["dp2tp2"])
    assert sum(p.numel() for p in pm.parameters()) == sum(p.numel() for p in case.model.parameters())


@pytest.mark.parametrize(
    "hint",
    ["-, tp", sx.Spec((DimSharding(), DimSharding(("tp",)))), [Replicate(), Shard(1)]],
    ids=["text", "Spec", "placements"],
)
def test_hints_in_their_three_forms(hint: object) -> None:
    x, y = torch.randn(8, 6), torch.randint(0, 5, (8,))
    model = nn.Linear(6, 5)
    specs = {"args.0": "dp, -", "weight": hint}
    pm = sx.parallelize(
        copy.deepcopy(model), sx.Mesh(dp=2, tp=2), sx.Hints(args=(x,), loss=F.cross_entropy, targets=(y,), specs=specs)
    )
    assert str(pm.planned.input("weight").value.spec) == "[., .{tp}]"
    assert rel_err(pm(x, y), F.cross_entropy(model(x), y)) < 1e-6


@pytest.mark.parametrize("sizes", [(7, 5, 3), (9, 6, 5)])
def test_sizes_that_do_not_divide(sizes: tuple[int, int, int]) -> None:
    batch, hidden, classes = sizes
    x, y = torch.randn(batch, 6).double(), torch.randint(0, classes, (batch,))
    model = nn.Sequential(nn.Linear(6, hidden), nn.ReLU(), nn.Linear(hidden, classes)).double()
    alone = copy.deepcopy(model)
    specs = {"args.0": "dp, -", "0.weight": "tp, -", "2.weight": "-, tp"}
    pm = sx.parallelize(
        model, sx.Mesh(dp=2, tp=3), sx.Hints(args=(x,), loss=F.cross_entropy, targets=(y,), specs=specs)
    )
    check_step(pm, alone, F.cross_entropy, (x,), (y,))
