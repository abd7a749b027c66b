"""The graph: what a Rewriter changes, leaves and makes complete; copies, dead code, and nodes that are alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Node, Phase, Value, op_name
from shardfx.ir.ops import comm
from shardfx.ir.ops.alike import alike
from shardfx.ir.rewriter import Rewriter, dead_code
from shardfx.ir.rulebook import default_rules
from shardfx.ir.text.parser import parse_graph
from shardfx.ir.validate import validate_graph

aten = torch.ops.aten


@pytest.fixture
def graph() -> Graph:
    return parse_graph("""
        mesh tp=2
        argument %x : f32[4]
        forward:
          %0 = aten.relu(%x) : f32[4]  @ act  model.py:3
          %1 = aten.mul.Tensor(%0, %0) : f32[4]
        backward:
          %2 = aten.cat([%0, %1], dim=0) : f32[8]
        outputs:
          result results.0 = %2
          result results.1 = %0
    """)


def lines(graph: Graph) -> list[str]:
    """The nodes and outputs, without types and sources."""
    graph.rename()
    validate_graph(graph)
    return [line.partition(" : ")[0].strip() for line in str(graph).splitlines() if "= " in line]


def neg(value: Value, like: Node | None = None) -> Node:
    return Rewriter.make(aten.neg.default, (value,), value.type, like=like)


def test_replace_everywhere_but_in_what_is_made_of_the_old_value(graph: Graph) -> None:
    relu = graph.nodes[0]
    rewriter = Rewriter(graph)
    twice = neg(relu.outs[0], relu)
    thrice = neg(twice.outs[0], relu)
    rewriter.after(relu, twice)
    rewriter.after(twice, thrice)
    rewriter.replace(relu.outs[0], thrice.outs[0])
    assert rewriter.apply()
    assert lines(graph) == [
        "%0 = aten.relu(%x)",
        "%1 = aten.neg(%0)",
        "%2 = aten.neg(%1)",
        "%3 = aten.mul.Tensor(%2, %2)",
        "%4 = aten.cat([%2, %3], dim=0)",
        "result results.0 = %4",
        "result results.1 = %2",
    ]
    assert (twice.phase, twice.where) == (Phase.FORWARD, relu.where)


def test_replace_and_erase_several_at_once(graph: Graph) -> None:
    """A node that is made of a value that another change erases follows that change."""
    relu, mul, _ = graph.nodes
    rewriter = Rewriter(graph)
    for old in (relu, mul):
        new = rewriter.before(old, neg(old.operands[0]))
        rewriter.replace(old.outs[0], new.outs[0])
        rewriter.erase(old)
    assert rewriter.apply()
    assert lines(graph) == [
        "%0 = aten.neg(%x)",
        "%1 = aten.neg(%0)",
        "%2 = aten.cat([%0, %1], dim=0)",
        "result results.0 = %2",
        "result results.1 = %0",
    ]


def test_insertions_keep_their_order(graph: Graph) -> None:
    x = graph.inputs[0].value
    rewriter = Rewriter(graph)
    made = {name: Rewriter.make(op_like(name), (x,), x.type) for name in ("a", "b", "c", "d", "e", "f")}
    rewriter.before(graph.nodes[1], made["a"])
    rewriter.before(graph.nodes[1], made["b"])
    rewriter.after(graph.nodes[1], made["c"])
    rewriter.after(graph.nodes[1], made["d"])
    rewriter.after(None, made["e"])
    rewriter.at_end(made["f"])
    assert rewriter.apply()
    assert " ".join(op_name(node.op) for node in graph.nodes) == "e aten.relu a b aten.mul.Tensor c d aten.cat f"


def op_like(name: str) -> Any:
    """An op that has a name and nothing else."""
    return type("Op", (), {"__str__": lambda self: name})()


def test_dead_code_goes(graph: Graph) -> None:
    assert not dead_code(graph)
    graph.outputs.pop(0)
    assert dead_code(graph)
    assert lines(graph) == ["%0 = aten.relu(%x)", "result results.1 = %0"]


def test_a_copy_is_the_same_and_apart(graph: Graph) -> None:
    copy = graph.copy()
    validate_graph(copy)
    assert str(copy) == str(graph)
    assert not set(copy.values()) & set(graph.values())
    Rewriter(copy).erase(copy.nodes[0])
    copy.nodes.pop()
    assert len(graph.nodes) == 3


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


@pytest.mark.parametrize(
    ("make", "what", "said"),
    [
        (lambda rewriter, x: rewriter.call(aten.mm.default, x, x), "does not take these arguments", "aten::mm"),
        (lambda rewriter, x: Rewriter(rewriter.graph).call(aten.relu.default, x), "without a rule", "context.rules)"),
        (
            lambda rewriter, x: rewriter.comm("gather", x, axes=["tp"], dim=0),
            "there is no comm op 'gather'",
            "all_gath",
        ),
        (lambda rewriter, x: rewriter.comm("all_gather", x, axes=["tp"], dim=0), "start from this placement", "{tp}"),
    ],
)
def test_mistakes_are_errors(make: Any, what: str, said: str) -> None:
    graph = planned()
    with pytest.raises(Error, match=what) as caught:
        make(Rewriter(graph, RULES), graph.inputs[0].value)
    assert said in f"{caught.value.expected} {caught.value.remedy}"


def alike_graph() -> Graph:
    return parse_graph("""
        mesh tp=2
        argument %x : f32[4{tp}, 6]
        argument %y : f32[4, 6]
        argument %i : i64[4, 6]
        argument %seed : i64[]
    """)


def node(op: Any, *args: Any, **kwargs: Any) -> Any:
    """A call whose tensors are named."""
    given = alike_graph()
    values = {value.name: value for value in given.values()}
    return Rewriter(given).call(op, *(values.get(arg, arg) if isinstance(arg, str) else arg for arg in args), **kwargs)


def test_nodes_of_one_op_types_and_constants_are_alike() -> None:
    assert alike(node(aten.add.Tensor, "x", "y")) == alike(node(aten.add.Tensor, "x", "x"))
    assert alike(node(aten.sum.dim_IntList, "x", [0])) == alike(node(aten.sum.dim_IntList, "y", (0,)))
    assert alike(node(aten.add.Tensor, "x", "y")) != alike(node(aten.add.Tensor, "x", "i"))
    assert alike(node(aten.add.Tensor, "x", "y")) != alike(node(aten.sub.Tensor, "x", "y"))
    assert alike(node(aten.add.Tensor, "x", "y")) != alike(node(aten.add.Tensor, "x", "y", alpha=2))
    assert len({alike(node(aten.add.Tensor, "i", one)) for one in (1, 1.0, True)}) == 3, "of integers or of floats"
    assert alike(node(aten.mul.Scalar, "x", float("nan"))) == alike(node(aten.mul.Scalar, "x", float("inf") * 0))
    assert alike(node(aten.mul.Scalar, "x", 0.0)) != alike(node(aten.mul.Scalar, "x", -0.0))
