"""Which operands may be partial sums, and which results then are: what rules say, and what running the op says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardfx.ir.oracle.completeness import missing_sums
from shardfx.ir.oracle.draws import draws
from shardfx.ir.oracle.instance import Instance, instance
from shardfx.ir.oracle.sharding_search import Oracle
from shardfx.ir.oracle.soundness import refutations
from shardfx.ir.rulebook import default_rules
from shardfx.ir.rules.sharding_rule import ShardingRule, rule_text
from shardfx.ir.rules.template import parse_linear
from tests.instances import CONVOLUTIONS
from tests.op_calls import b, f, i

aten = torch.ops.aten
BOOK = default_rules()
Call = tuple[Any, tuple[Any, ...]]
CONV = CONVOLUTIONS["bias"]
GRAD = aten.convolution.default(*CONV)


def rule_of(of: Instance) -> ShardingRule:
    entry = BOOK.entry(of.node.op)
    made = entry.make(of.node) if entry is not None else None
    assert made is not None
    return made


NAMED: dict[str, Call] = {
    "convolution_backward": (
        aten.convolution_backward.default,
        (GRAD, *CONV[:2], [4], *CONV[3:], [True, True, True]),
    ),
    "layer_norm": (aten.native_layer_norm.default, (f(4, 6), [6], f(6), f(6), 1e-5)),
    "layer_norm_backward": (
        aten.native_layer_norm_backward.default,
        (f(4, 6), f(4, 6), [6], f(4, 1), f(4, 1), f(6), f(6), [True, True, True]),
    ),
    "group_norm_backward": (
        aten.native_group_norm_backward.default,
        (f(4, 6, 5), f(4, 6, 5), f(4, 3), f(4, 3), f(6), 4, 6, 5, 3, [True, True, True]),
    ),
    "batch_norm": (aten.native_batch_norm.default, (f(4, 6), f(6), f(6), f(6), f(6).abs(), True, 0.1, 1e-5)),
    "grid_sampler_backward": (
        aten.grid_sampler_2d_backward.default,
        (f(2, 3, 4, 4), f(2, 3, 5, 5), f(2, 4, 4, 2) / 3, 0, 0, False, [True, True]),
    ),
    "solve": (aten._linalg_solve_ex.default, (f(3, 4, 4) + 4 * torch.eye(4, dtype=torch.float64), f(3, 4, 2))),
    "nll_loss": (aten.nll_loss_forward.default, (f(4, 6), i(6, 4), f(6), 2, -100)),
    "attention": (torch.ops.shardfx.attention.default, (f(2, 3, 4, 5), f(2, 3, 4, 5), f(2, 3, 4, 5))),
    "zeros_like": (aten.zeros_like.default, (f(4, 6),)),
    "full_like": (aten.full_like.default, (f(4, 6), 2.0)),
    "fill by a number": (aten.fill.Scalar, (f(4, 6), 2.0)),
    "fill by a tensor": (aten.fill.Tensor, (f(4, 6), f(()))),
    "new_ones": (aten.new_ones.default, (f(4, 6), [3, 5])),
    "copy": (aten.copy.default, (f(4, 6), f(6))),
    "avg_pool_backward": (
        aten.avg_pool2d_backward.default,
        (f(2, 3, 4, 4), f(2, 3, 8, 8), [2, 2], [2, 2], [0, 0], False, True, None),
    ),
    "pad_backward": (aten.reflection_pad1d_backward.default, (f(2, 3, 8), f(2, 3, 4), [2, 2])),
    "amax over one": (aten.amax.default, (f(4, 1, 6), [1])),
    "prod over one": (aten.prod.dim_int, (f(4, 1), 1)),
    "sort of one": (aten.sort.default, (f(4, 1), 1)),
    "median of one": (aten.median.dim, (f(4, 1), 1)),
    "a product over nothing": (aten.addmm.default, (f(4, 6), f(4, 0), f(0, 6))),
}


@pytest.mark.parametrize("call", NAMED.values(), ids=NAMED)
def test_rules_name_the_results_that_are_partial(call: Call) -> None:
    of = instance(*call)
    found = Oracle(of).linear()
    assert found and not missing_sums(rule_of(of), found), [str(each) for each in found]
    entry = BOOK.entry(of.node.op)
    assert entry is not None and not refutations(entry, of)


NOT_LINEAR: dict[str, Call] = {
    "xlogy": (aten.xlogy.Tensor, (f(4, 6), f(4, 6).abs())),
    "xlog1py": (aten.special_xlog1py.default, (f(4, 6), f(4, 6).abs())),
    "nan_to_num": (aten.nan_to_num.default, (f(4, 6),)),
    "nansum": (aten.nansum.default, (f(4, 6), [1])),
    "a tiny constant": (aten.add.Scalar, (f(4, 6), 1e-12)),
    "a comparison": (aten.eq.Tensor, (f(4, 6), f(4, 6))),
    "of an infinity": (aten.isneginf.default, (f(4, 6),)),
    "the number beside one": (aten.nextafter.default, (f(4, 6), f(4, 6))),
    "a power that may be infinite": (aten.ldexp.Tensor, (f(4, 6), f(4, 6))),
    "what is true by accident": (aten.logical_xor.default, (f(4, 6), f(4, 6))),
    "masked_fill": (aten.masked_fill.Scalar, (f(4, 6), b(4, 6), 1e-12)),
}


@pytest.mark.parametrize("call", NOT_LINEAR.values(), ids=NOT_LINEAR)
def test_what_is_linear_but_for_some_numbers_is_not(call: Call) -> None:
    assert Oracle(instance(*call)).linear() == []


def test_tensors_without_elements_are_drawn_too() -> None:
    of = instance(aten.gather.default, (f(0), 0, i(1, 0)))
    entry = BOOK.entry(of.node.op)
    assert entry is not None and list(draws(of)) and not refutations(entry, of, drawn=True)


def test_the_text_of_what_passes() -> None:
    text = "0|1&2>0|3>"
    groups = parse_linear(text)
    assert "|".join(map(str, groups)) == text
    of = instance(*NAMED["batch_norm"])
    made = rule_of(of)
    assert made.passes("sum", frozenset({1, 2})) == {0}
    assert made.passes("max", frozenset({3})) == frozenset()  # which nobody looks at
    assert made.passes("sum", frozenset({1, 2, 3, 4})) == {0}
    assert made.passes("sum", frozenset({0})) is None and made.passes("max", frozenset({1, 2})) is None


def test_a_result_that_does_not_know_a_factor_is_not_summed() -> None:
    """The gradient of a bias is the same whichever input channels a rank has."""
    of = instance(*NAMED["convolution_backward"])
    made = rule_of(of)
    assert rule_text(made).endswith("-> n ci h0! h1!, co ci k0! k1!, co") and made.unread == {"ci": {2}}
    entry = BOOK.entry(of.node.op)
    assert entry is not None and not refutations(entry, of)
