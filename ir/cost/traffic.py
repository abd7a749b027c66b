"""What communication costs in bytes, as it is written in pictures and explanations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardfx.ir.graph import Node
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.sends import is_comm, turns_of


@dataclass(frozen=True)
class Traffic:
    """One comm node: what it does, over which axes, the bytes that a rank sends each time, and how many times."""

    name: str
    axes: tuple[str, ...]
    nbytes: float
    turns: int

    @property
    def total(self) -> float:
        """The bytes of a whole step."""
        return self.nbytes * self.turns


OVER_TIME = {"all_reduce": "sum of turns", "all_gather": "turns together", "slice": "a turn's part"}
"""By kind: what is done over an axis of time, where a rank sends nothing."""


def traffic(node: Node, mesh: Mesh) -> Traffic:
    """What one rank sends for a comm node: over an axis of time, nothing."""
    axes = tuple(node.kwargs["axes"])
    nbytes = 0.0 if over_time(node, mesh) else node.op.sends(node, mesh).nbytes
    return Traffic(comm_name(node, mesh), axes, nbytes, turns_of(node, mesh))


def over_time(node: Node, mesh: Mesh) -> bool:
    """Whether a comm node is one among turns of a rank."""
    return any(mesh[axis].time for axis in node.kwargs["axes"])


def comm_name(node: Node, mesh: Mesh) -> str:
    """The kind of a comm node as it is written for people: ``all-gather``."""
    kind: str = node.op.kind
    name = kind.replace("_", "-")
    return OVER_TIME.get(kind, name) if over_time(node, mesh) else name


def by_axes(nodes: Iterable[Node], mesh: Mesh) -> dict[tuple[str, ...], list[Traffic]]:
    """The traffic of all comm nodes among ranks, by the axes that it goes over."""
    found: dict[tuple[str, ...], list[Traffic]] = {}
    for node in nodes:
        if is_comm(node) and not over_time(node, mesh):
            one = traffic(node, mesh)
            found.setdefault(mesh.sort(one.axes), []).append(one)
    return dict(sorted(found.items(), key=lambda item: [mesh.order(axis) for axis in item[0]]))
