"""When nodes are alike, and what torch says of ops."""

from __future__ import annotations

from typing import Any

import torch

from shardfx.ir.graph import Graph
from shardfx.ir.ops.alike import alike
from shardfx.ir.rewriter import Rewriter
from shardfx.ir.text.parser import parse_graph

aten = torch.ops.aten


def graph() -> Graph:
    return parse_graph("""
        mesh tp=2
        argument %x : f32[4{tp}, 6]
        argument %y : f32[4, 6]
        argument %i : i64[4, 6]
        argument %seed : i64[]
    """)


def node(op: Any, *args: Any, **kwargs: Any) -> Any:
    """A call whose tensors are named."""
    given = graph()
    values = {value.name: value for value in given.values()}
    return Rewriter(given).call(op, *(values.get(arg, arg) if isinstance(arg, str) else arg for arg in args), **kwargs)


def test_constants_that_floats_say_are_equal_or_not() -> None:
    """NaN is the same constant as NaN, and zero is another one than its negative."""
    assert alike(node(aten.mul.Scalar, "x", float("nan"))) == alike(node(aten.mul.Scalar, "x", float("inf") * 0))
    assert alike(node(aten.mul.Scalar, "x", 0.0)) != alike(node(aten.mul.Scalar, "x", -0.0))


def test_nodes_of_one_op_types_and_constants_are_alike() -> None:
    assert alike(node(aten.add.Tensor, "x", "y")) == alike(node(aten.add.Tensor, "x", "x"))
    assert alike(node(aten.sum.dim_IntList, "x", [0])) == alike(node(aten.sum.dim_IntList, "y", (0,)))
    assert alike(node(aten.add.Tensor, "x", "y")) != alike(node(aten.add.Tensor, "x", "i"))
    assert alike(node(aten.add.Tensor, "x", "y")) != alike(node(aten.sub.Tensor, "x", "y"))
    assert alike(node(aten.add.Tensor, "x", "y")) != alike(node(aten.add.Tensor, "x", "y", alpha=2))
    assert hash(alike(node(aten.full.default, [2], 1.0, dtype=torch.float64))) is not None


def test_constants_that_compare_equal_are_not_one() -> None:
    """``i + 1`` is of integers, ``i + 1.0`` of floats: a rule or type of the one is not that of the other."""
    keys = {alike(node(aten.add.Tensor, "i", one)) for one in (1, 1.0, True)}
    assert len(keys) == 3
    assert alike(node(aten.add.Tensor, "x", 0.0)) == alike(node(aten.add.Tensor, "x", 0.0))
