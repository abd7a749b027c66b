"""Communication: the few ops that change a placement.

Communication is never a plan of its own: it is what two placements that differ imply.

    f32[64, 512] +{tp}   ->   f32[64{tp}, 512]      comm.reduce_scatter(axes=[tp], dim=0)
    f32[64{tp}, 512]     ->   f32[64, 512{tp}]      comm.all_to_all(axes=[tp], dim=0, to=1)
    f32[64{h}]           ->   f32[64 for 64{h} by o-1 to o+1]    comm.halo(axes=[h], rows=[0 for 64 by o-1 to o+1])

Each is a row of the table (:mod:`.table`). Of several operands, operand k gives result k, and they travel together;
but those of ``comm.join`` are pieces of one value, which a rank made one by one.
What they send says :mod:`.sends`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardfx.ir.dim_sharding import WHOLE, DimSharding, Window, in_stretches
from shardfx.ir.errors import Error
from shardfx.ir.graph import Node
from shardfx.ir.mesh import Mesh
from shardfx.ir.shards import RowExchange, has_rows, rows_for
from shardfx.ir.spec import Spec, coarsen, on_view

from . import comm_local
from .loop import stage_transfer
from .table import Keyword, OwnOp

AXES, DIM, REDUCE, VIEW = Keyword("axes"), Keyword("dim"), Keyword("word", needed=False), Keyword("sizes", needed=False)


@dataclass(frozen=True)
class Effect:
    """What a comm op does to a placement, for the axes that it is over.

    ``reduces``: a sum over them is whole behind it. ``loses`` and ``gains`` name the keyword whose dim is no longer
    sharding over them, or is sharded over them now (innermost).
    """

    name: str
    reduces: bool = False
    loses: str = ""
    gains: str = ""

    def __call__(
        self,
        source: Spec,
        shape: Sequence[int],
        mesh: Mesh,
        *,
        axes: Sequence[str],
        dim: int | None = None,
        to: int | None = None,
        reduce: str = "sum",
        view: Sequence[int] | None = None,
    ) -> Spec:
        """The placement that the op makes of ``source``.

        Example::

            all_gather.place(Spec.parse("dp tp", mesh), (8,), mesh, axes=["tp"], dim=0)    # Spec "dp"

        Raises:
            Error: the op cannot start from there.
        """

        def fail(expected: str) -> Error:
            return Error(f"{self.name} cannot start from this placement", expected=expected, got=source.text(shape))

        axes, places = tuple(axes), {"dim": dim, "to": to}
        over = f"axes {{{','.join(axes)}}}"
        seen = source if view is None else on_view(shape, view, source, mesh)
        if seen is None or any(sharding.parts for i, sharding in enumerate(seen.dims) if i in (dim, to)):
            raise fail(f"plain shardings of the view {tuple(view or shape)}")
        shardings, partial = [sharding.axes for sharding in seen.dims], list(seen.partial)
        named = [keyword for keyword in (self.loses, self.gains) if keyword]
        used = [place for keyword in named if (place := places[keyword]) is not None and 0 <= place < len(shardings)]
        if len(set(used)) != len(named):
            raise fail(f"a dim of 0 .. {len(shardings) - 1} for each of {', '.join(named)}")
        if self.reduces:
            for axis in axes:
                if (axis, reduce) not in partial:
                    raise fail(f"a value that is partial ({reduce}) over {over}")
                partial.remove((axis, reduce))
        if self.loses:
            left = len(shardings[used[0]]) - len(axes)
            if shardings[used[0]][left:] != axes:
                raise fail(f"a dim {used[0]} whose minor axes are {over}")
            shardings[used[0]] = shardings[used[0]][:left]
        if self.gains:
            if {*axes} & {*(axis for sharding in shardings for axis in sharding), *(axis for axis, _ in partial)}:
                raise fail(f"{over} that nothing else is sharded by")
            shardings[used[-1]] = shardings[used[-1]] + axes
        dims = [
            sharding if sharding.axes == a else DimSharding(a) for sharding, a in zip(seen.dims, shardings, strict=True)
        ]
        result = Spec(tuple(dims), tuple(partial))
        return result if view is None else coarsen(shape, view, result, mesh)


@dataclass(frozen=True)
class Halo:
    """The effect of ``comm.halo``: some dims, split into one stretch for each rank, are held in other rows."""

    name: str

    def __call__(
        self, source: Spec, shape: Sequence[int], mesh: Mesh, *, axes: Sequence[str], rows: Sequence[tuple[int, Window]]
    ) -> Spec:
        """The placement in which every rank has, of each of the dims, what its chunk of another dim needs.

        Example::

            halo.place(Spec.parse("h", mesh), (8,), mesh, axes=["h"], rows=[(0, Window(8, 1, 1, -1, 1))])

        Raises:
            Error: the dims are not sharded over the axes, one after the other, into one stretch for each rank; or these
                overlap, and do not have the rows.
        """
        shardings = [source.dims[dim] if 0 <= dim < len(source.dims) else WHOLE for dim, _ in rows]
        if tuple(axis for sharding in shardings for axis in sharding.axes) != tuple(axes) or not all(shardings):
            expected = f"dims {', '.join(str(dim) for dim, _ in rows)} that are sharded over {{{','.join(axes)}}}"
            raise Error(f"{self.name} cannot start from this placement", expected=expected, got=source.text(shape))
        for (dim, _), sharding in zip(rows, shardings, strict=True):
            if in_stretches(sharding) or any(mesh[axis].loop for axis in sharding.axes):
                expected = f"one stretch of dim {dim} for each rank, and no loop axis"
                raise Error(f"{self.name} cannot start from this placement", expected=expected, got=source.text(shape))
        target = source
        for (dim, window), sharding in zip(rows, shardings, strict=True):
            target = target.with_dim(dim, rows_for(sharding.axes, window, shape[dim], mesh))
        if any(sharding.rows is not None for sharding in shardings) and not has_rows(
            source, target, tuple(shape), mesh
        ):
            expected = f"tiles, or rows that have those of {target.text(shape)}"
            raise Error(f"{self.name} cannot start from this placement", expected=expected, got=source.text(shape))
        return target


@dataclass(frozen=True)
class Send:
    """The effect of ``comm.send``: a value is held elsewhere along an axis of stages, in the same pieces."""

    name: str

    def __call__(
        self,
        source: Spec,
        shape: Sequence[int],
        mesh: Mesh,
        *,
        axes: Sequence[str],
        origin: int,
        places: Sequence[int],
        tag: int,
    ) -> Spec:
        """The same placement.

        Raises:
            Error: the axis shards the value, or is one of time, or has no such coordinates.
        """
        (axis,) = axes
        if axis in (*source.axes, *source.partial_axes) or mesh[axis].loop:
            expected = f"a value that is not sharded over {{{axis}}}, an axis of ranks"
            raise Error(f"{self.name} cannot start from this placement", expected=expected, got=source.text(shape))
        if not places or not all(0 <= place < mesh[axis].size for place in (origin, *places)):
            raise Error(
                f"{self.name} goes to what is not on the mesh",
                expected=f"coordinates 0 .. {mesh[axis].size - 1} on {axis!r}",
                got=f"from {origin} to {list(places)}",
            )
        if not 0 <= tag < stage_transfer.MOST:
            expected = f"a tag of 0 .. {stage_transfer.MOST - 1}: so many values of a graph may be sent"
            raise Error(f"{self.name} cannot be told from another", expected=expected, got=tag)
        return source


@dataclass(frozen=True)
class Join:
    """The effect of ``comm.join``: what a rank has of a dim in several pieces, it has as its tile."""

    name: str

    def __call__(self, source: Spec, shape: Sequence[int], mesh: Mesh, *, axes: Sequence[str], dim: int) -> Spec:
        """The placement that pieces are joined to: the dim in tiles.

        Raises:
            Error: the dim is not sharded over the axes.
        """
        if not 0 <= dim < len(source.dims) or source.dims[dim].axes != tuple(axes) or in_stretches(source.dims[dim]):
            expected = f"rows of dim {dim} over {{{','.join(axes)}}}"
            raise Error(f"{self.name} cannot start from this placement", expected=expected, got=source.text(shape))
        return source.with_dim(dim, DimSharding(tuple(axes)))


def bytes_away(node: Node, mesh: Mesh) -> float:
    """The bytes that the rank which has a value sends to those that need it."""
    away = [place for place in node.kwargs["places"] if place != node.kwargs["origin"]]
    return float(len(away) * node.operands[0].local_bytes(mesh))


def rows_sent(node: Node, mesh: Mesh) -> float:
    """The bytes of the rows that the rank which sends most sends."""
    source, target = node.operands[0].spec, node.outs[0].spec
    assert source is not None and target is not None
    dims = tuple(dim for dim, _ in node.kwargs["rows"])
    exchange = RowExchange(source, target, node.operands[0].shape, mesh, dict.fromkeys(mesh.names, 0), dims)
    return float(exchange.most * node.operands[0].type.dtype.itemsize)


all_gather = OwnOp(
    "comm.all_gather",
    {"axes": AXES, "dim": DIM, "view": VIEW},
    Effect("comm.all_gather", loses="dim"),
    factor=1.0,
    whole="results",
    adjoint="comm.reduce_scatter",
    local=comm_local.all_gather,
    glyph="join",
)
all_reduce = OwnOp(
    "comm.all_reduce",
    {"axes": AXES, "reduce": REDUCE, "view": VIEW},
    Effect("comm.all_reduce", reduces=True),
    factor=2.0,
    whole="operands",
    adjoint="comm.all_reduce",
    local=comm_local.all_reduce,
    glyph="sum",
)
reduce_scatter = OwnOp(
    "comm.reduce_scatter",
    {"axes": AXES, "dim": DIM, "reduce": REDUCE, "view": VIEW},
    Effect("comm.reduce_scatter", reduces=True, gains="dim"),
    factor=1.0,
    whole="operands",
    adjoint="comm.all_gather",
    local=comm_local.reduce_scatter,
    glyph="sum-split",
)
all_to_all = OwnOp(
    "comm.all_to_all",
    {"axes": AXES, "dim": DIM, "to": DIM, "view": VIEW},
    Effect("comm.all_to_all", loses="dim", gains="to"),
    factor=1.0,
    whole="operands",
    adjoint="comm.all_to_all",
    local=comm_local.all_to_all,
    glyph="iteration",
)
shard = OwnOp(
    "comm.slice",
    {"axes": AXES, "dim": DIM, "view": VIEW},
    Effect("comm.slice", gains="dim"),
    factor=0.0,
    whole="operands",
    adjoint="comm.all_gather",
    local=comm_local.take,
    glyph="split",
)
halo = OwnOp(
    "comm.halo",
    {"axes": AXES, "rows": Keyword("rows")},
    Halo("comm.halo"),
    factor=1.0,
    whole="operands",
    adjoint="",
    local=comm_local.halo,
    glyph="iteration",
    rows=rows_sent,
)

send = OwnOp(
    "comm.send",
    {"axes": AXES, "origin": DIM, "places": Keyword("sizes"), "tag": DIM},
    Send("comm.send"),
    factor=1.0,
    whole="operands",
    adjoint="comm.send",
    local=stage_transfer.handed_over,
    glyph="iteration",
    rows=bytes_away,
)

join = OwnOp(
    "comm.join",
    {"axes": AXES, "dim": DIM},
    Join("comm.join"),
    factor=0.0,
    whole="operands",
    adjoint="",
    local=comm_local.joined,
    glyph="join",
    joins=True,
)

OWN_OPS: dict[str, OwnOp] = {
    op.name: op for op in (all_gather, all_reduce, reduce_scatter, all_to_all, shard, halo, join, send)
}
"""The ops of the graph that are not torch's, by name."""

_ENDINGS = ("_", "_out", "_coalesced", "_into", "_into_tensor", "_tensor", "_single")


def row_of_collective(name: str) -> OwnOp | None:
    """The op that a collective does, from its name in torch or in programs; None where the graph has no such op.

    Example::

        row_of_collective("c10d.all_gather_into_tensor_out") is all_gather
    """
    kind = name.removeprefix("c10d.")
    for ending in _ENDINGS:
        kind = kind.removesuffix(ending)
    return OWN_OPS.get(f"comm.{kind}")
