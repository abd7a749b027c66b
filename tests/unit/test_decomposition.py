"""A decomposition is taken for its op only if it is it: on numbers of both signs, on zeros and on ties."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardfx.ir.oracle.instance import instance
from shardfx.ir.rulebook import default_rules
from shardfx.runtime.verify.decomposition import Unjustified, justified
from tests.instances import picked
from tests.op_calls import f

aten = torch.ops.aten
BOOK = default_rules()


def clipped(x: Tensor, lo: float, hi: float) -> Tensor:
    return x.where(x > lo, lo)


WRONG: dict[str, tuple[Any, tuple[Any, ...], Callable[..., Any]]] = {
    "for positive numbers": (aten.relu.default, (f(4, 6),), lambda x: x * 1),
    "but for zero": (aten.sign.default, (f(4, 6),), lambda x: x / x.abs()),
    "but for large ones": (aten.hardtanh.default, (f(4, 6), -1.0, 1.0), clipped),
    "but for imaginary parts": (aten._conj.default, (torch.complex(f(4, 6), f(4, 6)),), lambda x: x * 1),
    "but for ties": (aten.argmax.default, (f(4, 6), 1), lambda x, dim: 5 - x.flip(1).argmax(dim)),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_one_that_is_right_for_some_numbers_alone_is_refused(
    case: tuple[Any, tuple[Any, ...], Callable[..., Any]],
) -> None:
    op, args, decomposition = case
    with pytest.raises(Unjustified, match="other numbers than the op"):
        justified(instance(op, args).node, decomposition)


@pytest.mark.long
def test_those_of_the_rule_book_are_the_op() -> None:
    nodes = [(of.node, BOOK.entry(of.node.op)) for of in picked()]
    apart = [(node, entry.expand) for node, entry in nodes if entry is not None and entry.expand]
    assert len({node.op for node, _ in apart}) > 10
    for node, expand in apart:
        justified(node, expand)


def test_numbers_that_the_op_does_not_take_are_left_out() -> None:
    chance = torch.rand(4, 6, dtype=torch.float64)
    node = instance(aten.binary_cross_entropy.default, (chance, chance)).node
    assert justified(node, torch._decomp.decomposition_table[node.op])
