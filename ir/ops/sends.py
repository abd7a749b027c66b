"""What communication sends: the one place of these formulas.

For ``n`` ranks, and a *whole* of ``b`` bytes (the gathered, unreduced or exchanged local value), one rank sends

    all-gather, reduce-scatter, all-to-all, broadcast    (n-1)/n b     in log2(n) messages, one behind the other
    all-reduce                                         2 (n-1)/n b     in twice as many (Patarasu and Yuan, 2009)
    slice                                                  nothing

The planner asks before a node is there, report and pictures ask of a node, a replay and the run-time counts of a call
on real tensors; all of them here. How long it takes says the link (:meth:`shardfx.ir.mesh.Link.seconds`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from shardfx.ir.graph import Node, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.spec import Spec

from .traits import base_name


class Sent(NamedTuple):
    """What one rank sends: messages that wait for one another, and bytes. They add."""

    messages: float = 0.0
    nbytes: float = 0.0

    def __add__(self, other: tuple[object, ...]) -> Sent:
        """Both, one after the other."""
        assert isinstance(other, Sent)
        return Sent(self.messages + other.messages, self.nbytes + other.nbytes)

    def times(self, count: float) -> Sent:
        """The same, ``count`` times."""
        return Sent(self.messages * count, self.nbytes * count)


TURNS: dict[str, float] = {
    "all_gather": 1.0,
    "all_reduce": 2.0,
    "reduce_scatter": 1.0,
    "all_to_all": 1.0,
    "broadcast": 1.0,
    "slice": 0.0,
}
"""How many times (n-1)/n of the whole goes round. What is not named here sends all of what it is given, once."""
_ENDINGS = ("_", "_out", "_coalesced", "_fused", "_into_tensor", "_tensor", "_single")


def kind_of(name: str) -> str:
    """The kind of a collective from its name in a graph or in torch: ``all_gather_into_tensor_out``: all_gather."""
    for ending in _ENDINGS:
        name = name.removesuffix(ending)
    return name


def sent(kind: str, n: int, whole: float) -> Sent:
    """What one of ``n`` ranks sends for a collective on a whole of so many bytes."""
    turns = TURNS.get(kind)
    if turns is None:
        return Sent(1.0, whole)
    return Sent(turns * math.log2(n), turns * whole * (n - 1) / n)


def whole_of(kind: str, put_in: float, n: int) -> float:
    """The bytes of the whole from those that one rank puts in: n times that where it is gathered."""
    return put_in * n if kind == "all_gather" else put_in


def is_comm(node: Node) -> bool:
    """Whether the node moves data between ranks (or keeps a rank's share of it)."""
    return base_name(node).startswith("comm.")


def comm_kind(node: Node) -> str:
    """The kind of a comm node: ``all_gather`` for ``comm.all_gather_fused`` too."""
    return kind_of(base_name(node).removeprefix("comm."))


def wholes(node: Node) -> list[Value]:
    """The gathered or unreduced values of a comm node: those whose bytes count."""
    return node.outs if comm_kind(node) == "all_gather" else node.operands


def whole_bytes(node: Node, mesh: Mesh) -> int:
    """The bytes of the whole of a comm node, on the rank that holds most."""
    return sum(value.local_bytes(mesh) for value in wholes(node))


def sends(node: Node, mesh: Mesh) -> Sent:
    """What a rank sends each time that a comm node is done."""
    return sent(comm_kind(node), mesh.extent(node.kwargs.get("axes", ())), whole_bytes(node, mesh))


def turns_of(node: Node, mesh: Mesh) -> int:
    """How many times a node is done in a step: once for each turn of the time axes that cut what it takes."""
    spec: Spec | None = node.operands[0].spec if node.operands else None
    return mesh.extent(axis for axis in (spec.axes if spec is not None else ()) if mesh[axis].time)
