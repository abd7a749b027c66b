"""Which programs are valid: what may be written over, and when; what may be joined, sent and returned."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx

import shardfx as sx
from shardfx.ir.graph import InputKind, OutputKind
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops import memory_ops, pack
from shardfx.ir.program.aliasing import Aliasing
from shardfx.ir.program.validate_program import validate_program
from tests.rank_programs import GROUP, Call, Write, written
from tests.stepped import KINDS, small_plan

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
Node = fx.Node


def wrong(write: Write, gives: OutputKind = OutputKind.GRADIENT) -> str:
    """Why a program is not valid; empty where it is."""
    try:
        validate_program(written(write, gives=gives))
    except sx.Error as error:
        return str(error)
    return ""


def flat(call: Call, *offsets: int) -> tuple[Node, list[Node]]:
    memory = call(memory_ops.empty, [8], torch.float32)
    return memory, [call(memory_ops.part, memory, 1, at, [2, 2]) for at in offsets]


def joined(call: Call, memory: Node, values: list[Node]) -> list[Node]:
    return [call(memory_ops.join, memory, values, 1)]


def read_late(call: Call, a: Node, b: Node) -> list[Node]:
    product = call(aten.mm.default, a, b)
    done = call(c10d.wait_tensor.default, call(memory_ops.all_reduce_, product, "sum", GROUP))
    return [call(aten.add.Tensor, done, product)]


def unwaited(call: Call, a: Node, b: Node) -> list[Node]:
    return [call(aten.add.Tensor, call(c10d.all_reduce.default, a, "sum", GROUP), b)]


def while_it_travels(call: Call, a: Node, b: Node) -> list[Node]:
    product = call(aten.mm.default, a, b)
    sent = call(c10d.all_reduce.default, product, "sum", GROUP)
    over = call(memory_ops.write, product, a)
    return [call(c10d.wait_tensor.default, sent), over]


def overlapping(call: Call, a: Node, b: Node) -> list[Node]:
    memory, places = flat(call, 0, 2)
    return joined(call, memory, [call(memory_ops.write, at, a) for at in places])


def elsewhere(call: Call, a: Node, b: Node) -> list[Node]:
    memory, places = flat(call, 0, 4)
    return joined(call, memory, [call(memory_ops.write, at, a) for at in reversed(places)])


def transposed(call: Call, a: Node, b: Node) -> list[Node]:
    memory, (first, second) = flat(call, 0, 4)
    seen = call(aten.t.default, call(memory_ops.write, first, a))
    return joined(call, memory, [seen, call(memory_ops.write, second, b)])


def unwritten(call: Call, a: Node, b: Node) -> list[Node]:
    memory, (first, second) = flat(call, 0, 4)
    return joined(call, memory, [call(memory_ops.write, first, a), second])


def seen_in_order(call: Call, a: Node, b: Node) -> list[Node]:
    memory, (first, second) = flat(call, 0, 4)
    seen = call(aten.reshape.default, call(memory_ops.write, first, a), [4])
    copied = call(aten.mul.Tensor, call(memory_ops.write, second, b), 1)
    return joined(call, memory, [seen, copied])


def sum_of_itself(call: Call, a: Node, b: Node) -> list[Node]:
    mine = call(memory_ops.own, a)
    return [call(aten.add.out, mine, a, out=mine)]


def product_of_itself(call: Call, a: Node, b: Node) -> list[Node]:
    mine = call(memory_ops.own, a)
    return [call(aten.mm.out, mine, a, out=mine)]


def spread_over_itself(call: Call, a: Node, b: Node) -> list[Node]:
    gathered = call(memory_ops.own, a)
    return [call(memory_ops.spread, gathered, gathered, [[1], [1]], 2)]


PROGRAMS: dict[Write, str] = {
    read_late: "is read after its memory was written over",
    unwaited: "before it is waited for",
    while_it_travels: "is written over while",
    overlapping: "is read after its memory was written over",
    elsewhere: "does not lie where",
    transposed: "does not lie where",
    unwritten: "memory without content",
    seen_in_order: "",
    sum_of_itself: "",
    product_of_itself: "writes over own, which it reads",
    spread_over_itself: "writes over own, which it reads",
    lambda call, a, b: [call(aten.mm.out, a, b, out=a)]: "an input's memory",
    lambda call, a, b: [call(aten.t.default, a)]: "shares the memory of an input",
    lambda call, a, b: [call(aten.add_.Tensor, a, b)]: "changes a tensor in place",
}


@pytest.mark.parametrize(("write", "what"), PROGRAMS.items())
def test_what_a_program_may_do_with_memory(write: Write, what: str) -> None:
    """And what is wrong with it where it may not."""
    found = wrong(write)
    assert what in found and bool(what) == bool(found), found


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
    """``a`` and ``b`` are gathered as one memory, and ``a`` is stepped, in this order of calls."""

    def write(call: Call, a: Node, b: Node) -> list[Node]:
        made = {"both": call(memory_ops.adjoin, [a, b])}
        calls: dict[str, Any] = {
            "send": lambda: call(c10d.all_gather_into_tensor.default, made["both"], 2, GROUP),
            "wait": lambda: call(c10d.wait_tensor.default, made["send"]),
            "step": lambda: call(aten.mul.out, a, 0.9, out=a),
            "both read": lambda: call(aten.neg.default, made["both"]),
            "b read": lambda: call(aten.neg.default, b),
        }
        for each in order.split(", "):
            made[each] = calls[each]()
        return [made["step"]]

    found = wrong(write, OutputKind.PARAMETER)
    assert what in found and bool(what) == bool(found), found


def test_memory_that_is_adjoined_may_be_one_with_what_was_gathered() -> None:
    """And what lies beside it is not."""
    program = written(lambda call, a, b: [call(aten.neg.default, call(memory_ops.adjoin, [a, b]))])
    a, b, both, negative, *_ = program.graph.nodes
    share = Aliasing(program.graph.nodes)
    assert share.meet(a, both) and share.meet(both, b)
    assert not (share.meet(a, b) or share.meet(a, negative) or share.owned(both))


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

    def write(call: Call, a: Node, b: Node) -> list[Node]:
        buffer = call(pack.flatten, [a, b], 1)
        parts = call(pack.unflatten, buffer, [[2, 2], [2, 2]], 1)
        got = [call(operator.getitem, parts, i) for i in ((0, 1) if read < 2 else (0, read))]
        step = call(aten.mul.out, got[0], 0.9, out=got[0])
        also = call(aten.neg.default, buffer if read < 0 else got[min(read, 1)])
        return [call(aten.add.Tensor, step, also)]

    found = wrong(write, OutputKind.PARAMETER)
    assert what in found and bool(what) == bool(found), found


@pytest.mark.long
def test_new_parameters_are_written_where_they_belong_out_of_what_was_gathered() -> None:
    """And stand nowhere else before."""
    pm = small_plan(KINDS["AdamW"], Mesh(dp=2), zero=1)
    program = pm.rank_program(0)
    assert memory_ops.spread not in [node.target for node in program.graph.nodes]
    places = [node.args[0] for node in program.graph.nodes if node.target is memory_ops.write_part]
    stored = (node for node in program.graph.nodes if node.op == "placeholder")
    pairs = zip(stored, program.inputs, strict=True)
    assert {*places} == {node for node, given in pairs if given.kind is InputKind.PARAMETER}
    assert pm.verify()
