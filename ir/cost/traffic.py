"""Traffic of communication nodes in bytes, and trip counts: how often a rank runs each node in a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from shardfx.ir.graph import Graph, Node, Output
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops import comm
from shardfx.ir.ops.computing.table_ids import numbered_rows, row_numbers
from shardfx.ir.ops.experts.dispatch import take_rows
from shardfx.ir.ops.sends import is_comm, loop_of
from shardfx.ir.ops.traits import unviewed
from shardfx.ir.program.loops.loop_nest import PlannedLoop, loop_axes, loop_nest


@dataclass(frozen=True)
class Traffic:
    """The traffic of one comm node: its kind, its axes, the bytes that a rank sends each time, and the trip count."""

    name: str
    axes: tuple[str, ...]
    nbytes: float
    iterations: int

    @property
    def total(self) -> float:
        """The bytes of a step."""
        return self.nbytes * self.iterations


LOOP_COMM = {"all_reduce": "sum of iterations", "all_gather": "iterations together", "slice": "an iteration's part"}
"""The names of comm ops over a loop axis, which send nothing, by kind."""


def traffic(node: Node, mesh: Mesh) -> Traffic:
    """The traffic of a comm node on one rank; over a loop axis it sends nothing."""
    nbytes = 0.0 if over_loop(node, mesh) else node.op.sends(node, mesh).nbytes
    return Traffic(comm_name(node, mesh), tuple(node.kwargs["axes"]), nbytes, loop_of(node, mesh))


def over_loop(node: Node, mesh: Mesh) -> bool:
    """Whether a comm node is over a loop axis."""
    return any(mesh[axis].loop for axis in node.kwargs["axes"])


def comm_name(node: Node, mesh: Mesh) -> str:
    """The name of a comm node's kind in reports: ``all-gather``; ``ring`` of a halo that comes around the seam,
    ``dispatch`` and ``combine`` of rows of experts, ``id-exchange`` and ``row-exchange`` of those of tables."""
    kind: str = node.op.kind
    name = "ring" if any(w.wraps for _, w in node.kwargs.get("rows", ())) else exchange(node) or kind.replace("_", "-")
    return LOOP_COMM.get(kind, name) if over_loop(node, mesh) else name


def exchange(node: Node) -> str:
    """``dispatch`` or ``combine``, of rows of experts, ``id-exchange`` or ``row-exchange``, of tables; else nothing."""
    moved = unviewed(node.operands[0])
    if node.op is not comm.all_to_all or moved.node is None or moved.node.op not in (take_rows, numbered_rows):
        return ""
    slots = moved.node.operands[1].node
    if moved.node.op is numbered_rows or (slots and any(v.node and v.node.op is row_numbers for v in slots.operands)):
        return "row-exchange" if moved.type.dtype.is_floating_point else "id-exchange"
    return "dispatch" if moved is node.operands[0] else "combine"


def by_axes(nodes: Iterable[Node], mesh: Mesh) -> dict[tuple[str, ...], list[Traffic]]:
    """The traffic of all comm nodes between ranks, by their axes."""
    found: dict[tuple[str, ...], list[Traffic]] = {}
    for node in nodes:
        if is_comm(node) and not over_loop(node, mesh):
            one = traffic(node, mesh)
            found.setdefault(mesh.sort(one.axes), []).append(one)
    return dict(sorted(found.items(), key=lambda item: [mesh.order(axis) for axis in item[0]]))


@dataclass(frozen=True)
class TripCounts:
    """The trip counts of nodes in loops: the loop axes of each (the last ones, if it runs in several loops), and how
    often it runs in all. Nodes outside of loops are not included."""

    axes: dict[Node, tuple[str, ...]] = field(default_factory=dict)
    times: Counter[Node] = field(default_factory=Counter)

    @staticmethod
    def of(graph: Graph) -> TripCounts:
        """The trip counts of all nodes of a graph."""
        return TripCounts.among(graph.nodes, graph.outputs, graph.mesh)

    @staticmethod
    def among(nodes: Sequence[Node], outputs: Sequence[Output], mesh: Mesh) -> TripCounts:
        """The trip counts of the nodes that some outputs depend on."""
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
