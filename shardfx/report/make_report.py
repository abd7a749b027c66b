"""The report of a plan, from its graph and the replay of a rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from shardfx.compile import no_collection
from shardfx.ir.cost.node_cost import NodeCosts
from shardfx.ir.cost.replay import source_of
from shardfx.ir.cost.traffic import TripCounts, comm_name, over_loop, traffic
from shardfx.ir.graph import Graph, Node, Output, OutputKind, Value, op_name
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.sends import is_comm, is_part
from shardfx.ir.ops.traits import gives_alias
from shardfx.ir.program.lower import select
from shardfx.memory.rank_memory import RankMemory
from shardfx.report.report_rows import is_of_rank, stage_rows, tile_rows
from shardfx.runtime.recording import Recording
from shardfx.schedules.timeline import PlanTimeline

from .figures import Cause, CommRow, Communication, Report

if TYPE_CHECKING:
    from shardfx.compiled import Compiled


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
