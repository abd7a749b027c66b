"""What is stored is stepped where it lies: also what was gathered with what lies beside it, once that has arrived."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import pytest
import torch
from torch import fx

import shardfx as sx
from shardfx.ir.graph import Input, InputKind, Output, OutputKind, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops import memory_ops, pack
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.program.validate_program import validate_program
from shardfx.ir.spec import TensorType
from tests.stepped import KINDS, small_plan

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def stepped_beside(order: Sequence[str]) -> RankProgram:
    """``a`` and ``b`` are gathered as one memory, and ``a`` is stepped, in this order of calls."""
    graph, made = fx.Graph(), dict[str, fx.Node]()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    made["both"] = graph.call_function(memory_ops.adjoin, ([a, b],))
    for what in order:
        if what == "send":
            args = (made["both"], 2, "dp2/dp@0")
            made[what] = graph.call_function(c10d.all_gather_into_tensor.default, args)
        elif what == "wait":
            made[what] = graph.call_function(c10d.wait_tensor.default, (made["send"],))
        elif what == "step":
            made[what] = graph.call_function(aten.mul.out, (a, 0.9), {"out": a})
        else:
            made[what] = graph.call_function(aten.neg.default, (made["both"] if what == "both read" else b,))
    graph.output((made["step"],))
    value = Value(TensorType((2, 2), torch.float32))
    inputs = tuple(Input(InputKind.PARAMETER, name, value) for name in "ab")
    return RankProgram(0, Mesh(dp=2), graph, inputs, (Output(OutputKind.PARAMETER, "a", value),))


@pytest.mark.parametrize(
    ("order", "what"),
    [
        ("send, wait, step, b read", ""),
        ("send, wait, both read, step", ""),
        ("send, step, wait", "is written over while"),
        ("send, wait, step, both read", "is read after its memory was written over"),
    ],
)
def test_what_was_gathered_beside_others_may_be_written_over_once_it_has_arrived(order: str, what: str) -> None:
    program = stepped_beside(order.split(", "))
    if not what:
        validate_program(program)
        return
    with pytest.raises(sx.Error, match=what):
        validate_program(program)


@pytest.mark.parametrize(("op", "whole"), [(aten.mm.out, False), (aten.add.out, True)])
def test_a_call_that_reads_its_destination_is_done_element_by_element(op: torch._ops.OpOverload, whole: bool) -> None:
    graph = fx.Graph()
    a = graph.placeholder("a")
    mine = graph.call_function(memory_ops.own, (a,))
    made = graph.call_function(op, (mine, a), {"out": mine})
    graph.output((made,))
    value = Value(TensorType((2, 2), torch.float32))
    inputs, outputs = (Input(InputKind.PARAMETER, "a", value),), (Output(OutputKind.GRADIENT, "a", value),)
    program = RankProgram(0, Mesh(dp=2), graph, inputs, outputs)
    if whole:
        validate_program(program)
        return
    with pytest.raises(sx.Error, match="writes over own, which it reads"):
        validate_program(program)


def test_what_is_spread_lies_in_other_memory() -> None:
    """It would be read after some of it was written over."""
    graph = fx.Graph()
    gathered = graph.call_function(memory_ops.own, (graph.placeholder("a"),))
    graph.output((graph.call_function(memory_ops.spread, (gathered, gathered, [[1], [1]], 2)),))
    value = Value(TensorType((4,), torch.float32))
    program = RankProgram(0, Mesh(dp=2), graph, (Input(InputKind.PARAMETER, "a", value),), ())
    with pytest.raises(sx.Error, match="writes over own, which it reads"):
        validate_program(program)


@pytest.mark.long
def test_new_parameters_are_written_where_they_belong_out_of_what_was_gathered() -> None:
    """And stand nowhere else before."""
    pm = small_plan(KINDS["AdamW"], Mesh(dp=2), zero=1)
    program = pm.rank_program(0)
    targets = [node.target for node in program.graph.nodes]
    assert memory_ops.spread not in targets
    places = [node for node in program.graph.nodes if node.target is memory_ops.write_part]
    assert {node.args[0].name for node in places} == {node.name for node in _parameters(program)}
    assert pm.verify()


def _parameters(program: RankProgram) -> list[fx.Node]:
    nodes = (node for node in program.graph.nodes if node.op == "placeholder")
    pairs = zip(nodes, program.inputs, strict=True)
    return [node for node, given in pairs if given.kind is InputKind.PARAMETER]


@pytest.mark.parametrize(
    ("read", "what"),
    [
        (1, ""),
        (0, "is read after its memory was written over"),
        (-1, "is read after its memory was written over"),
        (7, "takes another thing of unflatten than one of its 2 results"),
    ],
)
def test_parts_of_a_buffer_are_written_over_one_by_one(read: int, what: str) -> None:
    """``read``: which part is read behind the step of the first one; -1: all of the buffer."""
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    flat = graph.call_function(pack.flatten, ([a, b], 1))
    parts = graph.call_function(pack.unflatten, (flat, [[2, 2], [2, 2]], 1))
    got = [graph.call_function(operator.getitem, (parts, i)) for i in ((0, 1) if read < 2 else (0, read))]
    step = graph.call_function(aten.mul.out, (got[0], 0.9), {"out": got[0]})
    also = graph.call_function(aten.neg.default, (flat if read < 0 else got[min(read, 1)],))
    graph.output((graph.call_function(aten.add.Tensor, (step, also)),))
    value = Value(TensorType((2, 2), torch.float32))
    inputs = tuple(Input(InputKind.PARAMETER, name, value) for name in "ab")
    program = RankProgram(0, Mesh(dp=2), graph, inputs, (Output(OutputKind.PARAMETER, "a", value),))
    if not what:
        validate_program(program)
        return
    with pytest.raises(sx.Error, match=what):
        validate_program(program)
