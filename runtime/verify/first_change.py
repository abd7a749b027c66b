"""Where somebody changed a program: the first node that the plan's own program does not have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from shardfx.ir.graph import Node
from shardfx.runtime.verify.proof.interpreter import HasGraph

from .fault import Fault, place


def named(fault: Fault, own: Mapping[int, HasGraph], changed: Mapping[int, HasGraph]) -> Fault:
    """The fault at the first node that was changed, where that can be told; the node where the proof ends is said."""
    found = []
    for rank, program in changed.items():
        node = first_change(own[rank].graph, program.graph)
        if node is not None:
            found.append((list(program.graph.nodes).index(node), rank, node))
    if not found:
        return fault
    _, rank, node = min(found, key=lambda each: each[:2])
    if (rank, node.name) == (fault.rank, fault.node):
        return fault
    seen = (fault.node, fault.rank) if fault.node and fault.rank is not None else None
    return replace(fault, seen=seen, rank=rank, node=node.name, where=where(node))


def first_change(own: fx.Graph, other: fx.Graph) -> fx.Node | None:
    """The first node of ``other`` that ``own`` has not; None where there is none, or hardly one is alike."""
    known = {node.name: _text(node) for node in own.nodes}
    unlike = [node for node in other.nodes if known.get(node.name) != _text(node)]
    return unlike[0] if unlike and len(unlike) <= len(known) // 2 else None


def _text(node: fx.Node) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _Name(n.name))
    return node.op, node.target if node.op == "call_function" else "", repr(args), repr(kwargs)


class _Name(str):
    """A node among the arguments, not to be taken for a text."""

    def __repr__(self) -> str:
        return f"%{self!s}"


def where(node: fx.Node) -> str:
    """The line of the user's model behind a node, or behind what it is computed from."""
    front, seen = [node], {node}
    for each in front:
        made = each.meta.get("shardfx")
        if isinstance(made, Node):
            return place(made)
        new = [n for n in (*each.all_input_nodes, *each.users) if n not in seen]
        seen.update(new)
        front += new
    return ""
