"""Communication ops: the few ops that change a placement.

Communication is never a plan of its own: it is what two placements that differ imply.

    f32[64, 512] +{tp}   ->   f32[64{tp}, 512]      comm.reduce_scatter(axes=[tp], dim=0)
    f32[64{tp}, 512]     ->   f32[64, 512{tp}]      comm.all_to_all(axes=[tp], dim=0, to=1)
    f32[64{h}]           ->   f32[64 for 64{h} by o-1 to o+1]    comm.halo(axes=[h], rows=[0 for 64 by o-1 to o+1])

Each is a row of the table (:mod:`.table`). Of several operands, operand k gives result k, in one transfer. What
they send says :mod:`.sends`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from shardfx.ir.dim_sharding import REPLICATED, DimSharding, Window, is_strided
from shardfx.ir.errors import Error
from shardfx.ir.graph import Node
from shardfx.ir.mesh import Mesh
from shardfx.ir.registry import GRAPH_OPS, register
from shardfx.ir.shards import RowExchange, has_rows, rows_for
from shardfx.ir.spec import Spec, coarsen, on_view

from . import comm_local
from .loop import stage_transfer
from .table import Keyword, OwnOp

AXES, DIM, REDUCE, VIEW = Keyword("axes"), Keyword("dim"), Keyword("word", needed=False), Keyword("sizes", needed=False)


# ---- what an op does to a placement: each raises an Error where it cannot start from there ---------------------


def _fail(op: str, source: Spec, shape: Sequence[int], expected: str) -> NoReturn:
    raise Error(f"{op} cannot start from this placement", expected=expected, got=source.text(shape))


def _collective(
    op: str,
    source: Spec,
    shape: Sequence[int],
    mesh: Mesh,
    *,
    axes: Sequence[str],
    view: Sequence[int] | None = None,
    reduces: bool = False,
    loses: str = "",
    gains: str = "",
    dim: int = -1,
    to: int = -1,
    reduce: str = "sum",
) -> Spec:
    """The effect of a collective over ``axes``: it reduces values that are partial over them (``reduces``); ``loses``
    and ``gains`` name the keyword of the dim that is no longer, or is now, sharded over them (innermost)."""
    axes, over = tuple(axes), f"axes {{{','.join(axes)}}}"
    seen = source if view is None else on_view(shape, view, source, mesh)
    if seen is None or any(sharding.parts for i, sharding in enumerate(seen.dims) if i in (dim, to)):
        _fail(op, source, shape, f"plain shardings of the view {tuple(view or shape)}")
    shardings, partial = [sharding.axes for sharding in seen.dims], list(seen.partial)
    named = [keyword for keyword in (loses, gains) if keyword]
    used = [place for keyword in named if 0 <= (place := {"dim": dim, "to": to}[keyword]) < len(shardings)]
    if len(set(used)) != len(named):
        _fail(op, source, shape, f"a dim of 0 .. {len(shardings) - 1} for each of {', '.join(named)}")
    for axis in axes if reduces else ():
        if (axis, reduce) not in partial:
            _fail(op, source, shape, f"a value that is partial ({reduce}) over {over}")
        partial.remove((axis, reduce))
    if loses:
        left = len(shardings[used[0]]) - len(axes)
        if shardings[used[0]][left:] != axes:
            _fail(op, source, shape, f"a dim {used[0]} whose minor axes are {over}")
        shardings[used[0]] = shardings[used[0]][:left]
    if gains:
        if {*axes} & {*(axis for sharding in shardings for axis in sharding), *(axis for axis, _ in partial)}:
            _fail(op, source, shape, f"{over} that shard nothing else")
        shardings[used[-1]] = shardings[used[-1]] + axes
    dims = [
        sharding if sharding.axes == a else DimSharding(a) for sharding, a in zip(seen.dims, shardings, strict=True)
    ]
    result = Spec(tuple(dims), tuple(partial))
    return result if view is None else coarsen(shape, view, result, mesh)


def _halo(
    source: Spec, shape: Sequence[int], mesh: Mesh, *, axes: Sequence[str], rows: Sequence[tuple[int, Window]]
) -> Spec:
    """The effect of a halo exchange: some dims, sharded into contiguous tiles, with the rows that windows reach."""
    shardings = [source.dims[dim] if 0 <= dim < len(source.dims) else REPLICATED for dim, _ in rows]
    if tuple(axis for sharding in shardings for axis in sharding.axes) != tuple(axes) or not all(shardings):
        dims = ", ".join(str(dim) for dim, _ in rows)
        _fail("comm.halo", source, shape, f"dims {dims} that are sharded over {{{','.join(axes)}}}")
    target = source
    for (dim, window), sharding in zip(rows, shardings, strict=True):
        if is_strided(sharding) or any(mesh[axis].loop for axis in sharding.axes):
            _fail("comm.halo", source, shape, f"one contiguous range of dim {dim} for each rank, and no loop axis")
        target = target.with_dim(dim, rows_for(sharding.axes, window, shape[dim], mesh))
    if any(sharding.rows is not None for sharding in shardings) and not has_rows(source, target, tuple(shape), mesh):
        _fail("comm.halo", source, shape, f"tiles, or rows that have those of {target.text(shape)}")
    return target


def _send(
    source: Spec, shape: Sequence[int], mesh: Mesh, *, axes: Sequence[str], origin: int, places: Sequence[int], tag: int
) -> Spec:
    """The effect of a send: the same placement, at other coordinates on an axis of stages."""
    (axis,) = axes
    if axis in (*source.axes, *source.partial_axes) or mesh[axis].loop:
        _fail("comm.send", source, shape, f"a value that is not sharded over {{{axis}}}, an axis of ranks")
    size, most = mesh[axis].size, stage_transfer.MOST
    if not places or not all(0 <= place < size for place in (origin, *places)) or not 0 <= tag < most:
        expected = f"coordinates 0 .. {size - 1} on {axis!r}, and a tag below {most}"
        raise Error("comm.send is to no rank", expected=expected, got=f"{origin} to {list(places)}, tag {tag}")
    return source


# ---- the rows of the table -------------------------------------------------------------------------------------


def bytes_away(node: Node, mesh: Mesh) -> float:
    """The bytes that the rank with a value sends to those that need it."""
    away = [place for place in node.kwargs["places"] if place != node.kwargs["origin"]]
    return float(len(away) * node.operands[0].local_bytes(mesh))


def rows_sent(node: Node, mesh: Mesh) -> float:
    """The bytes of the halo rows that the busiest rank sends."""
    source, target = node.operands[0].spec, node.outs[0].spec
    assert source is not None and target is not None
    dims = tuple(dim for dim, _ in node.kwargs["rows"])
    exchange = RowExchange(source, target, node.operands[0].shape, mesh, dict.fromkeys(mesh.names, 0), dims)
    return float(exchange.most * node.operands[0].type.dtype.itemsize)


def _row(name: str, local: Any, *, loses: str = "", gains: str = "", reduces: bool = False, **facts: Any) -> OwnOp:
    """The row of a collective, whose keywords follow from its effect."""
    dims = {keyword: DIM for keyword in (loses, gains) if keyword}
    keywords = {"axes": AXES, **dims, **({"reduce": REDUCE} if reduces else {}), "view": VIEW}
    place = partial(_collective, name, loses=loses, gains=gains, reduces=reduces)
    return OwnOp(name, keywords, place, local, **facts)


all_gather = _row(
    "comm.all_gather",
    comm_local.all_gather,
    loses="dim",
    factor=1.0,
    full="results",
    adjoint="comm.reduce_scatter",
    glyph="join",
)
all_reduce = _row(
    "comm.all_reduce", comm_local.all_reduce, reduces=True, factor=2.0, adjoint="comm.all_reduce", glyph="sum"
)
reduce_scatter = _row(
    "comm.reduce_scatter",
    comm_local.reduce_scatter,
    gains="dim",
    reduces=True,
    factor=1.0,
    adjoint="comm.all_gather",
    glyph="sum-split",
)
all_to_all = _row(
    "comm.all_to_all",
    comm_local.all_to_all,
    loses="dim",
    gains="to",
    factor=1.0,
    adjoint="comm.all_to_all",
    glyph="iteration",
)
shard = _row("comm.slice", comm_local.take, gains="dim", adjoint="comm.all_gather", glyph="split")
halo = OwnOp(
    "comm.halo",
    {"axes": AXES, "rows": Keyword("rows")},
    _halo,
    comm_local.halo,
    factor=1.0,
    glyph="iteration",
    rows=rows_sent,
)
send = OwnOp(
    "comm.send",
    {"axes": AXES, "origin": DIM, "places": Keyword("sizes"), "tag": DIM},
    _send,
    comm_local.send,
    factor=1.0,
    adjoint="comm.send",
    glyph="iteration",
    rows=bytes_away,
)

OPS = (all_gather, all_reduce, reduce_scatter, all_to_all, shard, halo, send)
register(*OPS)

_ENDINGS = ("_", "_out", "_coalesced", "_into", "_into_tensor", "_tensor", "_single")


def row_of_collective(name: str) -> OwnOp | None:
    """The comm op of a collective, by its name in torch or in programs; None if the graph has no such op.

    Example::

        row_of_collective("c10d.all_gather_into_tensor_out") is all_gather
    """
    kind = name.removeprefix("c10d.")
    for ending in _ENDINGS:
        kind = kind.removesuffix(ending)
    row: OwnOp | None = GRAPH_OPS.get(f"comm.{kind}")
    return row
