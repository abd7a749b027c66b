"""What a plan sends and computes twice: collectives of Megatron blocks, partial sums, redundant compute."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from shardfx.ir.graph import op_name
from tests.models import MLP3
from tests.plans import plan
from tests.reference import check_step
from tests.zoo import make


def large_collectives(pm: sx.ParallelModule) -> Counter[tuple[str, str]]:
    """How many collectives over tp move a whole activation, by kind and phase."""
    counts: Counter[tuple[str, str]] = Counter()
    for node in pm.planned.nodes:
        large = str(node.op).startswith("comm.") and node.operands[0].type.numel >= 8 * 16 * 48
        if large and node.kwargs["axes"] == ["tp"]:
            counts[str(node.op), node.phase.value] += 1
    return counts


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt_fused", "hf_llama"])
def test_a_megatron_block_has_two_all_reduces_forward_and_two_backward(name: str) -> None:
    counts = large_collectives(plan(make(name), sx.Mesh(dp=2, tp=2)))
    layers = 2
    # one more forward: the vocabulary-parallel embedding; one more backward: the head's input
    assert counts["comm.all_reduce", "forward"] == 2 * layers + 1
    assert counts["comm.all_reduce", "backward"] == 2 * layers + 1
    assert set(counts) == {("comm.all_reduce", "forward"), ("comm.all_reduce", "backward")}


@pytest.mark.long
def test_with_sequence_parallelism_they_become_reduce_scatters_and_all_gathers() -> None:
    counts = large_collectives(plan(make("llama"), sx.Mesh(dp=2, tp=2), sequence=True))
    layers = 2
    for kind in ("comm.reduce_scatter", "comm.all_gather"):
        assert counts[kind, "forward"] == 2 * layers + 1
        assert counts[kind, "backward"] == 2 * layers + 1
    assert not counts["comm.all_reduce", "forward"] and not counts["comm.all_reduce", "backward"]


def test_the_published_propagation_example() -> None:
    """First matmul sharded ((2,1),(1,4)): bias add ((2,4),(4)), ReLU ((2,4)), second matmul ((2,4),(4,1))."""
    model = MLP3().double()
    x = torch.randn(8, model.fc1.in_features, dtype=torch.float64)
    y = torch.randint(0, model.fc3.out_features, (8,))
    specs = {"args.0": "dp, -", "fc1.weight": "tp, -"}
    pm = sx.parallelize(
        model, sx.Mesh(dp=2, tp=4), sx.Hints(args=(x,), loss=F.cross_entropy, targets=(y,), specs=specs)
    )

    def first(op: str, module: str = "") -> sx.ir.graph.Node:  # type: ignore[name-defined]
        return next(n for n in pm.planned.nodes if str(n.op).startswith(op) and n.where.module.startswith(module))

    linear = first("aten.addmm", "fc1")
    bias, left, right = linear.strategy.operands
    assert (str(left), str(right)) == ("[.{dp}, .]", "[., .{tp}]")
    assert str(bias) == "[.{tp}]"
    assert str(linear.strategy.results[0]) == "[.{dp}, .{tp}]"
    assert str(first("aten.relu").strategy.operands[0]) == "[.{dp}, .{tp}]"
    left, right = first("aten.mm", "fc2").strategy.operands
    assert (str(left), str(right)) == ("[.{dp}, .{tp}]", "[.{tp}, .]")


def test_a_stored_placement_with_more_axes_is_gathered_at_use_and_its_gradient_scattered() -> None:
    case = make("mlp3")
    pm = plan(case, sx.Mesh(dp=4), specs={"**.weight": "dp, -"}, bucket_mb=0)
    kinds = Counter(str(n.op) for n in pm.planned.nodes if str(n.op).startswith("comm."))
    assert kinds["comm.all_gather"] == 3
    assert kinds["comm.reduce_scatter"] == 3
    gathered = {n.operands[0].name for n in pm.planned.nodes if str(n.op) == "comm.all_gather"}
    assert gathered == {"fc1.weight", "fc2.weight", "fc3.weight"}


class Layers(nn.Module):
    def __init__(self, mixed: bool) -> None:
        super().__init__()
        self.first, self.second, self.mixed = nn.Linear(8, 8), nn.Linear(8, 8), mixed

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(torch.sort(y, 0)[0] if self.mixed else y)


def planned(rows: int, mixed: bool) -> sx.ParallelModule:
    hints = sx.Hints(args=(torch.zeros(rows, 8),), specs={"args.0": "dp, -"}, loss=torch.sum)
    return sx.parallelize(Layers(mixed), sx.Mesh(dp=3), hints, virtual=True)


def test_batches_that_do_not_feed_all_ranks_evenly_warn() -> None:
    with pytest.warns(sx.ShardfxWarning, match=r"compute over dp \(3 ranks\).* begins at aten.addmm \(first "):
        planned(2, mixed=False)
    with pytest.warns(sx.ShardfxWarning, match="which dp shards unevenly"):
        pm = planned(4, mixed=False)
    shapes = [pm.rank_program(rank).inputs[-1].value.spec for rank in range(3)]
    assert [spec.local_shape((4, 8), pm.mesh, pm.mesh.coords(r)) for r, spec in enumerate(shapes)] == [
        (2, 8),
        (1, 8),
        (1, 8),
    ]


def test_batch_is_sharded_again_behind_an_op_that_needs_all_of_it() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pm = planned(6, mixed=True)
    products = [node for node in pm.planned.nodes if node.where.module == "second" and op_name(node.op) == "aten.addmm"]
    assert [node.strategy.shardings for node in products] == [(("m", ("dp",)),)]


Added = Callable[[Tensor, Tensor, Tensor], Tensor]


class Adds(nn.Module):
    def __init__(self, added: Added) -> None:
        super().__init__()
        self.w, self.v = (nn.Parameter(torch.randn(8, 6, dtype=torch.float64)) for _ in range(2))
        self.register_buffer("places", torch.tensor([1, 0, 2, 1, 3, 0, 1, 1]))
        self.added = added

    def forward(self, x: Tensor) -> Tensor:
        return self.added(x @ self.w, self.places, self.v)


ADDED: dict[str, Added] = {
    "index_add": lambda y, to, v: torch.index_add(y, 0, to, v, alpha=2),
    "scatter_add": lambda y, to, v: torch.scatter_add(torch.cat([y, y]), 0, to[:, None].expand(8, 6), v),
    "index_put": lambda y, to, v: torch.index_put(y, (to,), v, accumulate=True),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ADDED)
def test_partial_sum_with_additions_in_place_is_reduced_once(name: str) -> None:
    torch.manual_seed(0)
    model, x = Adds(ADDED[name]), torch.randn(4, 8, dtype=torch.float64)
    hints = sx.Hints(args=(x,), specs={"args.0": "-, tp", "w": "tp, -", "v": "tp, -"}, loss=lambda y: (y**2).sum())
    pm = sx.parallelize(model, sx.Mesh(tp=2), hints)
    forward = [node for node in pm.planned.nodes if node.phase.name == "FORWARD" and str(node.op).startswith("comm.")]
    assert len(forward) == 1, pm.planned
    check_step(pm, model, lambda y: (y**2).sum(), (x,), bound=1e-12)
