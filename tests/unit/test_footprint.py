"""Footprints: what a program holds, call by call, against real runs; destinations; what is sent, against counts."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import fx

import shardfx as sx
from shardfx.ir.cost.amounts import total
from shardfx.ir.cost.footprint import Footprint
from shardfx.ir.cost.node_cost import NodeCosts, node_cost
from shardfx.ir.cost.replay import replay
from shardfx.ir.graph import OutputKind
from shardfx.ir.ops import memory_ops
from shardfx.ir.ops.sends import Sent
from shardfx.ir.program.lower import lower
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.rulebook import default_rules
from shardfx.ir.text.parser import parse_graph
from shardfx.module.programs import TRAIN
from tests.collective_counts import count_collectives
from tests.live_memory import check_footprint, held_in_a_step
from tests.plans import MESHES, plan
from tests.rank_programs import Call, Write, written
from tests.zoo import make

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def running(pm: sx.ParallelModule, rank: int = 0) -> RankProgram:
    """What the rank runs."""
    return pm.rank_program(rank)


def lowered(pm: sx.ParallelModule, rank: int = 0) -> RankProgram:
    """The program before any rank pass."""
    return lower(pm.planned, rank, pm._compiled.context.rules, TRAIN)


# ---- against a run

STORED = {"**.weight": "dp, -"}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sequence": ("gpt_fused", "dp2tp2", {"sequence": True}),
    "stored": ("mlp3", "dp2", {"specs": STORED}),
    "resnet": ("resnet", "dp2tp2", {}),
}


@cache
def planned(case: str) -> sx.ParallelModule:
    name, mesh, hints = CASES[case]
    return plan(make(name), MESHES[mesh], **hints)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_every_call_holds_what_a_run_holds(case: str) -> None:
    given, pm = make(CASES[case][0]), planned(case)
    held = held_in_a_step(pm, given)
    assert len(held) == pm.mesh.size
    for rank in (0, pm.mesh.size - 1):
        found = check_footprint(running(pm, rank), held[rank])
        assert rank or pm.report().memory.footprint.peak == found.peak


@pytest.mark.long
@pytest.mark.parametrize("case", ["sequence", "resnet"])
def test_what_is_sent_is_what_a_run_counts(case: str) -> None:
    """By axes, in bytes, padding included."""
    given, pm = make(CASES[case][0]), planned(case)
    with count_collectives() as counts:
        pm(*given.args, *given.targets, **given.kwargs)
    counted: dict[tuple[str, ...], float] = {}
    for (_, group), count in counts.items():
        if group.endswith("@0"):
            axes = pm.mesh.group_axes(group)
            counted[axes] = counted.get(axes, 0.0) + count.nbytes
    sent = {axes: one.nbytes for axes, one in replay(running(pm)).cost.sent.items()}
    assert sent == pytest.approx(counted) and sum(sent.values()) > 0


# ---- prices


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_the_prices_of_the_nodes_are_the_cost_of_the_program(case: str) -> None:
    pm = planned(case)
    prices = NodeCosts(pm.planned.mesh, pm._compiled.context.rules)
    added, cost = total(prices.of(node) for node in pm.planned.nodes), replay(lowered(pm)).cost
    assert added.flops == cost.flops > 0 and added.sent == cost.sent
    assert added.touched == pytest.approx(cost.touched, rel=0.15), "operands are not always dense"
    assert len(prices) < len(pm.planned.nodes)


def test_a_node_is_priced_by_its_strategy_before_communication_is_explicit() -> None:
    """The operands are what the node needs them to be, however they are held."""
    graph = parse_graph("""
mesh dp=2, tp=4
established SHARDED
argument %x : f32[64{dp}, 32]
parameter %w : f32[32, 16]
forward:
  %0 = aten.mm(%x, %w) : f32[64{dp}, 16] +{tp}  shards m{dp} k{tp}  needs [64{dp}, 32{tp}], [32{tp}, 16]
outputs:
  result results.0 = %0
""")
    (node,) = graph.nodes
    found = node_cost(node, graph.mesh, default_rules())
    assert found.flops == 2 * 32 * 8 * 16 and found.touched == 4 * (32 * 8 + 8 * 16 + 32 * 16) and not found.sent


# ---- destinations: programs that say where results go


def replayed(write: Write) -> Footprint:
    """What a program on two inputs of f32[8, 8] holds and does."""
    return replay(written(write, shape=(8, 8), gives=OutputKind.RESULT))


def test_a_bucket_is_allocated_once_and_written_in_place() -> None:
    def write(call: Call, x: fx.Node, y: fx.Node) -> list[fx.Node]:
        flat = call(memory_ops.empty, [128], torch.float32)
        first = call(memory_ops.part, flat, 1, 0, [8, 8])
        made = call(aten.mm.out, x, y, out=first)
        second = call(memory_ops.part, flat, 1, 64, [8, 8])
        total = call(aten.add.Tensor, x, y)
        written = call(memory_ops.write, second, total)
        whole = call(memory_ops.join, flat, [made, written], 1)
        reduced = call(memory_ops.all_reduce_, whole, "sum", "dp2/dp@0")
        return [call(c10d.wait_tensor.default, reduced)]

    found = replayed(write)
    flat, total = 128 * 4, 64 * 4
    assert [s.nbytes for s in found.storages] == [flat, total]
    assert found.live == (flat, flat, flat, flat, flat + total, flat + total, flat, flat, flat)
    assert found.live[[call.name for call in found.calls].index("write")] == flat + total
    assert found.cost.touched == 3 * total + 3 * total + 2 * total, "the product, the sum, the copy"
    assert found.cost.flops == 2 * 8**3 and found.cost.sent == {("dp",): Sent(2.0, float(flat))}
    assert found.storages[0].category == "results" and found.peak.of("temporaries") == total


def test_memory_goes_behind_the_last_use_of_any_view_of_it() -> None:
    def write(call: Call, x: fx.Node, y: fx.Node) -> list[fx.Node]:
        a = call(aten.add.Tensor, x, y)
        view = call(aten.t.default, a)
        b = call(aten.relu.default, x)
        c = call(aten.mul.Tensor, b, view)
        return [call(aten.neg.default, c)]

    found, one = replayed(write), 8 * 8 * 4
    assert found.live == (one, one, 2 * one, 3 * one, 2 * one)
    assert found.peak.nbytes == 3 * one and found.cost.touched == (3 + 0 + 2 + 3 + 2) * one


def test_what_only_looks_is_not_run() -> None:
    """A user's rank pass may put functions into programs that note something."""
    seen = []

    @sx.observes
    def noted(x: torch.Tensor, name: str) -> torch.Tensor:
        seen.append(name)
        return x

    found = replayed(lambda call, x, y: [call(noted, call(aten.neg.default, x), "a")])
    assert not seen and [s.nbytes for s in found.storages] == [8 * 8 * 4]


# ---- categories


@pytest.mark.long
def test_stored_parameters_that_were_made_whole_are_a_category_of_their_own() -> None:
    storages = replay(lowered(planned("stored"))).storages
    weights = sum(p.numel() * 8 for n, p in make("mlp3").model.named_parameters() if n.endswith("weight"))
    assert sum(each.nbytes for each in storages if each.category == "gathered parameters") >= weights
    assert {"gradients", "results", "activations", "communication buffers", "temporaries"} <= {
        s.category for s in storages
    }
