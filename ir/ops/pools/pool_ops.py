"""The ops that put a value away and fetch it again: a copy in another pool of memory, placed as it was.

    %4 = memory.to_host(%3) : f32[8{dp}, 6]                   in the host's memory; %3 may be let go
    %9 = memory.to_device(%4) : f32[8{dp}, 6]                 what takes %3 later takes %9

Each is a row of the table (:mod:`shardfx.ir.ops.table`): which pool its result lies in is a fact of the row. What an
input lies in says :attr:`shardfx.ir.graph.Input.pool`. Nothing but ``memory.to_device`` takes what lies elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardfx.ir.graph import Graph, Node, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.table import Keyword, OwnOp, RankEmit
from shardfx.ir.spec import Spec

from . import transfer


def _same(source: Spec, shape: Sequence[int], mesh: Mesh, **keywords: Any) -> Spec:
    """A value stays placed as it is."""
    return source


def _away(emit: RankEmit) -> list[Any]:
    x = emit.args[0]
    if emit.node.op is to_disk:
        return [emit.call(transfer.to_disk, x, emit.node.kwargs.get("folder", ""), gives=_shape(emit))]
    return [emit.call(transfer.to_host, x, gives=_shape(emit))]


def _back(emit: RankEmit) -> list[Any]:
    started = emit.call(transfer.to_device, emit.args[0], emit.device, gives=_shape(emit))
    return [emit.call(transfer.arrived, started, gives=_shape(emit))]


def _shape(emit: RankEmit) -> list[int]:
    (value,) = emit.node.outs
    assert value.spec is not None
    return list(emit.shape(value, value.spec))


to_host = OwnOp(
    "memory.to_host", {}, _same, 0.0, "operands", adjoint="memory.to_device", local=_away, glyph="", pool=transfer.HOST
)
to_disk = OwnOp(
    "memory.to_disk",
    {"folder": Keyword("text", needed=False)},
    _same,
    0.0,
    "operands",
    adjoint="memory.to_device",
    local=_away,
    glyph="",
    pool=transfer.DISK,
)
to_device = OwnOp(
    "memory.to_device", {}, _same, 0.0, "operands", adjoint="memory.to_host", local=_back, glyph="", fetches=True
)

POOL_OPS: dict[str, OwnOp] = {op.name: op for op in (to_host, to_disk, to_device)}
"""The ops that move values between pools, by name."""


def moves_pool(node: Node) -> bool:
    """Whether a node puts something away, or fetches it."""
    return isinstance(node.op, OwnOp) and (bool(node.op.pool) or node.op.fetches)


def pools(graph: Graph) -> dict[Value, str]:
    """Of each value that lies beside the device in which pool: ``"host"``, ``"disk"``."""
    found = {given.value: given.pool.partition(":")[0] for given in graph.inputs if given.pool}
    found.update({v: n.op.pool for n in graph.nodes if isinstance(n.op, OwnOp) and n.op.pool for v in n.outs})
    return found
