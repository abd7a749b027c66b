"""Offload ops: a copy of a value to another memory pool, placed as it was, and back.

    %4 = memory.to_host(%3) : f32[8{dp}, 6]                   in the host's memory; %3 may be let go
    %9 = memory.to_device(%4) : f32[8{dp}, 6]                 what takes %3 later takes %9

Each is a row of the table (:mod:`shardfx.ir.ops.table`): which pool its result lies in is a fact of the row. What an
input lies in says :attr:`shardfx.ir.graph.Input.pool`. What lies elsewhere is fetched by ``memory.to_device``; or
something is computed there, of operands that all lie there, and so does what it gives, in the host's memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardfx.ir.graph import Graph, Node, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.table import Keyword, LocalOp, OwnOp, RankEmit
from shardfx.ir.registry import register
from shardfx.ir.spec import Spec

from . import transfer


def _same(source: Spec, shape: Sequence[int], mesh: Mesh, **keywords: Any) -> Spec:
    """The placement of a copy, which is that of its source."""
    return source


def _away(emit: RankEmit) -> list[Any]:
    x = emit.args[0]
    if emit.node.op is to_disk:
        started = emit.call(transfer.to_disk, x, emit.node.kwargs.get("folder", ""), gives=_shape(emit))
    else:
        started = emit.call(transfer.to_host, x, gives=_shape(emit))
    return [emit.call(transfer.stored, started, gives=_shape(emit))]


def _back(emit: RankEmit) -> list[Any]:
    started = emit.call(transfer.to_device, emit.args[0], emit.device, gives=_shape(emit))
    return [emit.call(transfer.arrived, started, gives=_shape(emit))]


def _shape(emit: RankEmit) -> list[int]:
    (value,) = emit.node.outs
    assert value.spec is not None
    return list(emit.shape(value, value.spec))


to_host = OwnOp("memory.to_host", {}, _same, _away, adjoint="memory.to_device", pool=transfer.HOST)
to_disk = OwnOp(
    "memory.to_disk",
    {"folder": Keyword("text", needed=False)},
    _same,
    _away,
    adjoint="memory.to_device",
    pool=transfer.DISK,
)
to_device = OwnOp("memory.to_device", {}, _same, _back, adjoint="memory.to_host", fetches=True)

register(to_host, to_disk, to_device)


def moves_pool(node: Node) -> bool:
    """Whether a node offloads or fetches a value."""
    return isinstance(node.op, OwnOp) and (bool(node.op.pool) or node.op.fetches)


def pools(graph: Graph) -> dict[Value, str]:
    """The pool of each value that is not in device memory: ``"host"``, ``"disk"``."""
    found = {inp.value: inp.pool.partition(":")[0] for inp in graph.inputs if inp.pool}
    for node in graph.nodes:
        pool = pool_of(node, found)
        if pool:
            found.update(dict.fromkeys(node.outs, pool))
    return found


def pool_of(node: Node, away: Mapping[Value, str]) -> str:
    """The pool of a node's results, if not the device's; ``away`` has those of operands."""
    row = node.op if isinstance(node.op, OwnOp) else None
    return pool_of_row(row, bool(away) and any(value in away for value in node.operands))


def pool_of_row(row: LocalOp | OwnOp | None, beside: bool) -> str:
    """The pool of a call's result: its row's, or host memory, if its operands are ``beside`` the device, and it does
    not fetch them."""
    if row is not None and (row.pool or row.fetches):
        return row.pool
    return transfer.HOST if beside else ""


def computed_beside(graph: Graph) -> set[Node]:
    """The nodes that are computed in another pool, from values there."""
    away = pools(graph)
    if not away:
        return set()
    return {node for node in graph.nodes if not moves_pool(node) and not away.keys().isdisjoint(node.operands)}
