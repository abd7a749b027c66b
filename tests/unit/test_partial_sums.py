"""Which operands may be partial sums, by what they may be multiplied or divided."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shardfx.ir.graph import Node
from shardfx.ir.ops.fused_attention import attention, attention_backward
from shardfx.ir.oracle.completeness import missing_sums
from shardfx.ir.oracle.instance import Instance, instance
from shardfx.ir.oracle.sharding_search import Oracle
from shardfx.ir.oracle.soundness import refutations
from shardfx.ir.rulebook import default_rules
from shardfx.ir.rules.book import replicated
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.passes.finite import Factors
from tests.instances import CONVOLUTIONS, conv, picked
from tests.op_calls import b, f, i

aten = torch.ops.aten
BOOK = default_rules()
INF = float("inf")


def rule_of(node: Node) -> ShardingRule:
    entry = BOOK.entry(node.op)
    return (entry.make(node) if entry is not None else None) or replicated(node)


def is_infinite(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.isinf().any())


def wrong(of: Instance) -> str:
    """What is said to be finite of an instance and is not, or ""."""
    factors = Factors({v for v, t in zip(of.node.operands, of.tensors, strict=True) if is_infinite(t)})
    if factors.gives_finite(of.node, rule_of(of.node)) and any(r is not None and is_infinite(r) for r in of.results):
        return f"{of}: its results are said to be finite, and are {of.results}"
    return ""


@pytest.mark.long
def test_finite_results_of_finite_operands() -> None:
    """On positive numbers: what is divided by zero is left aside."""
    found = []
    for of in picked():
        made = of.on([t.abs() + 0.5 if t.is_floating_point() else t for t in of.tensors])
        found += [why] if (why := wrong(made)) else []
    assert not found, "\n".join(found[:20])


ONE = torch.ones(8, dtype=torch.float64)
CALLS = {
    "a product with inf": (aten.mv.default, (torch.full((8, 8), INF).double(), ONE)),
    "a product scaled by inf": (aten.addmv.default, (ONE, f(8, 8), ONE), {"alpha": INF}),
    "log_softmax of -inf": (aten._log_softmax.default, (torch.tensor([-INF, 0.0]), 0, False)),
    "batch norm by statistics": (
        aten._native_batch_norm_legit_no_training.default,
        (torch.tensor([[INF, 1.0]]), None, None, torch.zeros(2), torch.ones(2), 0.1, 1e-5),
    ),
    "the mean of a layer norm": (aten.native_layer_norm.default, (torch.full((2, 4), INF), [4], None, None, 1e-5)),
    "dropout of inf": (aten.native_dropout.default, (torch.full((9,), INF), 0.1, False)),
    "clamp to inf": (aten.clamp.default, (ONE, INF)),
    "a full one": (aten.full.default, ([3], INF)),
    "scatter of inf": (aten.scatter.value, (ONE, 0, torch.arange(3), INF)),
    "padding of inf": (aten.constant_pad_nd.default, (ONE, [1, 1], INF)),
    "masked_fill of -inf": (aten.masked_fill.Scalar, (ONE, ONE > 0, -INF)),
    "bits": (aten.view.dtype, (torch.full((2,), 0x7FF0000000000000), torch.float64)),
    "slogdet": (aten._linalg_slogdet.default, (torch.zeros(2, 2),)),
    "a logarithm of zero": (aten.log.default, (ONE - 1,)),
    "pow to inf": (aten.pow.Tensor_Scalar, (ONE * 2, INF)),
    "add times inf": (aten.add.Tensor, (ONE, ONE), {"alpha": INF}),
    "where": (aten.where.ScalarSelf, (ONE > 0, INF, ONE)),
    "an index": (aten.embedding.default, (torch.full((3, 2), INF), i(3, 4))),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_infinite_results_are_not_said_to_be_finite(call: tuple[object, ...]) -> None:
    op, args, *kwargs = call
    made = instance(op, args, kwargs[0] if kwargs else {})  # type: ignore[arg-type]
    assert not wrong(made)
    assert not all(result is None or bool(result.isfinite().all()) for result in made.results)


def test_masked_softmax_and_attention_are_finite() -> None:
    softmax = instance(aten._softmax.default, (torch.tensor([-INF, 0.0]), 0, False)).node
    attended = instance(attention, (f(1, 2, 3, 4), f(1, 2, 3, 4), f(1, 2, 3, 4), f(3, 3))).node
    for node in (softmax, attended):
        assert Factors({node.operands[-1]}).gives_finite(node, rule_of(node))


def test_partial_sums_are_multiplied_by_finite_factors_only() -> None:
    q = f(1, 2, 3, 4)
    _, sums = attention(q, q, q, f(3, 3))
    cases: list[tuple[Any, tuple[Any, ...], set[int] | None]] = [
        (aten.mm.default, (f(2, 3), f(3, 4)), {1}),
        (aten.convolution.default, conv(f(1, 2, 3, 3), f(2, 2, 1, 1)), {1}),
        (aten._prelu_kernel_backward.default, (f(4), f(4), f(4)), {1, 2}),
        (attention_backward, (q, q, q, q, q, sums, f(3, 3)), {1, 2, 3, 4}),
        (aten.cat.default, ([f(2), f(2)],), set()),
        (aten.nll_loss_backward.default, (f(()), f(4, 6), i(6, 4), f(6), 2, -100, f(())), {3}),
        (aten.cholesky_solve.default, (f(4, 2), f(4, 4)), None),
    ]
    for op, args, needed in cases:
        node = instance(op, args).node
        rule = rule_of(node)
        group = next(each.operands for each in rule.linear if each.results != frozenset())
        assert Factors().may_pass(node, rule, group) is (needed is not None), op  # a solve divides by what may be zero
        for number in needed or ():
            assert not Factors({node.operands[number]}).may_pass(node, rule, group), (op, number)


@pytest.mark.parametrize(("op", "args"), [(aten.div.Tensor, (f(4), f(4))), (aten.addcdiv.default, (f(4),) * 3)])
def test_partial_sums_are_divided_by_no_tensor(op: Any, args: tuple[Any, ...]) -> None:
    node = instance(op, args).node
    rule = rule_of(node)
    group = next(each.operands for each in rule.linear if len(node.operands) - 1 not in each.operands)
    assert not Factors().may_pass(node, rule, group)


@pytest.mark.parametrize("op", [aten.div.Tensor, aten.div.Scalar])
@pytest.mark.parametrize("number", [2, 0, 0.0])
def test_partial_sums_are_divided_by_numbers_that_are_not_zero(op: Any, number: float) -> None:
    node = instance(op, (f(4), number)).node
    assert Factors().may_pass(node, rule_of(node), frozenset({0})) is (number != 0)


Call = tuple[Any, tuple[Any, ...]]
CONV = CONVOLUTIONS["bias"]
GRAD = aten.convolution.default(*CONV)


def linear_rule_of(of: Instance) -> ShardingRule:
    entry = BOOK.entry(of.node.op)
    made = entry.make(of.node) if entry is not None else None
    assert made is not None
    return made


NAMED: dict[str, Call] = {
    "convolution_backward": (
        aten.convolution_backward.default,
        (GRAD, *CONV[:2], [4], *CONV[3:], [True, True, True]),
    ),
    "layer_norm_backward": (
        aten.native_layer_norm_backward.default,
        (f(4, 6), f(4, 6), [6], f(4, 1), f(4, 1), f(6), f(6), [True, True, True]),
    ),
    "group_norm_backward": (
        aten.native_group_norm_backward.default,
        (f(4, 6, 5), f(4, 6, 5), f(4, 3), f(4, 3), f(6), 4, 6, 5, 3, [True, True, True]),
    ),
    "batch_norm": (aten.native_batch_norm.default, (f(4, 6), f(6), f(6), f(6), f(6).abs(), True, 0.1, 1e-5)),
    "solve": (aten._linalg_solve_ex.default, (f(3, 4, 4) + 4 * torch.eye(4, dtype=torch.float64), f(3, 4, 2))),
    "nll_loss": (aten.nll_loss_forward.default, (f(4, 6), i(6, 4), f(6), 2, -100)),
    "attention": (torch.ops.shardfx.attention.default, (f(2, 3, 4, 5), f(2, 3, 4, 5), f(2, 3, 4, 5))),
    "fill by a tensor": (aten.fill.Tensor, (f(4, 6), f(()))),
    "copy": (aten.copy.default, (f(4, 6), f(6))),
    "prod over one": (aten.prod.dim_int, (f(4, 1), 1)),
    "median of one": (aten.median.dim, (f(4, 1), 1)),
    "a product over nothing": (aten.addmm.default, (f(4, 6), f(4, 0), f(0, 6))),
}


@pytest.mark.parametrize("call", NAMED.values(), ids=NAMED)
def test_rules_name_the_results_that_are_partial(call: Call) -> None:
    of = instance(*call)
    found = Oracle(of).linear()
    assert found and not missing_sums(linear_rule_of(of), found), [str(each) for each in found]
    entry = BOOK.entry(of.node.op)
    assert entry is not None and not refutations(entry, of)


NOT_LINEAR: dict[str, Call] = {
    "xlogy": (aten.xlogy.Tensor, (f(4, 6), f(4, 6).abs())),
    "nan_to_num": (aten.nan_to_num.default, (f(4, 6),)),
    "nansum": (aten.nansum.default, (f(4, 6), [1])),
    "a tiny constant": (aten.add.Scalar, (f(4, 6), 1e-12)),
    "a comparison": (aten.eq.Tensor, (f(4, 6), f(4, 6))),
    "a power that may be infinite": (aten.ldexp.Tensor, (f(4, 6), f(4, 6))),
    "what is true by accident": (aten.logical_xor.default, (f(4, 6), f(4, 6))),
    "masked_fill": (aten.masked_fill.Scalar, (f(4, 6), b(4, 6), 1e-12)),
}


@pytest.mark.parametrize("call", NOT_LINEAR.values(), ids=NOT_LINEAR)
def test_what_is_linear_but_for_some_numbers_is_not(call: Call) -> None:
    assert Oracle(instance(*call)).linear() == []
