"""A decomposition is taken for its op only if it is it; those at capture equal their ops at borders, too."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from shardfx.ir.capture.canonical.decompositions import DECOMPOSED, decompositions
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


F64 = torch.float64
ENDS = torch.tensor(
    [0.0, -0.0, 1, -1, 0.5, -0.5, math.inf, -math.inf, math.nan, 1e200, -1e200, 1e-200, 800, -800, 30, -30, 2],
    dtype=F64,
)
X, Y = torch.meshgrid(ENDS, ENDS, indexing="ij")
CHANCES = ENDS[[0, 2, 4, 11]].repeat(73)[: X.numel()].view_as(X)
ROWS = [[1.0, math.nan, 2], [math.inf, -math.inf], [-math.inf] * 2, [1e200] * 2, [1.0], [], [0.0] * 3, [math.inf, 1]]


def losses() -> Iterator[tuple[Any, ...]]:
    """Calls of losses, and of their gradients."""
    for reduction in range(3):
        for above in (1.7, math.inf, 0.0):
            grad = torch.full(X.shape if reduction == 0 else (), above, dtype=F64)
            pairs: list[tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = [
                (aten.mse_loss, (X, Y), ()),
                (aten.soft_margin_loss, (X, Y), ()),
                *((aten.smooth_l1_loss, (X, Y), (beta,)) for beta in (0.0, 0.5)),
                (aten.huber_loss, (X, Y), (0.7,)),
                *((aten.binary_cross_entropy, (CHANCES, CHANCES.flip(1), weight), ()) for weight in (None, Y)),
            ]
            for op, given, how in pairs:
                yield op.default, *given, reduction, *how
                yield getattr(aten, f"{op.__name__}_backward").default, grad, *given, reduction, *how
        yield aten.binary_cross_entropy_with_logits.default, X, Y, ENDS, ENDS.flip(0), reduction


def others() -> Iterator[tuple[Any, ...]]:
    """Calls of elementwise ops, and of statistics of rows."""
    yield aten.log_sigmoid_forward.default, X
    yield aten.log_sigmoid_backward.default, Y, X, aten.log_sigmoid_forward(X)[1]
    yield aten.nan_to_num.default, X, 1.0, 2.0, 3.0
    for values in ROWS:
        rows = torch.tensor([values, values], dtype=F64)
        yield aten.logsumexp.default, rows, [1]
        for p in (0, 1, 2, 3, 0.5, -1, math.inf, -math.inf) if values else (0, 2):
            yield aten.linalg_vector_norm.default, rows, p, [1]


def test_decompositions_equal_their_ops() -> None:
    table, tried = decompositions(), set()
    for op, *args in (*losses(), *others()):
        tried.add(op.overloadpacket)
        made, expected = (each if isinstance(each, tuple) else (each,) for each in (table[op](*args), op(*args)))
        for a, b in zip(made, expected, strict=True):
            if isinstance(b, Tensor) and b.numel():
                said = partial("{}, {}: {}".format, op, args[2:])
                torch.testing.assert_close(a, b, rtol=1e-10, atol=0, equal_nan=True, msg=said)
    assert tried >= {*DECOMPOSED}
