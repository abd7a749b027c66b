"""Compiled programs: elementwise values computed where they are used hold nothing, and calls share kernels."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import fx

from shardfx.ir.cost.replay import kind_of, replay
from shardfx.ir.graph import OutputKind
from shardfx.ir.ops import memory_ops
from tests.rank_programs import Call, Write, written

aten = torch.ops.aten
SIZE, NBYTES = 64 * 64 * 4, 64 * 64 * 2


def between_products(call: Call, x: fx.Node) -> list[fx.Node]:
    """Two products, and between them elementwise calls, one of which is seen through a view and by a reduction."""
    shifted = call(aten.add.Tensor, call(aten.mm.default, x, x), 1.0)
    total = call(aten.sum.default, call(aten.view.default, shifted, [4096]))
    return [call(aten.mm.default, call(aten.mul.Tensor, shifted, 2.0), x), total]


def test_elementwise_values_between_kernels_hold_nothing() -> None:
    """``shifted`` is computed in the sum and in what the last product takes, which is stored; one kernel for both, at
    its last call, loads the first product once."""
    program = written(between_products, "x", shape=(64, 64), gives=OutputKind.RESULT)
    assert [storage.nbytes for storage in replay(program).storages] == [SIZE, SIZE, 4, SIZE, SIZE]
    replayed = replay(program, compiled=True)
    made = [(storage.nbytes, storage.born, storage.last) for storage in replayed.storages]
    first, shifted, total, scaled, second = made
    assert [nbytes for nbytes, _, _ in made] == [SIZE, 0, 4, SIZE, SIZE]
    assert first[2] == shifted[2] == scaled[1] and scaled[2] == second[1] and total[2] == second[2]
    assert [cost.touched for cost in replayed.costs][1:5] == [0, 0, 0, SIZE + 4 + SIZE]


# ---- kernels


def costs_of(write: Write, *names: str) -> dict[str, float]:
    """The bytes that each call of a program on matrices loads and stores, of those that do."""
    replayed = replay(
        written(write, *names, shape=(64, 64), dtype=torch.bfloat16, gives=OutputKind.RESULT), compiled=True
    )
    both = zip(replayed.calls, replayed.costs, strict=True)
    return {kind_of(node): cost.touched for node, cost in both if cost.touched}


def test_an_update_by_adamw_is_one_kernel_of_14_bytes_a_parameter() -> None:
    def adamw(call: Call, p: fx.Node, g: fx.Node, m: fx.Node, v: fx.Node) -> list[fx.Node]:
        first = call(aten.lerp.Scalar, m, g, 0.1)
        second = call(aten.addcmul.default, call(aten.mul.Tensor, v, 0.999), g, g)
        scale = call(aten.add.Tensor, call(aten.sqrt.default, second), 1e-8)
        new = call(aten.addcdiv.default, p, first, scale)
        return [call(memory_ops.write, old, x) for old, x in ((m, first), (v, second), (p, new))]

    (touched,) = costs_of(adamw, "p", "g", "m", "v").values()
    assert touched == 14 * 64 * 64


def gated(call: Call, gate: fx.Node, up: fx.Node, grad: fx.Node) -> list[fx.Node]:
    """Both gradients of a gated unit."""
    of_up = call(aten.mul.Tensor, grad, call(aten.silu.default, gate))
    return [of_up, call(aten.silu_backward.default, call(aten.mul.Tensor, grad, up), gate)]


def around_a_product(call: Call, x: fx.Node, w: fx.Node) -> list[fx.Node]:
    """``exp`` and ``mul`` both load x, and the product of the one is an operand of the other."""
    return [call(aten.mul.Tensor, call(aten.mm.default, call(aten.exp.default, x), w), x)]


def divided(*dims: int) -> Write:
    """By a sum over some dims."""
    return lambda call, x: [call(aten.div.Tensor, x, call(aten.sum.dim_IntList, x, dims, True))]


def sum_of_many(call: Call, first: fx.Node, *more: fx.Node) -> list[fx.Node]:
    """With two users, and a product between them."""
    total = first
    for each in more:
        total = call(aten.add.Tensor, total, each)
    return [call(aten.mul.Tensor, call(aten.mm.default, call(aten.exp.default, total), first), total)]


@pytest.mark.parametrize(
    ("write", "names", "touched"),
    [
        (gated, ("gate", "up", "grad"), {"silu_backward": 5 * NBYTES}),
        (around_a_product, ("x", "w"), {"exp": 2 * NBYTES, "mm": 3 * NBYTES, "mul": 3 * NBYTES}),
        (divided(1), ("x",), {"div": 2 * NBYTES}),
        (divided(0), ("x",), {"sum": NBYTES + 2 * 64, "div": 2 * NBYTES + 2 * 64}),
        (sum_of_many, "abcd", {"exp": 5 * NBYTES, "mm": 3 * NBYTES, "mul": 6 * NBYTES}),  # which is computed twice
        (sum_of_many, "abcde", {"exp": 7 * NBYTES, "mm": 3 * NBYTES, "mul": 3 * NBYTES}),  # which is stored
    ],
)
def test_calls_that_share_a_kernel_load_once(write: Write, names: Sequence[str], touched: dict[str, float]) -> None:
    assert costs_of(write, *names) == touched
