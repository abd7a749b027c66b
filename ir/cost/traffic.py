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


def traffic(node: Node, mesh: Mesh) -> Traffic:
    """What one rank sends for a comm node."""
    return Traffic(comm_name(node), tuple(node.kwargs["axes"]), node.op.sends(node, mesh).nbytes, turns_of(node, mesh))


def comm_name(node: Node) -> str:
    """The kind of a comm node as it is written for people: ``all-gather``."""
    kind: str = node.op.kind
    return kind.replace("_", "-")


def by_axes(nodes: Iterable[Node], mesh: Mesh) -> dict[tuple[str, ...], list[Traffic]]:
    """The traffic of all comm nodes, by the axes that it goes over."""
    found: dict[tuple[str, ...], list[Traffic]] = {}
    for node in nodes:
        if is_comm(node):
            one = traffic(node, mesh)
            found.setdefault(mesh.sort(one.axes), []).append(one)
    return dict(sorted(found.items(), key=lambda item: [mesh.order(axis) for axis in item[0]]))
