"""What waits for the backward, sharded over an axis on which every rank would hold the same."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from functools import cached_property

from shardfx.ir.graph import Graph, Node, Phase, Value
from shardfx.ir.ops import comm
from shardfx.ir.rewriter import Rewriter


@dataclass
class Slices:
    """Stores ``values`` sharded over ``axis`` (Korthikanti et al., Reducing Activation Recomputation, 2022).

    %1 = aten.add(%x, %0)                              %1 = aten.add(%x, %0) : [8, 6]
                                                 ->    %2 = comm.slice(%1, axes=[tp], dim=0) : [8{tp}, 6]
    %9 = aten.mul(%8, %1)                              %9 = comm.all_gather(%2, axes=[tp], dim=0) : [8, 6]
                                                       %10 = aten.mul(%8, %9)
    """

    graph: Graph
    axis: str
    values: Container[Value]
    _gathered: dict[Value, Value] = field(default_factory=dict, init=False)

    def of(self, rewriter: Rewriter, value: Value, anchor: Node) -> Value:
        """What stands for ``value`` at ``anchor``."""
        dim = self._dim(value) if value in self.values else None
        if dim is None or value.node is None or value.node.phase is not Phase.FORWARD or value in self._leaves:
            return value
        if value not in self._gathered:
            held = rewriter.comm(comm.shard, value, axes=[self.axis], dim=dim, why="waits for the backward in slices")
            rewriter.after(value.node, held)
            whole = rewriter.comm(comm.all_gather, held.outs[0], axes=[self.axis], dim=dim)
            whole.phase = anchor.phase
            rewriter.before(anchor, whole)
            self._gathered[value] = whole.outs[0]
        return self._gathered[value]

    @cached_property
    def _leaves(self) -> set[Value]:
        """What leaves the graph is there to its end."""
        return {output.value for output in self.graph.outputs}

    def _dim(self, value: Value) -> int | None:
        """The first dim that the axis shards evenly; None where it shards the value already, or none."""
        spec, mesh = value.spec, self.graph.mesh
        if spec is None or spec.partial or self.axis in spec.axes:
            return None
        for dim, (sharding, size) in enumerate(zip(spec.dims, value.shape, strict=True)):
            n = mesh.extent((*sharding.axes, self.axis))
            if not sharding.parts and size % n == 0 and size >= n:
                return dim
        return None
