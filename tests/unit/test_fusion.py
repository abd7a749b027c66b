"""Compiled programs: elementwise values computed where they are used hold nothing, and calls share kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from shardfx.ir.cost.replay import kind_of, replay
from shardfx.ir.graph import Input, InputKind, Output, OutputKind, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops import memory_ops
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.spec import Spec, TensorType

aten = torch.ops.aten
SIZE = 64 * 64 * 4


def program() -> RankProgram:
    """Two products, and between them elementwise calls, one of which is seen through a view and by a reduction."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(aten.mm.default, (x, x))
    shifted = graph.call_function(aten.add.Tensor, (first, 1.0))
    view = graph.call_function(aten.view.default, (shifted, [4096]))
    total = graph.call_function(aten.sum.default, (view,))
    scaled = graph.call_function(aten.mul.Tensor, (shifted, 2.0))
    second = graph.call_function(aten.mm.default, (scaled, x))
    graph.output((second, total))
    given, scalar = (
        Value(TensorType(shape, torch.float32), spec=Spec.replicated(len(shape))) for shape in ((64, 64), ())
    )
    outputs = Output(OutputKind.RESULT, "0", given), Output(OutputKind.LOSS, "loss", scalar)
    return RankProgram(0, Mesh(dp=1), graph, (Input(InputKind.ARGUMENT, "x", given),), outputs)


def test_elementwise_values_between_kernels_hold_nothing() -> None:
    """``shifted`` is computed in the sum and in ``scaled``, which a product takes: it is stored."""
    made = [(storage.nbytes, storage.born, storage.last) for storage in replay(program(), compiled=True).storages]
    first, shifted, total, scaled, second = made
    assert [nbytes for nbytes, _, _ in made] == [SIZE, 0, 4, SIZE, SIZE]
    assert first[2] == shifted[2] == scaled[1] and scaled[2] == second[1] and total[2] == second[2]


def test_uncompiled_programs_store_elementwise_values() -> None:
    assert [storage.nbytes for storage in replay(program()).storages] == [SIZE, SIZE, 4, SIZE, SIZE]


def test_kernels_load_what_their_elementwise_operands_take() -> None:
    """One kernel for the sum and ``scaled``, at its last call: it loads ``first`` once."""
    touched = [cost.touched for cost in replay(program(), compiled=True).costs]
    assert touched[1:5] == [0, 0, 0, SIZE + 4 + SIZE]


# ---- kernels

Build = Callable[..., tuple[fx.Node, ...]]
ROWS = 64
NBYTES = ROWS * ROWS * 2


def costs_of(build: Build, *names: str) -> dict[str, float]:
    """The bytes that each call of a program loads and stores, of those that do. ``build`` makes its results, matrices,
    of its inputs, matrices of these names."""
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in names]
    results = build(graph.call_function, *inputs)
    graph.output(results)
    given = Value(TensorType((ROWS, ROWS), torch.bfloat16), spec=Spec.replicated(2))
    outputs = [Output(OutputKind.RESULT, str(at), given) for at in range(len(results))]
    rank_program = RankProgram(
        0, Mesh(dp=1), graph, tuple(Input(InputKind.ARGUMENT, name, given) for name in names), tuple(outputs)
    )
    replayed = replay(rank_program, compiled=True)
    both = zip(replayed.calls, replayed.costs, strict=True)
    return {kind_of(node): cost.touched for node, cost in both if cost.touched}


def test_an_update_by_adamw_is_one_kernel_of_14_bytes_a_parameter() -> None:
    def adamw(call: Any, p: fx.Node, g: fx.Node, m: fx.Node, v: fx.Node) -> tuple[fx.Node, ...]:
        first = call(aten.lerp.Scalar, (m, g, 0.1))
        second = call(aten.addcmul.default, (call(aten.mul.Tensor, (v, 0.999)), g, g))
        scale = call(aten.add.Tensor, (call(aten.sqrt.default, (second,)), 1e-8))
        new = call(aten.addcdiv.default, (p, first, scale))
        return tuple(call(memory_ops.write, (old, x)) for old, x in ((m, first), (v, second), (p, new)))

    (touched,) = costs_of(adamw, "p", "g", "m", "v").values()
    assert touched == 14 * ROWS * ROWS


def test_both_gradients_of_a_gated_unit_are_one_kernel() -> None:
    def gated(call: Any, gate: fx.Node, up: fx.Node, grad: fx.Node) -> tuple[fx.Node, ...]:
        of_up = call(aten.mul.Tensor, (grad, call(aten.silu.default, (gate,))))
        return of_up, call(aten.silu_backward.default, (call(aten.mul.Tensor, (grad, up)), gate))

    assert costs_of(gated, "gate", "up", "grad") == {"silu_backward": 5 * NBYTES}


def test_values_with_a_product_between_them_are_two_kernels() -> None:
    """``exp`` and ``mul`` both load x, and the product of the one is an operand of the other."""

    def two(call: Any, x: fx.Node, w: fx.Node) -> tuple[fx.Node, ...]:
        product = call(aten.mm.default, (call(aten.exp.default, (x,)), w))
        return (call(aten.mul.Tensor, (product, x)),)

    found = costs_of(two, "x", "w")
    assert found["exp"] == 2 * NBYTES and found["mul"] == 3 * NBYTES


def test_what_uses_a_sum_over_rows_is_in_another_kernel_and_of_a_row_in_its_own() -> None:
    def divided(dims: list[int]) -> Build:
        def build(call: Any, x: fx.Node) -> tuple[fx.Node, ...]:
            return (call(aten.div.Tensor, (x, call(aten.sum.dim_IntList, (x, dims, True)))),)

        return build

    assert costs_of(divided([1]), "x") == {"div": 2 * NBYTES}
    assert costs_of(divided([0]), "x") == {"sum": NBYTES + 2 * ROWS, "div": 2 * NBYTES + 2 * ROWS}


def test_what_loads_many_tensors_is_stored_if_it_has_several_users() -> None:
    def chain(call: Any, first: fx.Node, *more: fx.Node) -> tuple[fx.Node, ...]:
        total = first
        for each in more:
            total = call(aten.add.Tensor, (total, each))
        product = call(aten.mm.default, (call(aten.exp.default, (total,)), first))
        return (call(aten.mul.Tensor, (product, total)),)

    few, many = costs_of(chain, *"abcd"), costs_of(chain, *"abcde")
    assert [few["exp"], few["mul"]] == [5 * NBYTES, 6 * NBYTES]
    assert [many["exp"], many["mul"]] == [7 * NBYTES, 3 * NBYTES]
