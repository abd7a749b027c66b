"""The memory of compiled programs: elementwise values that are computed where they are used hold nothing."""

from __future__ import annotations

import torch
from torch import fx

from shardfx.ir.cost.replay import replay
from shardfx.ir.graph import Input, InputKind, Output, OutputKind, Value
from shardfx.ir.mesh import Mesh
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
    given, scalar = (Value(TensorType(shape, torch.float32), spec=Spec.whole(len(shape))) for shape in ((64, 64), ()))
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
    touched = [cost.touched for cost in replay(program(), compiled=True).costs]
    assert touched[1] == touched[2] == 0  # `shifted`, and its view
    assert touched[3:5] == [SIZE + 4, 2 * SIZE]
