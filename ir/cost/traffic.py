"""Traffic of communication nodes in bytes, and trip counts: how often a rank runs each node in a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from shardfx.ir.graph import Graph, Node, Output
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.sends import is_comm, loop_of
from shardfx.ir.program.loops.loop_nest import PlannedLoop, loop_axes, loop_nest


@dataclass(frozen=True)
class Traffic:
    """One comm node: what it does, over which axes, the bytes that a rank sends each time, and how many times."""

    name: str
    axes: tuple[str, ...]
    nbytes: float
    iterations: int

    @property
    def total(self) -> float:
        """The bytes of a step."""
        return self.nbytes * self.iterations


LOOP_COMM = {"all_reduce": "sum of iterations", "all_gather": "iterations together", "slice": "an iteration's part"}
"""By kind: what is done over a loop axis, where a rank sends nothing."""


def traffic(node: Node, mesh: Mesh) -> Traffic:
    """What one rank sends for a comm node: over a loop axis, nothing."""
    axes = tuple(node.kwargs["axes"])
    nbytes = 0.0 if over_loop(node, mesh) else node.op.sends(node, mesh).nbytes
    return Traffic(comm_name(node, mesh), axes, nbytes, loop_of(node, mesh))


def over_loop(node: Node, mesh: Mesh) -> bool:
    """Whether a comm node is one among iterations of a rank."""
    return any(mesh[axis].loop for axis in node.kwargs["axes"])


def comm_name(node: Node, mesh: Mesh) -> str:
    """The kind of a comm node as it is written for people: ``all-gather``."""
    kind: str = node.op.kind
    name = kind.replace("_", "-")
    return LOOP_COMM.get(kind, name) if over_loop(node, mesh) else name


def by_axes(nodes: Iterable[Node], mesh: Mesh) -> dict[tuple[str, ...], list[Traffic]]:
    """The traffic of all comm nodes among ranks, by the axes that it goes over."""
    found: dict[tuple[str, ...], list[Traffic]] = {}
    for node in nodes:
        if is_comm(node) and not over_loop(node, mesh):
            one = traffic(node, mesh)
            found.setdefault(mesh.sort(one.axes), []).append(one)
    return dict(sorted(found.items(), key=lambda item: [mesh.order(axis) for axis in item[0]]))


@dataclass(frozen=True)
class TripCounts:
    """What is done in iterations: by node the axes of its iterations (the last ones, where it is done in several
    loops), and how many times it is done in all. What is not done in iterations is not in it."""

    axes: dict[Node, tuple[str, ...]] = field(default_factory=dict)
    times: Counter[Node] = field(default_factory=Counter)

    @staticmethod
    def of(graph: Graph) -> TripCounts:
        """Of all nodes of a graph."""
        return TripCounts.among(graph.nodes, graph.outputs, graph.mesh)

    @staticmethod
    def among(nodes: Sequence[Node], outputs: Sequence[Output], mesh: Mesh) -> TripCounts:
        """Of the nodes that some outputs need."""
        made = TripCounts()
        if loop_axes(mesh):
            for node, around in _walk(loop_nest(nodes, outputs, mesh), ()):
                if around:
                    made.axes[node] = around
                    made.times[node] += mesh.extent(around)
        return made


def _walk(steps: Sequence[Node | PlannedLoop], around: tuple[str, ...]) -> Iterator[tuple[Node, tuple[str, ...]]]:
    for step in steps:
        if isinstance(step, PlannedLoop):
            yield from _walk(step.steps, (*around, step.axis))
        else:
            yield step, around
