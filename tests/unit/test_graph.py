"""The graph: what a Rewriter changes and what it leaves, copies, users, and dead code."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardfx.ir.graph import Graph, Node, Phase, Value, op_name
from shardfx.ir.rewriter import Rewriter, dead_code
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


def test_replace_for_some_users_only(graph: Graph) -> None:
    relu, mul, _ = graph.nodes
    rewriter = Rewriter(graph)
    made = rewriter.before(mul, neg(relu.outs[0]))
    rewriter.replace(relu.outs[0], made.outs[0], users=[mul, graph.outputs[1]])
    assert rewriter.apply()
    assert lines(graph) == [
        "%0 = aten.relu(%x)",
        "%1 = aten.neg(%0)",
        "%2 = aten.mul.Tensor(%1, %1)",
        "%3 = aten.cat([%0, %2], dim=0)",
        "result results.0 = %3",
        "result results.1 = %1",
    ]


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
