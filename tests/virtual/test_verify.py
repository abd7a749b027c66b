"""Correct programs verify: the proof finds no fault in any plan of any model, and no number differs."""

from __future__ import annotations

import pytest
import torch

import shardfx as sx
from tests.plans import MESHES, plan
from tests.zoo import CASES, make

QUICK = {("dp2tp2", name) for name in ("mlp3", "dropout_mlp")}
QUICK |= {("tp2", "moe_loop")}
ALL = [
    pytest.param(mesh, name, marks=() if (mesh, name) in QUICK else pytest.mark.slow)
    for mesh in MESHES
    for name in CASES
]


@pytest.mark.long
@pytest.mark.parametrize(("mesh", "name"), ALL)
def test_the_plan_of_a_case_verifies(mesh: str, name: str) -> None:
    pm = plan(make(name), MESHES[mesh])
    for verdict in (pm.verify(), pm.verify(run=True)):
        assert verdict, verdict.why
        assert verdict.checked["ranks"] == pm.mesh.size


def test_an_unknown_rank_is_an_error() -> None:
    pm = plan(make("mlp3"), MESHES["dp2"])
    with pytest.raises(sx.Error, match="no rank 7"):
        pm.verify({7: pm.rank_module(0)})


def test_running_a_model_that_is_too_large_is_an_error() -> None:
    model = torch.nn.Linear(2**14, 2**13, device="meta")
    hints = sx.Hints(args=(torch.empty(4, 2**14, device="meta"),), specs={"weight": "tp, -"})
    pm = sx.parallelize(model, MESHES["tp2"], hints)
    assert pm.verify()
    with pytest.raises(sx.Error, match="too large to be run here") as error:
        pm.verify(run=True)
    assert "8192, 16384" in str(error.value) and "remedy" in str(error.value)
