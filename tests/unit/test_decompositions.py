"""Decompositions at capture equal their ops: at borders, where exponentials overflow, and on empty tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardfx.ir.capture.canonical.decompositions import DECOMPOSED, decompositions

aten, F64 = torch.ops.aten, torch.float64
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
