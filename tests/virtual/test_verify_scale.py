"""The proof for many ranks: equal ops once, equal ranks once; what is wrong on any rank is found all the same."""

from __future__ import annotations

import pytest
import torch

import shardfx as sx
from benchmarks.mutants import planned
from shardfx.runtime.verify.families import many_ranks
from shardfx.runtime.verify.families.equal_shards import equal_shards
from tests.captures import captured_once
from tests.zoo import make


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small meshes are treated as large ones."""
    monkeypatch.setattr(many_ranks, "EVERY", 1)


def boxes_of(pm: sx.ParallelModule) -> list[int]:
    """How many ranks hold as much."""
    alike = equal_shards(pm.planned)
    assert alike is not None
    return [len(box) for box in alike.boxes]


@pytest.mark.long
@pytest.mark.usefixtures("few")
def test_an_even_plan_is_proven_from_few_programs() -> None:
    pm = planned("dropout_mlp@dp2tp2")
    assert boxes_of(pm) == [pm.mesh.size]
    verdict = pm.verify()
    assert verdict, verdict.why
    kinds = len(verdict.programs)
    assert verdict.checked["whole programs"] == 2 * kinds
    assert verdict.checked["programs read"] == kinds * pm.mesh.size


@pytest.mark.long
def test_many_ranks() -> None:
    """16 x 4 ranks, whose programs are written and read as one."""
    case = make("mlp3")
    specs = {"args.0": "dp, -", "targets.0": "dp", **case.megatron_specs}
    x, y = case.args[0].repeat(2, 1), case.targets[0].repeat(2)
    hints = sx.Hints(args=(x,), loss=case.loss, targets=(y,), specs=specs)
    with captured_once(case.name):
        pm = sx.parallelize(case.model, sx.Mesh(dp=16, tp=4), hints)
    verdict = pm.verify()
    assert verdict, verdict.why
    kinds = len(verdict.programs)
    assert kinds == 3 and verdict.checked["programs read"] == 64 * kinds and verdict.checked["families"] == kinds
    changed = pm.rank_module(37)
    relu = next(node for node in changed.graph.nodes if "relu" in node.name)
    relu.replace_all_uses_with(relu.args[0])
    refused = pm.verify({37: changed})
    assert not refused and refused.fault is not None and refused.fault.rank == 37
    assert refused.fault.node == "mm" and "fc2" in refused.fault.where


@pytest.mark.long
def test_a_vocabulary_parallel_embedding_on_many_ranks() -> None:
    """Each rank shifts indices by a number of its own: they still run one program, written once."""
    model = torch.nn.Sequential(torch.nn.Embedding(64, 6), torch.nn.ReLU(), torch.nn.Linear(6, 4))
    x = torch.randint(0, 64, (32,))
    hints = sx.Hints(args=(x,), loss=torch.sum, specs={"args.0": "dp", "0.weight": "tp, -"})
    verdict = sx.parallelize(model, sx.Mesh(dp=8, tp=4), hints, virtual=True).verify()
    assert verdict, verdict.why
    assert verdict.checked["families"] == len(verdict.programs)


@pytest.mark.long
def test_many_ranks_that_do_not_divide_the_batch() -> None:
    """39 rows on 16 ranks: nearly all hold 3, the last ones nothing."""
    case = make("mlp3")
    x, y = case.args[0].repeat(5, 1)[:39], case.targets[0].repeat(5)[:39]
    specs = {"args.0": "dp, -", "targets.0": "dp", **case.megatron_specs}
    hints = sx.Hints(args=(x,), loss=case.loss, targets=(y,), specs=specs)
    with captured_once(case.name):
        pm = sx.parallelize(case.model, sx.Mesh(dp=16, tp=4), hints)
    boxes = boxes_of(pm)
    assert sum(boxes) == 64 and 1 < len(boxes) < 4
    verdict = pm.verify()
    assert verdict, verdict.why
    assert verdict.checked["programs read"] == 64 * len(verdict.programs)
    for rank in (0, 29, 53):
        changed = pm.rank_module(rank)
        node = next(n for n in changed.graph.nodes if n.target is torch.ops.aten.relu.default)
        node.target = torch.ops.aten.tanh.default
        refused = pm.verify(modules={rank: changed})
        assert not refused and refused.fault is not None and refused.fault.rank == rank
