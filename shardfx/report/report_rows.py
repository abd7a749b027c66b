"""Rows of a report: pipeline stages with their sizes, and image tiles with their halo exchanges."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from shardfx.ir.cost.flops import flops_of
from shardfx.ir.cost.node_cost import NodeCosts
from shardfx.ir.cost.traffic import traffic
from shardfx.ir.dim_sharding import DimSharding
from shardfx.ir.graph import Graph, InputKind, Node
from shardfx.ir.mesh import Mesh
from shardfx.ir.names import block_of, prefixes
from shardfx.ir.ops import comm
from shardfx.ir.ops.comm import halo
from shardfx.ir.ops.sends import loop_of
from shardfx.ir.spec import Spec
from shardfx.schedules.timeline import rank_places


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
