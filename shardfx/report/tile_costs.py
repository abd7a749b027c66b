"""What tiles of images cost by layer: the rows that are exchanged, and the rims that several ranks compute."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from shardfx.ir.cost.node_cost import NodeCosts
from shardfx.ir.cost.traffic import traffic
from shardfx.ir.dim_sharding import DimSharding
from shardfx.ir.graph import Node
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.comm import halo
from shardfx.ir.ops.sends import loop_of
from shardfx.ir.spec import Spec


@dataclass(frozen=True)
class TileRow:
    """One layer: how often rows are exchanged for it, bytes that the rank which sends most sends, operations on a rank,
    and how many of them the rank with the largest rim does for rows that are another rank's own."""

    module: str
    exchanges: int
    nbytes: float
    flops: float
    rim_flops: float

    def __add__(self, other: TileRow) -> TileRow:
        """Both, of one layer."""
        return TileRow(
            self.module,
            self.exchanges + other.exchanges,
            self.nbytes + other.nbytes,
            self.flops + other.flops,
            self.rim_flops + other.rim_flops,
        )


def tile_rows(nodes: Iterable[Node], mesh: Mesh, prices: NodeCosts) -> list[TileRow]:
    """The layers for which rows are exchanged, or whose tiles overlap, in the order of the graph.

    What is exchanged counts for the layer that needs it.
    """
    chosen = list(nodes)
    if not any(node.op is halo for node in chosen):
        return []
    takers = {operand: node for node in reversed(chosen) for operand in node.operands if node.op is not halo}
    found: dict[str, TileRow] = {}
    for node in chosen:
        if node.op is halo:
            taker = takers.get(node.outs[0], node)
            sent = traffic(node, mesh)
            more = TileRow(taker.where.module, sent.iterations if sent.nbytes else 0, sent.total, 0.0, 0.0)
        else:
            flops = prices.of(node).flops * loop_of(node, mesh)
            more = TileRow(node.where.module, 0, 0.0, flops, flops * rim(node, mesh))
        found[more.module] = found[more.module] + more if more.module in found else more
    return [row for row in found.values() if row.exchanges or row.rim_flops]


def rim(node: Node, mesh: Mesh) -> float:
    """What the rank with the largest rim computes of a node for another rank, as a share of what rank 0 computes."""
    most = 0.0
    for value in node.outs:
        spec = value.spec
        if spec is None or not any(sharding.rows for sharding in spec.dims):
            continue
        tiles = Spec(
            tuple(DimSharding(sharding.axes) if sharding.rows else sharding for sharding in spec.dims), spec.partial
        )
        first, over = (
            dict.fromkeys(mesh.names, 0),
            [axis for sharding in spec.dims if sharding.rows for axis in sharding.axes],
        )
        ranks = mesh.along(first, over)
        sizes = [(_numel(spec, value.shape, mesh, at), _numel(tiles, value.shape, mesh, at)) for at in ranks]
        most = max(most, max(made - own for made, own in sizes) / max(sizes[0][0], 1))
    return most


def _numel(spec: Spec, shape: tuple[int, ...], mesh: Mesh, at: dict[str, int]) -> int:
    return math.prod(spec.local_shape(shape, mesh, at))
