"""Cost figures of a plan, as data: memory of a rank, communication by axis and kind with its causes, pipeline stages,
image tiles with their halo exchanges, time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING

from shardfx.compile import Compiled, no_collection
from shardfx.ir.cost.flops import flops_of
from shardfx.ir.cost.node_cost import NodeCosts
from shardfx.ir.cost.replay import source_of
from shardfx.ir.cost.traffic import TripCounts, comm_name, over_loop, traffic
from shardfx.ir.dim_sharding import DimSharding
from shardfx.ir.graph import Graph, InputKind, Node, Output, OutputKind, Value, op_name
from shardfx.ir.mesh import Mesh
from shardfx.ir.names import block_of, prefixes
from shardfx.ir.ops import comm
from shardfx.ir.ops.comm import halo
from shardfx.ir.ops.sends import is_comm, is_part, loop_of
from shardfx.ir.ops.traits import gives_alias
from shardfx.ir.program.lower import select
from shardfx.ir.spec import Spec
from shardfx.memory.rank_memory import RankMemory
from shardfx.runtime.recording import Recording
from shardfx.schedules.timeline import PlanTimeline, rank_places

from .console import render

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Cause:
    """The cause of a collective: the node that made the value, its module, and in words what it is."""

    node: str
    module: str
    what: str
    nbytes: float


@dataclass(frozen=True)
class CommRow:
    """All collectives of one kind over the same mesh axes."""

    axes: tuple[str, ...]
    kind: str
    calls: int
    nbytes: float
    seconds: float
    causes: tuple[Cause, ...]


@dataclass(frozen=True)
class Communication:
    """The communication of one rank in one step."""

    rows: tuple[CommRow, ...] = ()

    @property
    def calls(self) -> int:
        """The number of collectives that a rank starts in a step."""
        return sum(row.calls for row in self.rows)

    @property
    def nbytes(self) -> float:
        """The bytes that a rank sends in a step."""
        return sum(row.nbytes for row in self.rows)

    @property
    def seconds(self) -> float:
        """Seconds of the links for all of it, one after the other."""
        return sum(row.seconds for row in self.rows)


@dataclass(frozen=True)
class StageRow:
    """One stage. Parameters and operations are the model's own, unsharded and of a full step; bytes are of one rank."""

    stage: int
    ranks: tuple[int, ...]
    modules: tuple[str, ...]
    parameters: int
    nbytes: int
    """The bytes of its parameters, as a rank stores them."""
    sent: int
    """The bytes that a rank sends to other stages in an iteration."""
    flops: float


def stage_rows(graph: Graph) -> tuple[StageRow, ...]:
    """A row for each stage of a graph; none where it has no stages."""
    if graph.pipeline is None:
        return ()
    places = rank_places(graph)
    made = []
    for stage, home in enumerate(graph.pipeline.homes):
        nodes = [node for node in graph.nodes if stage in node.at]
        mine = [each for each in graph.inputs if each.kind is InputKind.PARAMETER and stage in each.at]
        values, names = [each.value for each in mine], [each.name for each in mine]
        sends = (node for node in graph.nodes if node.op is comm.send and _is_sent_by(stage, node))
        made.append(
            StageRow(
                stage,
                tuple(rank for rank, place in enumerate(places) if place == home),
                tuple(_shortened(dict.fromkeys(block_of(name) or prefixes(name)[0] for name in names))),
                sum(value.type.numel for value in values),
                sum(value.local_bytes(graph.mesh) for value in values),
                int(sum(node.op.sends(node, graph.mesh).nbytes for node in sends)),
                sum(flops_of(node) for node in nodes),
            )
        )
    return tuple(made)


def _is_sent_by(stage: int, node: Node) -> bool:
    """Whether a stage sends in each iteration, for the work of others."""
    maker = node.operands[0].node
    return maker is not None and maker.at[:1] == (stage,) and bool(node.at)


def _shortened(modules: Iterable[str]) -> Iterator[str]:
    """``layers.0``, ``layers.1``, ``layers.2`` as ``layers.0 .. 2``."""

    def line(item: tuple[int, str]) -> tuple[str, int]:
        place, name = item
        head, _, last = name.rpartition(".")
        return (head, int(last) - place) if last.isdigit() else (name, -1)

    for _, group in groupby(enumerate(modules), line):
        names = [name for _, name in group]
        yield names[0] if len(names) == 1 else f"{names[0]} .. {names[-1].rpartition('.')[2]}"


