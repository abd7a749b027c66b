"""Footprints: what a program holds, call by call, against real runs; destinations; what is sent, against counts."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import fx

import shardfx as sx
from shardfx.ir.cost.amounts import total
from shardfx.ir.cost.fake_calls import CallEffect, FakeCalls, Result, TensorLayout, aliased_argument
from shardfx.ir.cost.footprint import Footprint
from shardfx.ir.cost.node_cost import NodeCosts, node_cost
from shardfx.ir.cost.replay import replay
from shardfx.ir.graph import Input, InputKind, Output, OutputKind, Value
from shardfx.ir.ops import memory_ops
from shardfx.ir.ops.fused_attention import attention, attention_backward
from shardfx.ir.ops.sends import Sent
from shardfx.ir.program.lower import lower
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.rulebook import default_rules
from shardfx.ir.spec import Spec, TensorType
from shardfx.ir.text.parser import parse_graph
from shardfx.module.programs import TRAIN
from tests.collective_counts import count_collectives
from tests.live_memory import check_footprint, held_in_a_step
from tests.plans import MESHES, plan, stored_specs
from tests.zoo import CASES as ZOO
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
    "mlp3": ("mlp3", "dp2tp2", {}),
    "dropout": ("dropout_mlp", "dp2tp2", {}),
    "sequence": ("gpt_fused", "dp2tp2", {"sequence": True}),
    "stored": ("mlp3", "dp2", {"specs": STORED}),
    "resnet": ("resnet", "dp2tp2", {}),
    "unet": ("unet", "dp2", {}),
    "gpt stored": ("gpt_separate", "dp2", {"specs": {"layers.*.fc*.weight": "dp, -"}}),
}
SLOW: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{f"{name} dp2tp2": (name, "dp2tp2", {}) for name in ZOO},
    **{f"{name} stored": (name, "dp2", {"specs": stored_specs}) for name in ZOO},
    "hf_bert tp4": ("hf_bert", "tp4", {}),
    "stored, not fused": ("gpt_separate", "dp2tp2", {"specs": {"layers.*.q.weight": "tp dp, -"}, "bucket_mb": 0}),
}


@cache
def planned(case: str) -> sx.ParallelModule:
    name, mesh, hints = {**CASES, **SLOW}[case]
    given = make(name)
    specs = {"specs": hints["specs"](given)} if callable(hints.get("specs")) else {}
    return plan(given, MESHES[mesh], **hints | specs)


@pytest.mark.long
@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)])
def test_every_call_holds_what_a_run_holds(case: str) -> None:
    given, pm = make({**CASES, **SLOW}[case][0]), planned(case)
    held = held_in_a_step(pm, given)
    assert len(held) == pm.mesh.size
    for rank in (0, pm.mesh.size - 1):
        found = check_footprint(running(pm, rank), held[rank])
        assert rank or pm.report().memory.footprint.peak == found.peak


@pytest.mark.long
@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", ["sequence", "resnet", "stored"])
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
@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", ["mlp3", "dropout", "sequence", "resnet", "stored"])
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


def program_of(build: Any) -> RankProgram:
    """A program on two inputs of f32[8, 8], made by ``build(fx graph, x, y)``; it gives one result."""
    graph, mesh = fx.Graph(), sx.Mesh(dp=2)
    kind = TensorType((8, 8), torch.float32)
    inputs = tuple(Input(InputKind.ARGUMENT, n, Value(kind, None, 0, n, Spec.parse("-, -", mesh))) for n in ("x", "y"))
    result = build(graph, *(graph.placeholder(given.name) for given in inputs))
    graph.output((result,))
    return RankProgram(0, mesh, graph, inputs, (Output(OutputKind.RESULT, "results.0", Value(kind)),))


def test_a_bucket_is_allocated_once_and_written_in_place() -> None:
    def build(g: fx.Graph, x: fx.Node, y: fx.Node) -> fx.Node:
        flat = g.call_function(memory_ops.empty, ([128], torch.float32))
        first = g.call_function(memory_ops.part, (flat, 1, 0, [8, 8]))
        made = g.call_function(aten.mm.out, (x, y), {"out": first})
        second = g.call_function(memory_ops.part, (flat, 1, 64, [8, 8]))
        total = g.call_function(aten.add.Tensor, (x, y))
        written = g.call_function(memory_ops.write, (second, total))
        whole = g.call_function(memory_ops.join, (flat, [made, written], 1))
        reduced = g.call_function(memory_ops.all_reduce_, (whole, "sum", "dp2/dp@0"))
        return g.call_function(c10d.wait_tensor.default, (reduced,))

    found = replay(program_of(build))
    flat, total = 128 * 4, 64 * 4
    assert [s.nbytes for s in found.storages] == [flat, total]
    assert found.live == (flat, flat, flat, flat, flat + total, flat + total, flat, flat, flat)
    assert found.live[[call.name for call in found.calls].index("write")] == flat + total
    assert found.cost.touched == 3 * total + 3 * total + 2 * total, "the product, the sum, the copy"
    assert found.cost.flops == 2 * 8**3 and found.cost.sent == {("dp",): Sent(2.0, float(flat))}
    assert found.storages[0].category == "results" and found.peak.of("temporaries") == total


def test_a_gather_into_given_memory_allocates_nothing() -> None:
    def build(g: fx.Graph, x: fx.Node, y: fx.Node) -> fx.Node:
        pool = g.call_function(memory_ops.empty, ([16, 8], torch.float32))
        started = g.call_function(memory_ops.all_gather_into, (x, 2, "dp2/dp@0"), {"out": pool})
        return g.call_function(c10d.wait_tensor.default, (started,))

    found = replay(program_of(build))
    assert [s.nbytes for s in found.storages] == [16 * 8 * 4] and set(found.live) == {16 * 8 * 4}
    assert found.cost.sent == {("dp",): Sent(1.0, 8 * 8 * 4.0)}


def test_memory_goes_behind_the_last_use_of_any_view_of_it() -> None:
    def build(g: fx.Graph, x: fx.Node, y: fx.Node) -> fx.Node:
        a = g.call_function(aten.add.Tensor, (x, y))
        view = g.call_function(aten.t.default, (a,))
        b = g.call_function(aten.relu.default, (x,))
        c = g.call_function(aten.mul.Tensor, (b, view))
        return g.call_function(aten.neg.default, (c,))

    found, one = replay(program_of(build)), 8 * 8 * 4
    assert found.live == (one, one, 2 * one, 3 * one, 2 * one)
    assert found.peak.nbytes == 3 * one and found.cost.touched == (3 + 0 + 2 + 3 + 2) * one


def test_what_helpers_hold_inside_counts_at_the_peak_alone() -> None:
    def helper(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x]).sum(0)

    found = replay(program_of(lambda g, x, y: g.call_function(helper, (x,))))
    assert found.live == (8 * 4,) and found.inside == (2 * 64 * 4,)
    assert found.peak.nbytes == 2 * 64 * 4 + 8 * 4 == sum(held.nbytes for held in found.peak.items)


def test_a_call_says_which_operand_it_gives_back() -> None:
    assert (
        aliased_argument(c10d.wait_tensor.default)
        == 0
        == aliased_argument(c10d.all_reduce_.default)
        == aliased_argument(aten.add_.Tensor)
    )
    assert aliased_argument(aten.mm.out) == "out" == aliased_argument(c10d.all_gather_into_tensor_out.default)
    assert aliased_argument(aten.mm.default) is None and aliased_argument(aten.reshape.default) is None


def test_helpers_are_seen_through() -> None:
    """What a function written in Python does inside counts as if its calls stood in the program."""
    calls, square, flat = (
        FakeCalls(),
        TensorLayout.dense((8, 8), torch.float32),
        TensorLayout.dense((128,), torch.float32),
    )
    both = TensorLayout.dense((16, 8), torch.float32)
    gathered = calls.made(memory_ops.all_gather_into, (square, 2, "dp2/dp@0"), {"out": both})
    assert gathered == CallEffect(Result(both, 1), writes=True)
    place = calls.made(memory_ops.part, (flat, 2, 0, [8, 8]), {})
    assert not place.writes and place.results.layout.shape == (2, 4, 8)
    made = calls.made(memory_ops.mm_shards, (square, square, place.results.layout), {})
    assert (made.results, made.fresh, made.flops, made.writes) == (
        Result(place.results.layout, 2),
        (),
        2.0 * 8**3,
        True,
    )
    assert calls.made(memory_ops.write, (square, square), {}).writes
    assert sum(calls.made(memory_ops.adjoin, ([square, square],), {}).fresh) == 2 * 8 * 8 * 4, "that they lie apart"


def test_what_only_looks_is_not_run() -> None:
    """A user's rank pass may put functions into programs that note something."""
    seen = []

    @sx.observes
    def noted(x: torch.Tensor, name: str) -> torch.Tensor:
        seen.append(name)
        return x

    found = replay(program_of(lambda g, x, y: g.call_function(noted, (g.call_function(aten.neg.default, (x,)), "a"))))
    assert not seen and [s.nbytes for s in found.storages] == [8 * 8 * 4]


