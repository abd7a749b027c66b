"""Communication: the few ops that change a placement, and the cheapest way from one placement to another.

Communication is never a plan of its own: it is what two placements that differ imply. :class:`Planner` finds
the cheapest sequence of steps by a shortest-path search over placements, costed by the mesh's links.

    f32[64, 512] +{tp}   ->   f32[64{tp}, 512]      comm.reduce_scatter(axes=[tp], dim=0)
    f32[64{tp}, 512]     ->   f32[64, 512{tp}]      comm.all_to_all(axes=[tp], dim=0, to=1)

What they send says :mod:`.sends`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardfx.ir.cut import Cut
from shardfx.ir.errors import Error
from shardfx.ir.mesh import Mesh
from shardfx.ir.spec import Spec, coarsen, on_view


@dataclass(frozen=True)
class CommOp:
    """An op that moves data between ranks; the node's keywords are ``axes``, ``dim``, ``to``, ``reduce``, ``view``."""

    name: str

    def __str__(self) -> str:
        return f"comm.{self.name}"


all_gather = CommOp("all_gather")
all_reduce = CommOp("all_reduce")
reduce_scatter = CommOp("reduce_scatter")
all_to_all = CommOp("all_to_all")
shard = CommOp("slice")
fused = {op: CommOp(f"{op.name}_fused") for op in (all_gather, all_reduce, reduce_scatter)}
"""Several collectives of one kind that travel together: operand k gives result k."""

COMM_OPS = {op.name: op for op in (all_gather, all_reduce, reduce_scatter, all_to_all, shard, *fused.values())}


def moved(
    op: CommOp,
    source: Spec,
    shape: Sequence[int],
    mesh: Mesh,
    *,
    axes: Sequence[str],
    dim: int | None = None,
    to: int | None = None,
    reduce: str | None = None,
    view: Sequence[int] | None = None,
) -> Spec:
    """The placement that a comm op with these keywords makes of ``source``.

    Example::

        moved(all_gather, Spec.parse("dp tp", mesh), (8,), mesh, axes=["tp"], dim=0)    # Spec "dp"

    Raises:
        Error: the op cannot start from there.
    """

    def fail(expected: str) -> Error:
        return Error(f"{op} cannot start from this placement", expected=expected, got=source.text(shape))

    axes = tuple(axes)
    kind = op.name.removesuffix("_fused")
    over = f"axes {{{','.join(axes)}}}"
    seen = source if view is None else on_view(shape, view, source, mesh)
    if seen is None or any(cut.parts for i, cut in enumerate(seen.dims) if i in (dim, to)):
        raise fail(f"plain cuts of the view {tuple(view or shape)}")
    cuts = [cut.axes for cut in seen.dims]
    partial = list(seen.partial)
    places = {"all_reduce": (), "all_to_all": (dim, to)}.get(kind, (dim,))
    if any(place is None or not 0 <= place < len(cuts) for place in places) or (kind == "all_to_all" and dim == to):
        raise fail(f"a dim of 0 .. {len(cuts) - 1} for each of {'dim, to' if to is not None else 'dim'}")
    if kind in ("all_reduce", "reduce_scatter"):
        for axis in axes:
            if (axis, reduce or "sum") not in partial:
                raise fail(f"a value that is partial ({reduce or 'sum'}) over {over}")
            partial.remove((axis, reduce or "sum"))
    if kind in ("all_gather", "all_to_all") and dim is not None:
        if cuts[dim][len(cuts[dim]) - len(axes) :] != axes:
            raise fail(f"a dim {dim} whose minor axes are {over}")
        cuts[dim] = cuts[dim][: len(cuts[dim]) - len(axes)]
    gains = to if kind == "all_to_all" else dim
    if kind in ("reduce_scatter", "slice", "all_to_all") and gains is not None:
        used = {axis for cut in cuts for axis in cut} | {axis for axis, _ in partial}
        if used & set(axes):
            raise fail(f"{over} that nothing else is cut by")
        cuts[gains] = cuts[gains] + axes
    dims = [cut if cut.axes == a else Cut(a) for cut, a in zip(seen.dims, cuts, strict=True)]
    result = Spec(tuple(dims), tuple(partial))
    return result if view is None else coarsen(shape, view, result, mesh)
