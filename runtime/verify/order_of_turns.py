"""Ranks whose turns are done in units meet in one order: turn by turn the same collectives, message by message.

Where each turn is proven alone, as a rank, it is not seen that one rank comes with another turn than its group, or
sends what the other receives later: a backend that knows no tags pairs by the order alone. The program of a family of
ranks is walked once, where its messages name no number that ranks have their own of, but groups: then each of its ranks
does the same, in its own groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from torch import fx

from shardfx.ir.graph import Node
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.ops.time.handover import Message
from shardfx.ir.program.loops.loop_regions import FRAMES, Turns, executed, gives_number, part_in_turns
from shardfx.runtime.rendezvous import Request

from .families.family import Family, varies
from .families.varying import leaves
from .fault import Fault, place

Call = tuple[Any, fx.Node]
"""The tag and the turn of a message, or the turns in which a group meets; and the call."""
End = tuple[str, str, int]
"""Whether a call sends, receives, or (empty) meets all of a group; the group, and the place of the other."""
Way = tuple[str, int, int]
"""Of a group, the place that sends and the one that receives."""
Ends = dict[Way, list[tuple[int, list[Call]]]]


def in_units(graph: fx.Graph) -> bool:
    """Whether turns are done in units."""
    return any(part_in_turns(node) == "unit" for node in graph.nodes)


def out_of_order(families: Iterable[Family], mesh: Mesh) -> Fault | None:
    """The first call by which two ranks do not meet; None where there is none."""
    sent, received, first = Ends(), Ends(), dict[str, tuple[int, list[Call]]]()
    equal: set[tuple[int, ...]] = set()
    for family in families:
        for ranks, graph in _texts(family):
            for (kind, named, other), calls in _said(graph).items():
                axes = mesh.group_axes(named)
                for rank in ranks:
                    group, at = family.together.at(named, rank), mesh.group(rank, axes).index(rank)
                    if kind:
                        way = (group, at, other) if kind == "sends" else (group, other, at)
                        (sent if kind == "sends" else received).setdefault(way, []).append((rank, calls))
                        continue
                    member, theirs = first.setdefault(group, (rank, calls))
                    pair = (id(calls), id(theirs))
                    if pair not in equal and (fault := _not_together(group, rank, calls, member, theirs)) is not None:
                        return fault
                    equal.add(pair)
    for way in dict.fromkeys([*sent, *received]):
        mine, others = sent.get(way, []), received.get(way, [])
        same = tuple(id(calls) for _, calls in (*mine, *others))
        if same not in equal and (fault := _not_received(way, mine, others)) is not None:
            return fault
        equal.add(same)
    return None


def _not_together(group: str, rank: int, calls: list[Call], member: int, theirs: list[Call]) -> Fault | None:
    for (mine, node), (other, _) in zip(calls, theirs, strict=False):
        if mine != other:
            said = f"is of {_turns_text(mine)}, and of {_turns_text(other)} on rank {member}"
            return _fault(f"a collective on {group} {said}", rank, node)
    return None


def _not_received(
    way: Way, sent: Sequence[tuple[int, list[Call]]], received: Sequence[tuple[int, list[Call]]]
) -> Fault | None:
    mine, theirs = ([(rank, *call) for rank, calls in each for call in calls] for each in (sent, received))
    for one, other in zip_longest(mine, theirs):
        if one is None or other is None or one[1] != other[1]:
            rank, _, node = other or one
            names = [Message(*way, *each[1]) if each is not None else "nothing" for each in (other, one)]
            return _fault(f"{names[0]} is received, where {names[1]} is sent", rank, node)
    return None


def _fault(what: str, rank: int, node: fx.Node) -> Fault:
    made = node.meta.get("shardfx")
    return Fault(what, "", rank, node.name, place(made) if isinstance(made, Node) else "", certain=True)


def _turns_text(turns: Turns) -> str:
    return " ".join(f"turn {turn} of {axis}" for axis, turn in turns) or "no turn"


def _texts(family: Family) -> Iterator[tuple[Sequence[int], fx.Graph]]:
    """What the ranks of a family do together: one text, or each its own."""
    graph = family.program.graph
    groups = {node: node.args[-1] for node in graph.nodes if _passes(node)}
    looked = {*groups, *(number for node in groups for number in _numbers_behind(node))}
    if any(varies(arg) for node in looked for arg in leaves(node) if arg is not groups.get(node)):
        for rank in family.ranks:
            yield (rank,), family.at(rank).graph
    else:
        yield family.ranks, graph


def _said(graph: fx.Graph) -> dict[End, list[Call]]:
    """What is asked of groups, as often and in the order in which it is, by whom it is asked of."""
    asks = {node: request for node in graph.nodes if (request := Request.of(node)) is not None}
    frames = [node for node in graph.nodes if node in asks or part_in_turns(node) in FRAMES]
    found: dict[End, list[Call]] = {}
    for node, turns in executed(frames):
        request = asks.get(node)
        if request is None:
            continue
        if request.message:
            other, tag, turn = request.of_turn(_numbers(node, dict(turns))).args[-3:]
            found.setdefault((request.message, request.group, other), []).append(((tag, turn), node))
        else:
            found.setdefault(("", request.group, 0), []).append((turns, node))
    return found


def _passes(node: fx.Node) -> bool:
    """Whether a call sends or receives a message."""
    row = row_of(node.target) if node.op == "call_function" else None
    return row is not None and bool(row.message)


def _numbers_behind(node: fx.Node) -> set[fx.Node]:
    """The numbers of turns that a call takes, and those that they are made of."""
    found = {each for each in node.all_input_nodes if gives_number(each)}
    return found.union(*map(_numbers_behind, found))


def _numbers(node: fx.Node, turns: Mapping[str, int]) -> dict[str, int]:
    """The numbers of a turn that a call takes, by their names."""

    def number(each: fx.Node) -> int:
        row = row_of(each.target)
        assert row is not None
        if row.turns == "opens":
            return turns[str(each.args[0])]
        return int(row.function(*fx.map_arg(each.args, number)))

    return {each.name: number(each) for each in node.all_input_nodes if gives_number(each)}
