"""What is said to be sure of an op's results is so: of all hand-picked instances, on values of all kinds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from shardfx.ir.graph import Node, Value
from shardfx.ir.ops.fused_attention import attention, attention_backward
from shardfx.ir.oracle.instance import Instance, instance
from shardfx.ir.rulebook import default_rules
from shardfx.ir.rules.book import replicated
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.passes.finite import ALL, FINITE, NONNEGATIVE, NONZERO, Sure, keeps_terms_finite, of_results
from tests.instances import conv, picked
from tests.op_calls import f, i

aten = torch.ops.aten
BOOK = default_rules()
INF = float("inf")
KINDS = ([1.0, 2.0], [0.5, -1.0], [0.0, 1.0, 2.0], [-1.0, 0.0, 3.0], [INF, 1.0, 0.5], [-INF, 0.0, 1.0])
"""What a tensor holds: positive, of both signs, with zeros, with infinities."""


def seen(tensor: Tensor) -> Sure:
    """What holds of all elements of a tensor; a NaN is left aside."""
    kept = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    finite, positive = not bool(kept.isinf().any()), not bool((kept < 0).any())
    return (
        (FINITE if finite else Sure.NOTHING)
        | (NONZERO if not bool((tensor == 0).any()) else Sure.NOTHING)
        | (NONNEGATIVE if positive else Sure.NOTHING)
    )


def rule_of(node: Node) -> ShardingRule:
    entry = BOOK.entry(node.op)
    return (entry.make(node) if entry is not None else None) or replicated(node)


def wrong(of: Instance) -> str:
    """What is said of the results of an instance and does not hold, or ""."""
    facts = {v: seen(t) for v, t in zip(of.node.operands, of.tensors, strict=True)}
    if any(v.type.numel == 0 for v in (*of.node.operands, *of.node.outs)):
        return ""
    said = of_results(of.node, facts, rule_of(of.node))
    for value, result in zip(of.node.results, of.results, strict=True):
        if isinstance(value, Value) and result is not None:
            claimed = said[value.index] if isinstance(said, tuple) else said
            if claimed & seen(result) != claimed:
                given = [seen(t) for t in of.tensors]
                return f"{of}: result {value.index} is said to be {claimed} and is {seen(result)}, of {given}"
    return ""


def on_kinds(of: Instance) -> Iterator[Instance]:
    """An instance on tensors of each kind, where it takes them."""
    floats = [k for k, t in enumerate(of.tensors) if t.is_floating_point()]
    draw = torch.Generator().manual_seed(0)
    for kinds in list(itertools.product(KINDS, repeat=min(len(floats), 2)))[::5]:
        tensors = list(of.tensors)
        for at, k in enumerate(floats):
            values = torch.tensor(kinds[at % len(kinds)], dtype=tensors[k].dtype)
            tensors[k] = values[torch.randint(0, len(values), tensors[k].shape, generator=draw)]
        made = of.on(tensors)
        try:
            assert made.results
        except (RuntimeError, IndexError, ValueError):  # a matrix that has no inverse
            continue
        yield made


@pytest.mark.long
def test_what_is_said_of_results_holds() -> None:
    found = [why for of in picked() for made in on_kinds(of) if (why := wrong(made))]
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
    "batch norm in evaluation": (
        aten.native_batch_norm.default,
        (torch.ones(3, 2), None, None, torch.zeros(2), torch.full((2,), -1e-5), False, 0.1, 1e-5),
    ),
    "the mean of a layer norm": (aten.native_layer_norm.default, (torch.full((2, 4), INF), [4], None, None, 1e-5)),
    "layer norm times inf": (
        aten.native_layer_norm.default,
        (torch.rand(2, 4), [4], torch.full((4,), INF), None, 1e-5),
    ),
    "dropout of inf": (aten.native_dropout.default, (torch.full((9,), INF), 0.1, False)),
    "leaky_relu of slope 0": (aten.leaky_relu.default, (-ONE, 0.0)),
    "leaky_relu of slope inf": (aten.leaky_relu.default, (-ONE, INF)),
    "clamp to 0": (aten.clamp.default, (ONE, 1, 0)),
    "clamp to inf": (aten.clamp.default, (ONE, INF)),
    "clamp to tensors": (aten.clamp.Tensor, (ONE, ONE, ONE - 1)),
    "softplus of beta 0": (aten.softplus.default, (ONE, 0)),
    "scatter of inf": (aten.scatter.value, (ONE, 0, torch.arange(3), INF)),
    "index_fill of inf": (aten.index_fill.int_Scalar, (ONE, 0, torch.arange(3), INF)),
    "padding of inf": (aten.constant_pad_nd.default, (ONE, [1, 1], INF)),
    "masked_fill of -inf": (aten.masked_fill.Scalar, (ONE, ONE > 0, -INF)),
    "full of a half as int": (aten.full.default, ([3], 0.5), {"dtype": torch.int64}),
    "full of too little": (aten.full_like.default, (ONE, 1e-60), {"dtype": torch.float32}),
    "a cast to int": (aten._to_copy.default, (ONE / 2,), {"dtype": torch.int64}),
    "bits": (aten.view.dtype, (torch.full((2,), 0x7FF0000000000000), torch.float64)),
    "a variance over nothing": (aten.var.correction, (f(4), None), {"correction": 4}),
    "slogdet": (aten._linalg_slogdet.default, (torch.zeros(2, 2),)),
    "pow to inf": (aten.pow.Tensor_Scalar, (ONE * 2, INF)),
    "add times inf": (aten.add.Tensor, (ONE, ONE), {"alpha": INF}),
    "where": (aten.where.ScalarSelf, (ONE > 0, INF, ONE)),
    "an index": (aten.embedding.default, (torch.full((3, 2), INF), i(3, 4))),
}


@pytest.mark.filterwarnings("ignore:var\\(\\). degrees of freedom is <= 0:UserWarning")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_is_infinite_or_zero_is_not_said_to_be_otherwise(call: tuple[object, ...]) -> None:
    op, args, *kwargs = call
    made = instance(op, args, kwargs[0] if kwargs else {})  # type: ignore[arg-type]
    assert not wrong(made)


def test_what_models_are_made_of_stays_finite() -> None:
    """A mask of -inf in attention, or in front of a softmax, leaves what follows finite."""
    finite = [
        (aten._softmax.default, (torch.tensor([-INF, 0.0]), 0, False), [Sure.NOTHING]),
        (aten.native_layer_norm.default, (f(2, 4), [4], f(4), f(4), 1e-5), [Sure.NOTHING, FINITE, FINITE]),
        (attention, (f(1, 2, 3, 4), f(1, 2, 3, 4), f(1, 2, 3, 4), f(3, 3)), None),
    ]
    for op, args, given in finite:
        node = instance(op, args).node
        known = given or [FINITE] * 3 + [Sure.NOTHING]
        said = of_results(node, dict(zip(node.operands, known, strict=True)), rule_of(node))
        assert FINITE in (said[0] if isinstance(said, tuple) else said)
    assert seen(ONE) == ALL


def test_terms_are_multiplied_by_what_is_finite_alone() -> None:
    q = f(1, 2, 3, 4)
    _, sums = attention(q, q, q, f(3, 3))
    cases: list[tuple[Any, tuple[Any, ...], set[int] | None]] = [
        (aten.mm.default, (f(2, 3), f(3, 4)), {1}),
        (aten.convolution.default, conv(f(1, 2, 3, 3), f(2, 2, 1, 1)), {1}),
        (aten._prelu_kernel_backward.default, (f(4), f(4), f(4)), {1, 2}),
        (aten.gelu_backward.default, (f(4), f(4)), set()),
        (attention_backward, (q, q, q, q, q, sums, f(3, 3)), {1, 2, 3, 4}),
        (aten.cat.default, ([f(2), f(2)],), set()),
        (aten.nll_loss_backward.default, (f(()), f(4, 6), i(6, 4), f(6), 2, -100, f(())), {3}),
        (aten.cholesky_solve.default, (f(4, 2), f(4, 4)), None),
    ]
    for op, args, needed in cases:
        node = instance(op, args).node
        rule = rule_of(node)
        group = next(each.operands for each in rule.linear if each.results != frozenset())
        facts = {value: FINITE for i, value in enumerate(node.operands) if needed is None or i in needed}
        if needed is None:  # it divides by what may be zero
            assert not keeps_terms_finite(node, rule, group, facts), op
            continue
        assert keeps_terms_finite(node, rule, group, facts), op
        for value in list(facts):
            assert not keeps_terms_finite(node, rule, group, facts | {value: Sure.NOTHING}), op
