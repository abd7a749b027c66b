"""Ranks whose turns are done in units meet in one order: turn by turn the same collectives, message by message.

Where each turn is proven alone, as a rank, it is not seen that one rank comes with another turn than its group, or
sends what the other receives later: a backend that knows no tags pairs by the order alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from torch import fx

from shardfx.ir.graph import Node
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.program.looped.within_turns import FRAMES, gives_number, part_in_turns
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.program.units.execution import Turns, executed
from shardfx.runtime.rendezvous import Request

from .fault import Fault, place

Done = tuple[Any, fx.Node, int]
"""The message that a call sends or receives, or the turns in which it meets a group; the call, and whose program it is
in."""


def in_units(program: RankProgram) -> bool:
    """Whether a program does turns in units."""
    return any(part_in_turns(node) == "unit" for node in program.graph.nodes)


def out_of_order(programs: Mapping[int, RankProgram], mesh: Mesh) -> Fault | None:
    """The first call by which two ranks do not meet; None where there is none."""
    first: dict[str, tuple[int, list[Done]]] = {}
    sent: dict[tuple[str, int, int], list[Done]] = {}
    received: dict[tuple[str, int, int], list[Done]] = {}
    for rank, program in programs.items():
        groups: dict[str, list[Done]] = {}
        for request, node, turns in _asked(program):
            if not request.message:
                groups.setdefault(request.group, []).append((turns, node, rank))
                continue
            where = mesh.group(rank, mesh.group_axes(request.group)).index(rank)
            message = request.of_turn(_numbers(node, dict(turns))).of_rank(where)
            ends = sent if request.message == "sends" else received
            ends.setdefault(message[:3], []).append((message, node, rank))
        for group, calls in groups.items():
            member, theirs = first.setdefault(group, (rank, calls))
            for a, b in zip(calls, theirs, strict=False):
                if a[0] != b[0]:
                    said = f"is of {_said(a[0])}, and of {_said(b[0])} on rank {member}"
                    return _fault(f"a collective on {group} {said}", a)
    for pair in dict.fromkeys([*sent, *received]):
        for one, other in zip_longest(sent.get(pair, ()), received.get(pair, ())):
            if one is None or other is None or one[0] != other[0]:
                said = f"{other[0] if other else 'nothing'} is received, where {one[0] if one else 'nothing'} is sent"
                return _fault(said, other or one)
    return None


def _asked(program: RankProgram) -> list[tuple[Request, fx.Node, Turns]]:
    """What a program asks of its groups, as often and in the order in which it does."""
    asks = {node: request for node in program.graph.nodes if (request := Request.of(node)) is not None}
    frames = [node for node in program.graph.nodes if node in asks or part_in_turns(node) in FRAMES]
    return [(asks[node], node, turns) for node, turns in executed(frames) if node in asks]


def _numbers(node: fx.Node, turns: Mapping[str, int]) -> dict[str, int]:
    """The numbers of a turn that a call takes, by their names."""

    def number(each: fx.Node) -> int:
        row = row_of(each.target)
        assert row is not None
        if row.turns == "opens":
            return turns[str(each.args[0])]
        return int(row.function(*fx.map_arg(each.args, number)))

    return {each.name: number(each) for each in node.all_input_nodes if gives_number(each)}


def _said(turns: Turns) -> str:
    return " ".join(f"turn {turn} of {axis}" for axis, turn in turns) or "no turn"


def _fault(what: str, done: Done | None) -> Fault:
    assert done is not None
    _, node, rank = done
    made = node.meta.get("shardfx")
    return Fault(what, "", rank, node.name, place(made) if isinstance(made, Node) else "", certain=True)
