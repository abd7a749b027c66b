"""Nodes that a Rewriter makes complete: types, placements, strategy, source; and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Phase
from shardfx.ir.ops import comm
from shardfx.ir.rewriter import Rewriter
from shardfx.ir.rulebook import default_rules
from shardfx.ir.text.parser import parse_graph
from shardfx.ir.validate import validate_graph

aten = torch.ops.aten

PLANNED = """
mesh dp=2, tp=2
established COMM_EXPLICIT, SHARDED
argument %x : f32[8{dp}, 16]
argument %w : f32[16, 12{tp}]
argument %y : f32[12{tp}, 6]
backward:
  %0 = aten.mm(%x, %w) : f32[8{dp}, 12{tp}]  shards m{dp} n{tp}  at{1}  @ layers.0  model.py:42
  %1 = aten.mm(%0, %y) : f32[8{dp}, 6] +{tp}  shards m{dp} k{tp}
  %2 = comm.all_reduce(%1, axes=[tp], reduce=sum) : f32[8{dp}, 6]
outputs:
  result results.0 = %2 : [8{dp}, 6]
"""
RULES = default_rules()


def planned() -> Graph:
    graph = parse_graph(PLANNED)
    validate_graph(graph, rules=RULES)
    return graph


def line(graph: Graph, node: Any) -> str:
    """The node's line, put behind all others; the graph is still right."""
    rewriter = Rewriter(graph)
    rewriter.at_end(node)
    rewriter.apply()
    graph.rename()
    validate_graph(graph, rules=RULES)
    return " ".join(str(graph).split("outputs:")[0].strip().splitlines()[-1].split())


def test_a_call_before_placement_has_types_and_a_source() -> None:
    graph = parse_graph(
        "mesh tp=2\nunplaced\nargument %x : f32[4, 6]\nforward:\n%0 = aten.t(%x) : f32[6, 4] @ a b.py:1"
    )
    transposed = graph.nodes[0].outs[0]
    node = Rewriter(graph).call(aten.mm.default, graph.inputs[0].value, transposed, why="as a test")
    assert (node.where, node.phase, node.why, node.strategy) == (graph.nodes[0].where, Phase.FORWARD, "as a test", None)
    assert line(graph, node) == "%1 = aten.mm(%x, %0) : f32[4, 4] @ a b.py:1"


def test_a_call_in_a_placed_graph_is_sharded_as_its_operands() -> None:
    graph = planned()
    product = graph.nodes[0]
    node = Rewriter(graph, RULES).call(aten.mul.Tensor, product.outs[0], 2.0, attrs={"lane": 1})
    assert (node.phase, node.at) == (Phase.BACKWARD, (1,))
    assert line(graph, node) == (
        "%3 = aten.mul.Tensor(%0, 2.0) : f32[8{dp}, 12{tp}] shards d0{dp} d1{tp} {lane=1} at{1} @ layers.0 model.py:42"
    )
    graph = planned()
    half = Rewriter(graph, RULES).call(aten.mul.Tensor, graph.nodes[1].outs[0], 0.5, like=product)
    assert half.where == product.where
    assert line(graph, half).startswith("%3 = aten.mul.Tensor(%1, 0.5) : f32[8{dp}, 6] +{tp} shards d0{dp}")


def test_a_call_that_needs_its_operands_elsewhere_says_where() -> None:
    graph = planned()
    with pytest.raises(Error, match="needs %1 placed otherwise than it is") as caught:
        Rewriter(graph, RULES).call(aten.relu.default, graph.nodes[1].outs[0])
    assert (caught.value.expected, caught.value.got) == ("[8{dp}, 6]", "[8{dp}, 6] +{tp}")
    assert "rewriter.comm" in str(caught.value.remedy)
    graph.established = frozenset({"SHARDED"})  # partition will see to it
    assert Rewriter(graph, RULES).call(aten.relu.default, graph.nodes[1].outs[0]).outs[0].spec is not None


def test_partial_sums_pass_a_rounding_only_if_a_pass_says_so() -> None:
    graph = planned()
    partial = graph.nodes[1].outs[0]
    with pytest.raises(Error, match="placed otherwise"):
        Rewriter(graph, RULES).call(aten._to_copy.default, partial, dtype=torch.bfloat16)
    rounds = {"approximate": True}
    node = Rewriter(graph, RULES).call(aten._to_copy.default, partial, dtype=torch.bfloat16, attrs=rounds)
    assert line(graph, node) == (
        "%3 = aten._to_copy(%1, dtype=torch.bfloat16) : bf16[8{dp}, 6] +{tp} shards d0{dp} {approximate=True}"
    )
    node.attrs = {}
    with pytest.raises(Error, match="partial operands"):
        validate_graph(graph, rules=RULES)


def test_wrong_calls() -> None:
    graph = planned()
    x = graph.inputs[0].value
    with pytest.raises(Error, match="does not take these arguments") as caught:
        Rewriter(graph, RULES).call(aten.mm.default, x, x)
    assert "aten::mm" in str(caught.value.expected)
    with pytest.raises(Error, match="without a rule") as caught:
        Rewriter(graph).call(aten.relu.default, x)
    assert caught.value.remedy == "Rewriter(graph, context.rules)"


@pytest.mark.parametrize("op", ["all_gather", comm.all_gather])
def test_communication_leads_where_its_keywords_say(op: Any) -> None:
    graph = planned()
    product = graph.nodes[0].outs[0]
    node = Rewriter(graph).comm(op, product, axes=["tp"], dim=1)
    assert node.why == "[.{dp}, .{tp}] becomes [.{dp}, .]"
    assert line(graph, node) == (
        "%3 = comm.all_gather(%0, axes=[tp], dim=1) : f32[8{dp}, 12] at{1} @ layers.0 model.py:42 # 96 B"
    )
    both = Rewriter(graph).comm("all_reduce", graph.nodes[1].outs[0], graph.nodes[1].outs[0], axes=["tp"])
    assert line(graph, both).startswith("%4, %5 = comm.all_reduce(%1, %1, axes=[tp]) : f32[8{dp}, 6], f32[8{dp}")


def test_wrong_communication() -> None:
    graph = planned()
    x = graph.inputs[0].value
    with pytest.raises(Error, match="there is no comm op 'gather'") as caught:
        Rewriter(graph).comm("gather", x, axes=["tp"], dim=0)
    assert "all_gather" in str(caught.value.expected)
    with pytest.raises(Error, match="cannot start from this placement"):
        Rewriter(graph).comm("all_gather", x, axes=["tp"], dim=0)
    x.spec = None
    with pytest.raises(Error, match="without placement"):
        Rewriter(graph).comm("all_gather", x, axes=["tp"], dim=0)
