"""What each stage of a plan has: its modules, parameters, bytes and operations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from shardfx.ir.cost.flops import flops_of
from shardfx.ir.graph import Graph, InputKind, Node, OutputKind
from shardfx.ir.names import block_of, prefixes
from shardfx.ir.ops import comm
from shardfx.schedules.timeline import rank_places


@dataclass(frozen=True)
class StageRow:
    """One stage. Parameters and operations are the model's own, whole and of a whole step; bytes are of one rank."""

    stage: int
    ranks: tuple[int, ...]
    modules: tuple[str, ...]
    parameters: int
    nbytes: int
    """Of its parameters, as a rank stores them."""
    sent: int
    """What a rank sends to other stages in an iteration."""
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
        held, names = [each.value for each in mine], [each.name for each in mine]
        sends = (node for node in graph.nodes if node.op is comm.send and _is_sent_by(stage, node))
        made.append(
            StageRow(
                stage,
                tuple(rank for rank, place in enumerate(places) if place == home),
                tuple(_shortened(_modules(names))),
                sum(value.type.numel for value in held),
                sum(value.local_bytes(graph.mesh) for value in held),
                int(sum(node.op.sends(node, graph.mesh).nbytes for node in sends)),
                sum(flops_of(node) for node in nodes),
            )
        )
    return tuple(made)


def _is_sent_by(stage: int, node: Node) -> bool:
    """Whether a stage sends in each iteration, for the work of others."""
    maker = node.operands[0].node
    return maker is not None and maker.at[:1] == (stage,) and bool(node.at)


def _modules(parameters: Iterable[str]) -> Iterable[str]:
    """The blocks that have the parameters, or the modules of the model's own."""
    return dict.fromkeys(block_of(name) or prefixes(name)[0] for name in parameters)


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
    """Whether a rank does a node; of a send, whether it sends."""
    coords = graph.mesh.coords(rank)
    if node.op is comm.send:
        (axis,) = node.kwargs["axes"]
        return bool(coords[axis] == node.kwargs["origin"])
    return graph.is_here(node.at, coords)


def gradients_of_rank(graph: Graph, rank: int) -> int:
    """The bytes of the gradients that a rank hands out."""
    coords = graph.mesh.coords(rank)
    given = {output.value for output in graph.outputs if output.kind is OutputKind.GRADIENT}
    here = (value for value in given if value.node is None or graph.is_here(value.node.at, coords))
    return sum(value.local_bytes(graph.mesh) for value in here)
