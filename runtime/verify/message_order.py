"""Two ranks send and receive in one order, over all turns: a backend that knows no tags pairs messages by it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import fx

from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.ops.time.handover import Message
from shardfx.ir.program.looped.within_turns import part_in_turns
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.program.units.unit_order import UnitOrder, order_of
from shardfx.runtime.rendezvous import Request

from .fault import Fault, place

Passed = tuple[Message, fx.Node, int]
"""A message, the call that sends or receives it, and whose program that is in."""


def out_of_order(programs: Mapping[int, RankProgram], mesh: Mesh) -> Fault | None:
    """The first message that one rank sends where the other receives another one; None where there is none."""
    sent: dict[tuple[str, int, int], list[Passed]] = {}
    received: dict[tuple[str, int, int], list[Passed]] = {}
    for rank, program in programs.items():
        for node, numbers in _calls(program):
            request = Request.of(node)
            if request is None or not request.message:
                continue
            axes = mesh.group_axes(request.group)
            message = request.of_turn(numbers).of_rank(mesh.group(rank, axes).index(rank))
            ends = sent if request.message == "sends" else received
            ends.setdefault(message[:3], []).append((message, node, rank))
    for pair in dict.fromkeys([*sent, *received]):
        mine, theirs = sent.get(pair, []), received.get(pair, [])
        for number in range(max(len(mine), len(theirs))):
            one = mine[number] if number < len(mine) else None
            other = theirs[number] if number < len(theirs) else None
            if one is None or other is None or one[0] != other[0]:
                return _fault(one, other)
    return None


def _fault(sent: Passed | None, received: Passed | None) -> Fault:
    _, node, rank = received or sent  # type: ignore[misc]
    made = node.meta.get("shardfx")
    what = f"{received[0] if received else 'nothing'} is received, where {sent[0] if sent else 'nothing'} is sent"
    return Fault(what, "", rank, node.name, place(made) if made is not None else "", certain=True)


def _calls(program: RankProgram) -> Iterator[tuple[fx.Node, Mapping[str, int]]]:
    """The calls of a program that speak to other ranks, in the order in which they run, with the numbers of turns."""
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    yield from _walk(nodes, {})


def _walk(nodes: list[fx.Node], numbers: dict[str, int]) -> Iterator[tuple[fx.Node, Mapping[str, int]]]:
    at = 0
    while at < len(nodes):
        node = nodes[at]
        part = part_in_turns(node)
        if part == "opens":
            end = _end(nodes, at)
            yield from _loop(node, nodes[at + 1 : end], numbers)
            at = end
        elif part == "number":
            numbers[node.name] = _number(node, numbers)
        elif (row := row_of(node.target)) is not None and row.message:
            yield node, dict(numbers)
        at += 1


def _loop(
    begin: fx.Node, inside: list[fx.Node], numbers: dict[str, int]
) -> Iterator[tuple[fx.Node, Mapping[str, int]]]:
    if not any((row := row_of(node.target)) is not None and row.message for node in inside):
        return
    count: Any = begin.args[1]
    order = order_of(begin)
    if not order:
        for turn in range(count):
            yield from _walk(inside, {**numbers, begin.name: turn})
        return
    starts = [at for at, node in enumerate(inside) if part_in_turns(node) == "unit"]
    parts = {
        str(inside[at].args[1]): inside[at + 1 : end]
        for at, end in zip(starts, [*starts[1:], len(inside)], strict=True)
    }
    head = inside[: starts[0]] if starts else []
    for word in UnitOrder.of(order.split()).words:
        yield from _walk([*head, *parts[word.unit]], {**numbers, begin.name: word.turn})


def _end(nodes: list[fx.Node], begin: int) -> int:
    return next(at for at in range(begin, len(nodes)) if nodes[at].args[:1] == (nodes[begin],) and _closes(nodes[at]))


def _closes(node: fx.Node) -> bool:
    return part_in_turns(node) == "closes"


def _number(node: fx.Node, numbers: Mapping[str, int]) -> int:
    row = row_of(node.target)
    assert row is not None
    args = fx.map_arg(node.args, lambda used: numbers[used.name])
    return int(row.function(*args))