def is_of_rank(node: Node, graph: Graph, rank: int) -> bool:
    """Whether a rank runs a node; of a send, whether it sends."""
    coords = graph.mesh.coords(rank)
    if node.op is comm.send:
        (axis,) = node.kwargs["axes"]
        return bool(coords[axis] == node.kwargs["origin"])
    return graph.is_here(node.at, coords)


@dataclass(frozen=True)
class TileRow:
    """One layer: the number of its halo exchanges, the most bytes that a rank sends, the operations on a rank, and
    those of the largest border recompute on a rank, for rows of other ranks."""

    module: str
    exchanges: int
    nbytes: float
    flops: float
    border_flops: float


def tile_rows(nodes: Iterable[Node], mesh: Mesh, prices: NodeCosts) -> list[TileRow]:
    """The layers for which rows are exchanged, or whose tiles overlap, in the order of the graph.

    What is exchanged counts for the layer that needs it.
    """
    chosen = list(nodes)
    if not any(node.op is halo for node in chosen):
        return []
    takers = {operand: node for node in reversed(chosen) for operand in node.operands if node.op is not halo}
    found: dict[str, list[tuple[int, float, float, float]]] = {}
    for node in chosen:
        if node.op is halo:
            layer, sent = takers.get(node.outs[0], node).where.module, traffic(node, mesh)
            figures = sent.iterations if sent.nbytes else 0, sent.total, 0.0, 0.0
        else:
            layer, flops = node.where.module, prices.of(node).flops * loop_of(node, mesh)
            figures = 0, 0.0, flops, flops * border_recompute(node, mesh)
        found.setdefault(layer, []).append(figures)
    rows = [TileRow(module, *map(sum, zip(*each, strict=True))) for module, each in found.items()]
    return [row for row in rows if row.exchanges or row.border_flops]


def border_recompute(node: Node, mesh: Mesh) -> float:
    """The largest border recompute of a rank in a node, as a share of what rank 0 computes of it."""
    most = 0.0
    for value in node.outs:
        spec = value.spec
        over = [axis for sharding in spec.dims if sharding.rows for axis in sharding.axes] if spec is not None else []
        if spec is None or not over:
            continue
        tiles = Spec(tuple(DimSharding(each.axes) if each.rows else each for each in spec.dims), spec.partial)
        ranks = mesh.along(dict.fromkeys(mesh.names, 0), over)
        made, own = ([math.prod(each.local_shape(value.shape, mesh, at)) for at in ranks] for each in (spec, tiles))
        most = max(most, max(a - b for a, b in zip(made, own, strict=True)) / max(made[0], 1))
    return most


@dataclass(frozen=True)
class Report:
    """The costs of a plan; ``str(report)`` is a few tables."""

    mesh: Mesh
    ops: tuple[int, int]
    memory: RankMemory
    communication: Communication
    time: PlanTimeline
    warnings: tuple[str, ...] = ()
    passes: Mapping[str, float] = field(default_factory=dict)
    stages: tuple[StageRow, ...] = ()
    measured: Recording | None = None
    """The steps that were measured last."""
    virtual: bool = False
    """Whether one process did the work of all ranks, one after the other."""
    tiles: tuple[TileRow, ...] = ()
    """The layers of which ranks have tiles, with what these cost."""
    notes: tuple[str, ...] = ()
    """The reasons of further specializations."""

    @property
    def as_measured(self) -> float:
        """The predicted seconds that a measurement compares with: of virtual ranks the work of all of them."""
        rows = self.time.places or self.time.schedule.ranks
        return sum(self.time.busy[row] for row in rows) if self.virtual else self.time.step

    def __str__(self) -> str:
        return render(self.__rich__())

    def __rich__(self) -> RenderableType:
        from shardfx.report.tables import report_tables

        return report_tables(self)


