"""Terms: two graphs that compute the same by decompositions have the same terms, others have not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardfx.ir.builder import GraphBuilder, trace_on_meta
from shardfx.ir.capture.canonical.canonical_ops import convert_call
from shardfx.ir.graph import Graph, InputKind, Output, OutputKind
from shardfx.ir.mesh import Mesh
from shardfx.ir.spec import TensorType
from shardfx.plugins import all_rules
from shardfx.runtime.verify.fault import Fault
from shardfx.runtime.verify.proof.terms import COMMUTE, same_function

D = torch.float64
Function = Callable[..., torch.Tensor]
SHAPES: dict[str, tuple[int, ...]] = {"x": (4, 6), "y": (4, 6), "w": (6, 6), "b": (6,)}

EQUAL: dict[str, tuple[Function, Function]] = {
    "addmm": (lambda x, y, w, b: torch.addmm(b, x, w), lambda x, y, w, b: b + x @ w),
    "silu": (lambda x, y, w, b: F.silu(x), lambda x, y, w, b: x.sigmoid() * x),
    "gelu": (lambda x, y, w, b: F.gelu(x), lambda x, y, w, b: x * 0.5 * (1 + torch.erf(x * 0.5**0.5))),
    "addcmul": (lambda x, y, w, b: torch.addcmul(b, x, y), lambda x, y, w, b: y * x + b),
    "order of a product": (lambda x, y, w, b: x * y, lambda x, y, w, b: y * x),
    "order of sums": (lambda x, y, w, b: (x + y) + b, lambda x, y, w, b: y + (b + x)),
    "copies and neutral numbers": (lambda x, y, w, b: x.clone() * 1 + 0, lambda x, y, w, b: x / 1),
    "view in two steps": (lambda x, y, w, b: x.view(24).view(2, 12), lambda x, y, w, b: x.view(2, 12)),
}
DIFFERENT: dict[str, tuple[Function, Function]] = {
    "order of a difference": (lambda x, y, w, b: x - y, lambda x, y, w, b: y - x),
    "order of matrices": (lambda x, y, w, b: w @ w.t(), lambda x, y, w, b: w.t() @ w),
    "two gelus": (lambda x, y, w, b: F.gelu(x), lambda x, y, w, b: F.gelu(x, approximate="tanh")),
    "a factor": (lambda x, y, w, b: torch.addcmul(b, x, y, value=2), lambda x, y, w, b: x * y + b),
    "zero times a sum": (lambda x, y, w, b: torch.addmm(b, x, w, beta=0), lambda x, y, w, b: 0 * b + x @ w),
    "zero times a product": (lambda x, y, w, b: torch.addmm(b, x, w, alpha=0), lambda x, y, w, b: b + 0 * (x @ w)),
    "view of a transpose": (lambda x, y, w, b: x.t().reshape(4, 6), lambda x, y, w, b: x.clone()),
    "a cast": (lambda x, y, w, b: x.float().double(), lambda x, y, w, b: x.clone()),
}


def graph(function: Function) -> Graph:
    builder = GraphBuilder(Mesh(dp=1))
    types = [TensorType(shape, D) for shape in SHAPES.values()]
    inputs = iter([builder.input(InputKind.ARGUMENT, name, type) for name, type in zip(SHAPES, types, strict=True)])
    for node in trace_on_meta(function, types).graph.nodes:
        if node.op == "placeholder":
            builder.env[node] = next(inputs)
        elif node.op == "call_function":
            builder.env[node] = convert_call(builder, node)
        else:
            builder.graph.outputs.append(Output(OutputKind.RESULT, "result", builder.env[node.args[0]]))
    return builder.graph


def same(one: Function, other: Function) -> bool:
    return not isinstance(same_function(graph(one), graph(other), all_rules()), Fault)


@pytest.mark.parametrize("name", EQUAL)
def test_equal_expressions_have_one_term_and_equal_numbers(name: str) -> None:
    one, other = EQUAL[name]
    assert same(one, other) and same(other, one)
    torch.manual_seed(0)
    given = [torch.randn(shape, dtype=D) for shape in SHAPES.values()]
    torch.testing.assert_close(one(*given), other(*given))


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_expressions_have_two_terms(name: str) -> None:
    one, other = DIFFERENT[name]
    assert not same(one, other) and not same(other, one)


@pytest.mark.parametrize("op", sorted(COMMUTE, key=str), ids=str)
def test_commutative_op_gives_the_same_of_exchanged_operands(op: Any) -> None:
    torch.manual_seed(0)
    a, b = (torch.randint(-2, 3, (50,)) for _ in range(2))
    assert torch.equal(op(a, b), op(b, a))
