"""Two ranks send and receive in one order, over all turns: a backend that knows no tags pairs messages by it.

The program of a family of ranks is walked once, where its messages name no number that ranks have their own of, but
groups: then each of its ranks sends and receives the same, in its own groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.ops.time.handover import Message
from shardfx.ir.program.looped.within_turns import part_in_turns
from shardfx.ir.program.units.unit_order import UnitOrder, order_of
from shardfx.runtime.rendezvous import Request

from .families.family import Family, varies
from .families.varying import leaves
from .fault import Fault, place

Call = tuple[int, int, fx.Node]
"""A tag and a turn, and the call that sends or receives what they name."""
End = tuple[str, str, int]
"""Whether it sends or receives, the group, and the place of the other."""
Way = tuple[str, int, int]
"""Of a group, the place that sends and the one that receives."""


def out_of_order(families: Iterable[Family], mesh: Mesh) -> Fault | None:
    """The first message that one rank sends where the other receives another one; None where there is none."""
    ends: dict[str, dict[Way, list[tuple[int, list[Call]]]]] = {"sends": {}, "receives": {}}
    for family in families:
        for ranks, graph in _texts(family):
            for (kind, named, other), calls in _said(graph).items():
                axes = mesh.group_axes(named)
                for rank in ranks:
                    group, at = family.together.at(named, rank), mesh.group(rank, axes).index(rank)
                    way = (group, at, other) if kind == "sends" else (group, other, at)
                    ends[kind].setdefault(way, []).append((rank, calls))
    equal: set[tuple[int, ...]] = set()
    for way in dict.fromkeys([*ends["sends"], *ends["receives"]]):
        sent, received = (ends[kind].get(way, []) for kind in ("sends", "receives"))
        pair = tuple(id(calls) for _, calls in (*sent, *received))
        if pair not in equal and (fault := _first_other(way, sent, received)) is not None:
            return fault
        equal.add(pair)
    return None


def _first_other(
    way: Way, sent: Sequence[tuple[int, list[Call]]], received: Sequence[tuple[int, list[Call]]]
) -> Fault | None:
    mine, theirs = ([(rank, *call) for rank, calls in each for call in calls] for each in (sent, received))
    for number in range(max(len(mine), len(theirs))):
        one, other = (each[number] if number < len(each) else None for each in (mine, theirs))
        if one is None or other is None or one[1:3] != other[1:3]:
            rank, _, _, node = other or one  # type: ignore[misc]
            made = node.meta.get("shardfx")
            names = [Message(*way, *each[1:3]) if each is not None else "nothing" for each in (other, one)]
            what = f"{names[0]} is received, where {names[1]} is sent"
            return Fault(what, "", rank, node.name, place(made) if made is not None else "", certain=True)
    return None


def _texts(family: Family) -> Iterator[tuple[Sequence[int], fx.Graph]]:
    """What the ranks of a family send and receive by: one text, or each its own."""
    graph = family.program.graph
    nodes = list(graph.nodes)
    numbers = _numbers(nodes)
    groups = {node: node.args[-1] for node in nodes if _passes(node)}
    if any(varies(arg) for node in (*numbers, *groups) for arg in leaves(node) if arg is not groups.get(node)):
        for rank in family.ranks:
            yield (rank,), family.at(rank).graph
    else:
        yield family.ranks, graph


def _said(graph: fx.Graph) -> dict[End, list[Call]]:
    """What is sent and received, in the order in which it is, by where it goes or comes from."""
    found: dict[End, list[Call]] = {}
    for node, numbers in _calls(list(graph.nodes)):
        request = Request.of(node)
        assert request is not None
        other, tag, turn = request.of_turn(numbers).args[-3:]
        found.setdefault((request.message, request.group, other), []).append((tag, turn, node))
    return found


def _passes(node: fx.Node) -> bool:
    """Whether a call sends or receives a message."""
    row = row_of(node.target) if node.op == "call_function" else None
    return row is not None and bool(row.message)


def _numbers(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The numbers of turns that messages name."""
    found: set[fx.Node] = set()
    for node in reversed(nodes):
        if _passes(node) or node in found:
            found.update(used for used in node.all_input_nodes if part_in_turns(used) == "number")
    return found


def _calls(nodes: Sequence[fx.Node]) -> Iterator[tuple[fx.Node, Mapping[str, int]]]:
    """The calls that speak to one other rank, in the order in which they run, with the numbers of turns."""
    numbers = _numbers(nodes)
    frames = ("opens", "closes", "unit")
    kept = [node for node in nodes if node in numbers or _passes(node) or part_in_turns(node) in frames]
    yield from _walk(kept, {})


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
        elif _passes(node):
            yield node, dict(numbers)
        at += 1


def _loop(
    begin: fx.Node, inside: list[fx.Node], numbers: dict[str, int]
) -> Iterator[tuple[fx.Node, Mapping[str, int]]]:
    if not any(map(_passes, inside)):
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