def test_whether_a_reshape_copies_is_seen() -> None:
    calls = FakeCalls()
    dense, turned = TensorLayout.dense((4, 6), torch.float32), TensorLayout((4, 6), (1, 4), torch.float32)
    seen = calls.made(aten.reshape.default, (dense, [24]), {})
    copied = calls.made(aten.reshape.default, (turned, [24]), {})
    flat = TensorLayout.dense((24,), torch.float32)
    assert seen == CallEffect(Result(flat, 0)) and copied == CallEffect(
        Result(flat, 0, fresh=True), (96,), 96, 0.0, True
    )
    assert calls.made(aten.reshape.default, (dense, [24]), {}) is seen
    assert TensorLayout((1000, 4), (0, 1), torch.float32).nbytes == 16, "an expanded dim is there once"


def test_a_group_of_another_mesh_is_an_error() -> None:
    code = program_of(lambda g, x, y: g.call_function(c10d.all_reduce.default, (x, "sum", "tp4/tp@0")))
    with pytest.raises(sx.Error, match="a group of another mesh"):
        replay(code)


# ---- categories


def test_stored_parameters_that_were_made_whole_are_a_category_of_their_own() -> None:
    storages = replay(lowered(planned("stored"))).storages
    weights = sum(p.numel() * 8 for n, p in make("mlp3").model.named_parameters() if n.endswith("weight"))
    assert sum(each.nbytes for each in storages if each.category == "gathered") >= weights
    assert {"gradients", "results", "activations", "communication", "temporaries"} <= {s.category for s in storages}


def test_an_empty_program_holds_nothing() -> None:
    assert Footprint((), (), (), ()).peak.nbytes == 0


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_attention_without_content_lies_as_its_kernels_make_it(p: float) -> None:
    """Or a view behind it would be taken for a copy."""
    strides = []
    for device in ("cpu", "meta"):
        q, k, v = (torch.ones(2, 8, 4, 6, device=device).transpose(1, 2) for _ in range(3))
        draw = (p, torch.tensor(1, device=device), 0, [])
        out = attention(q, k, v, None, True, None, *draw)
        grads = attention_backward(q, q, k, v, *out, None, True, None, False, *draw)
        strides.append([t.stride() for t in (*out, *grads)])
    assert strides[0] == strides[1]
