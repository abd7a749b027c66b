"""When nodes are alike, and what torch says of ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardfx.ir.graph import Graph
from shardfx.ir.ops.alike import alike, key_of
from shardfx.ir.ops.dropout import dropout
from shardfx.ir.ops.traits import draws, is_heavy, is_view
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


def test_placements_count_if_asked() -> None:
    x, y = node(aten.relu.default, "x"), node(aten.relu.default, "y")
    assert alike(x) == alike(y)
    assert alike(x, placed=True) != alike(y, placed=True)


def test_the_number_of_a_draw_does_not_count() -> None:
    first, second = (node(dropout, "x", 0.5, "seed", number, []) for number in (1, 2))
    assert alike(first) == alike(second)
    assert alike(first) != alike(node(dropout, "x", 0.25, "seed", 1, []))


def test_a_key_may_tell_values_by_their_place() -> None:
    twice, two = node(aten.mul.Tensor, "x", "x"), node(aten.mul.Tensor, "x", "y")
    assert alike(twice) == alike(two)
    assert key_of(twice, lambda value: value.name) != key_of(two, lambda value: value.name)


@pytest.mark.parametrize(
    ("op", "args", "view", "heavy"),
    [
        (aten.view.default, ("x", [24]), True, False),
        (aten.t.default, ("x",), True, False),
        (aten.expand.default, ("x", [3, 4, 6]), True, False),
        (aten.squeeze.dim, ("x", 0), True, False),
        (aten.select.int, ("x", 0, 1), False, False),
        (aten.slice.Tensor, ("x", 0, 0, 2), False, False),
        (aten.relu.default, ("x",), False, False),
        (aten.clone.default, ("x",), False, False),
        (aten.mm.default, ("x", "z"), False, True),
        (aten.convolution.default, ("c", "k", None, [1], [0], [1], False, [0], 1), False, True),
    ],
    ids=lambda value: str(value) if hasattr(value, "overloadpacket") else None,
)
def test_views_and_heavy_ops(op: Any, args: tuple[Any, ...], view: bool, heavy: bool) -> None:
    given = graph()
    more = parse_graph("mesh tp=2\nargument %z : f32[6, 2]\nargument %c : f32[1, 2, 9]\nargument %k : f32[3, 2, 3]")
    values = {value.name: value for value in (*given.values(), *more.values())}
    made = Rewriter(given).call(op, *(values[arg] if isinstance(arg, str) else arg for arg in args))
    assert (is_view(made), is_heavy(made)) == (view, heavy)


def test_what_draws() -> None:
    assert draws(aten.native_dropout.default) and draws(aten.bernoulli.default)
    assert not draws(aten.relu.default) and not draws(dropout)
