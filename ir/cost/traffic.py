"""What communication costs in bytes, as it is written in pictures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardfx.ir.graph import Node
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.table import OwnOp


@dataclass(frozen=True)
class Traffic:
    """One comm node: what it does, over which axes, the bytes that a rank sends each time, and how many times."""

    name: str
    axes: tuple[str, ...]
    nbytes: float
    turns: int

    @property
    def total(self) -> float:
        return self.nbytes * self.turns


def is_comm(node: Node) -> bool:
    """Whether a node is communication."""
    return isinstance(node.op, OwnOp)


def traffic(node: Node, mesh: Mesh) -> Traffic:
    """The bytes that one rank sends for a comm node, and how often."""
    assert isinstance(node.op, OwnOp)
    time = [axis for value in node.operands[:1] if value.spec for axis in value.spec.axes if mesh[axis].time]
    return Traffic(node.op.kind, tuple(node.kwargs["axes"]), node.op.sends(node, mesh), mesh.extent(time))


def by_axes(nodes: Iterable[Node], mesh: Mesh) -> dict[tuple[str, ...], list[Traffic]]:
    """The traffic of all comm nodes, by the axes that it goes over."""
    found: dict[tuple[str, ...], list[Traffic]] = {}
    for node in nodes:
        if is_comm(node):
            one = traffic(node, mesh)
            found.setdefault(mesh.sort(one.axes), []).append(one)
    return dict(sorted(found.items(), key=lambda item: [mesh.order(axis) for axis in item[0]]))


def comm_name(name: str) -> str:
    """``all_gather`` as it is written in a picture: ``all-gather``."""
    return name.replace("_", "-")
