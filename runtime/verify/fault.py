"""Faults: where a program departs from the model, and the first node at which a user changed it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from shardfx.ir.graph import Graph, Node, Value
from shardfx.ir.program.rank_program import RankProgram


@dataclass(frozen=True)
class Fault:
    """The point at which a program departs from the model, or at which the proof cannot follow it.

    ``certain``: the program is wrong, whatever its inputs. Otherwise it may be right in a way that no rule knows.
    """

    what: str
    output: str = ""
    rank: int | None = None
    node: str = ""
    where: str = ""
    numbers: str = ""
    """A counterexample: the program's result and the model's."""
    agrees: str = ""
    """``on 3 random draws``: the program was run, and agrees with the model."""
    certain: bool = False
    seen: tuple[str, int] | None = None
    """The node and rank at which the proof ends, where ``node`` is one that a user changed."""


class Failed(Exception):
    """An exception with a fault."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.what)
        self.fault = fault


def first_line(error: BaseException | None) -> str:
    """The first line of an exception's message."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def place(node: Node) -> str:
    """The source line of a node in the user's model; of communication without one, that of its operand."""
    return str(node.where) or next((str(value.where) for value in node.operands), "")


def first_output(graph: Graph, values: Iterable[Value]) -> str:
    """The first output of a graph that depends on some values."""
    reached = set(values)
    for node in graph.nodes:
        if reached & set(node.operands):
            reached.update(node.outs)
    return next((f"{o.kind.value} {o.name}" for o in graph.outputs if o.value in reached), "")


def source_line(node: fx.Node) -> str:
    """The line of the user's model behind an fx node, or behind the nearest node that has one."""
    front, seen = [node], {node}
    for each in front:
        made = each.meta.get("shardfx")
        if isinstance(made, Node):
            return place(made)
        new = [n for n in (*each.all_input_nodes, *each.users) if n not in seen]
        seen.update(new)
        front += new
    return ""


def at_first_change(fault: Fault, own: Mapping[int, RankProgram], changed: Mapping[int, RankProgram]) -> Fault:
    """The fault, located at the first node that a user changed, where that can be told."""
    found = []
    for rank, program in changed.items():
        node = _first_change(own[rank].graph, program.graph)
        if node is not None:
            found.append((list(program.graph.nodes).index(node), rank, node))
    if not found:
        return fault
    _, rank, node = min(found, key=lambda each: each[:2])
    if (rank, node.name) == (fault.rank, fault.node):
        return fault
    seen = (fault.node, fault.rank) if fault.node and fault.rank is not None else None
    return replace(fault, seen=seen, rank=rank, node=node.name, where=source_line(node))


def _first_change(own: fx.Graph, other: fx.Graph) -> fx.Node | None:
    """The first node of ``other`` that ``own`` lacks; None if there is none, or if most nodes differ."""
    known = {node.name: _text(node) for node in own.nodes}
    unlike = [node for node in other.nodes if known.get(node.name) != _text(node)]
    return unlike[0] if unlike and len(unlike) <= len(known) // 2 else None


def _text(node: fx.Node) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: ("node", n.name))
    return node.op, node.target if node.op == "call_function" else "", repr(args), repr(kwargs)