def make_report(
    compiled: Compiled,
    memory: RankMemory,
    timeline: PlanTimeline,
    notes: Iterable[str] = (),
    measured: Recording | None = None,
    virtual: bool = False,
) -> Report:
    """The report of a compiled model, and of the memory and program of rank 0 (see ``ParallelModule.report``).

    It is for the machine of the ``timeline``; ``notes`` are those of rank passes, and what else is to be said of the
    programs.
    """
    graph, context, program, mesh = compiled.after, compiled.context, memory.program, timeline.mesh
    with no_collection():
        kinds = {output.kind for output in program.outputs}
        communication = Communication(tuple(comm_rows(graph, mesh, kinds, program.rank)))
        tiles = tuple(tile_rows(select(graph, kinds)[1], mesh, NodeCosts(mesh, context.rules)))
    return Report(
        mesh,
        (len(compiled.before.nodes), len(graph.nodes)),
        memory,
        communication,
        timeline,
        (*compiled.after.notes, *notes),
        dict(context.seconds),
        stage_rows(graph),
        measured,
        virtual,
        tiles,
    )


def comm_rows(
    graph: Graph, mesh: Mesh, kinds: Iterable[OutputKind] = tuple(OutputKind), rank: int = 0
) -> list[CommRow]:
    """The communication of a rank for outputs of some kinds, by axes and kind, in the order of the mesh, the most bytes
    first; times are by its links."""
    outputs = {output.value: output for output in graph.outputs}
    inputs = {inp.value: inp.name for inp in graph.inputs}
    rows: dict[tuple[tuple[str, ...], str], list[Node]] = {}
    _, chosen, wanted = select(graph, kinds)
    iterations = TripCounts.among(chosen, wanted, mesh)
    for node in chosen:
        between = is_comm(node) and not node.op.sends_nothing and not over_loop(node, mesh) and not is_part(node, mesh)
        if between and is_of_rank(node, graph, rank):
            rows.setdefault((mesh.sort(node.kwargs["axes"]), comm_name(node, mesh)), []).append(node)
    made = []
    for (axes, kind), nodes in rows.items():
        link, causes, calls, nbytes, seconds = mesh.link(axes), list[Cause](), 0, 0.0, 0.0
        for node in nodes:
            sent = replace(traffic(node, mesh), iterations=iterations.times.get(node, 1))
            causes += causes_of(node, sent.total, mesh, inputs, outputs)
            calls, nbytes = calls + sent.iterations, nbytes + sent.total
            seconds += link.seconds(*node.op.sends(node, mesh)) * sent.iterations
        causes.sort(key=lambda cause: -cause.nbytes)
        made.append(CommRow(axes, kind, calls, nbytes, seconds, tuple(causes)))
    return sorted(made, key=lambda row: ([mesh.order(axis) for axis in row.axes], -row.nbytes))


def causes_of(
    node: Node, total: float, mesh: Mesh, inputs: Mapping[Value, str], outputs: Mapping[Value, Output]
) -> list[Cause]:
    """The causes of a comm node, for each value that it moves: a parameter, a gradient, the loss, or the op that made
    it; and its share of the bytes that the node sends in a step."""
    values = list(zip(node.operands, node.outs, strict=True))
    sizes = [operand.local_bytes(mesh) for operand, _ in values]
    full = sum(sizes) or 1
    return [
        Cause(out.name, module_of(operand, node), what(operand, out, inputs, outputs), total * size / full)
        for (operand, out), size in zip(values, sizes, strict=True)
    ]


def what(operand: Value, result: Value, inputs: Mapping[Value, str], outputs: Mapping[Value, Output]) -> str:
    """A value whose placement changes, in words."""
    source = first(operand)
    if source in inputs:
        return f"{inputs[source]} is stored sharded"
    output = outputs.get(result)
    if output is not None and output.kind is OutputKind.GRADIENT:
        return f"gradient of {output.name}"
    if output is not None and output.kind is not OutputKind.RESULT:
        return f"new content of {output.name}" if output.kind.is_kept else output.name
    maker = op_name(source.node.op) if source.node is not None else "an input"
    partial = operand.spec is not None and bool(operand.spec.partial)
    return f"{'partial sums' if partial else 'result'} of {maker}"


def first(value: Value) -> Value:
    """The value before any communication, views and transposes: an op's result, or an input."""
    value = source_of(value)
    while value.node is not None and gives_alias(value.node.op) and len(value.node.operands) == 1:
        value = source_of(value.node.operands[0])
    return value


def module_of(operand: Value, node: Node) -> str:
    """The module of the op that made the value; of the comm node (where it goes) for an input."""
    source = first(operand).node
    return (source.where.module if source is not None else "") or node.where.module
