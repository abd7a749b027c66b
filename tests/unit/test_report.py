"""Reports: memory against a program that is run, communication against the formulas, and it is quick."""

from __future__ import annotations

import math

import pytest

import shardfx as sx
from shardfx.ir.text.parser import parse_graph
from shardfx.report.figures import comm_rows
from tests.plans import MESHES, plan
from tests.zoo import make


@pytest.fixture(scope="module")
def pm() -> sx.ParallelModule:
    return plan(make("gpt_separate"), MESHES["dp2tp2"])


# ---- memory

GATHERED, BUFFERS = "gathered parameters", "communication buffers"
CATEGORIES = ("activations", GATHERED, "gradients", "results", "new buffers", BUFFERS, "temporaries")


@pytest.mark.long
def test_memory_by_category(pm: sx.ParallelModule) -> None:
    memory = pm.report().memory
    named = {given.name: given.value for given in pm.planned.inputs}
    coords = pm.mesh.coords(0)

    def local(name: str) -> int:
        value = named[name]
        assert value.spec is not None
        return math.prod(value.spec.local_shape(value.shape, pm.mesh, coords)) * value.type.dtype.itemsize

    parameters = sum(local(name) for name in dict(make("gpt_separate").model.named_parameters()))
    assert memory.stored["parameters"] == memory.gradients == parameters
    assert memory.stored["inputs"] == local("args.0") + local("targets.0") == 2 * 4 * 16 * 8
    peak = memory.footprint.peak
    held = sum(map(peak.of, CATEGORIES))
    assert held == peak.nbytes > peak.of("activations") > 0
    assert memory.peak == sum(memory.stored.values()) + held


# ---- communication

GRAPH = """
mesh dp=4, tp=2
established COMM_EXPLICIT, SHARDED
parameter %w : f32[1024{tp,dp}, 8]
argument %x : f32[64{dp}, 1024{tp}]
forward:
  %0 = comm.all_gather(%w, axes=[dp], dim=0) : f32[1024{tp}, 8]  @ fc
  %1 = aten.mm(%x, %0) : f32[64{dp}, 8] +{tp}  shards m{dp} k{tp}  @ fc
  %2 = comm.all_reduce(%1, axes=[tp], reduce=sum) : f32[64{dp}, 8]  @ fc
  %3 = aten.relu(%2) : f32[64{dp}, 8]  shards d0{dp}
  %4 = comm.all_to_all(%3, axes=[dp], dim=0, to=1) : f32[64, 8{dp}]
  %5 = aten.sum.default(%4) : f32[] +{dp}  shards d1{dp}
  %6 = comm.all_reduce(%5, axes=[dp], reduce=sum) : f32[]
outputs:
  loss loss = %6
"""


def test_communication_is_counted_by_the_formulas() -> None:
    graph = parse_graph(GRAPH)
    rows = {(row.axes, row.kind): row for row in comm_rows(graph, graph.mesh)}
    gather, reduce = rows[("dp",), "all-gather"], rows[("tp",), "all-reduce"]
    assert gather.nbytes == 3 / 4 * 512 * 8 * 4  # (n-1)/n of the gathered shard
    assert reduce.nbytes == 2 * 1 / 2 * 16 * 8 * 4  # twice (n-1)/n of the value
    assert rows[("dp",), "all-to-all"].nbytes == 3 / 4 * 16 * 8 * 4
    link = graph.mesh["dp"].link
    assert gather.seconds == pytest.approx(2 * link.latency + gather.nbytes / link.bandwidth)
    assert [cause.what for cause in gather.causes] == ["w is stored sharded"]
    assert [(cause.what, cause.module) for cause in reduce.causes] == [("partial sums of aten.mm", "fc")]
    assert rows[("dp",), "all-reduce"].causes[0].what == "loss"


@pytest.mark.long
def test_causes_name_the_parameters(pm: sx.ParallelModule) -> None:
    communication = pm.report().communication
    causes = {cause.what for row in communication.rows if row.axes == ("dp",) for cause in row.causes}
    assert {f"gradient of {name}" for name in dict(make("gpt_separate").model.named_parameters())} <= causes
    assert communication.nbytes == pytest.approx(
        sum(cause.nbytes for row in communication.rows for cause in row.causes)
    )
    assert communication.calls == sum(row.calls for row in communication.rows)
    assert plan(make("mlp3"), sx.Mesh(tp=1)).report().communication.nbytes == 0


# ---- time, text


@pytest.mark.long
def test_time_is_that_of_the_machine(pm: sx.ParallelModule) -> None:
    fast, h100 = pm.report(), pm.report("h100-dgx")
    slow = pm.report(sx.Machine("slow", {"float64": 1e9}, 1e15, 1e9, sx.Machine.load("h100-dgx").links)).time
    assert slow.compute == pytest.approx(slow.cost.flops / 1e9, rel=0.01)
    assert slow.total == pytest.approx(slow.compute + slow.exposed)
    assert slow.total > fast.time.total > fast.time.exposed > 0
    assert fast.time.communication == pytest.approx(fast.communication.seconds), "by the graph as by the program"
    assert h100.mesh["tp"].link.bandwidth == 450e9 and h100.communication.nbytes == fast.communication.nbytes
    assert h100.time.communication < fast.time.communication and "of the 80.0 GB of h100-dgx" in str(h100)


def test_the_text(pm: sx.ParallelModule) -> None:
    text = str(pm.report())
    for words in (
        "Plan  dp 2 x tp 2: 4 ranks",
        "peak = parameters + buffers",
        "gradient of layers.*.fc1.weight (2x)",
        "Time of one step on accelerator (an estimate)",
        "aten.gelu @ layers.* (2x)",
        "communication that no compute hides",
        "Passes  bind-hints",
    ):
        assert words in text
    assert "Warnings" not in text and max(map(len, text.splitlines())) <= 110
    assert "\x1b" not in text
