"""Communication: the few ops that change a placement, and the cheapest way from one placement to another.

Communication is never a plan of its own: it is what two placements that differ imply. :class:`Planner` finds
the cheapest sequence of steps by a shortest-path search over placements, costed by the mesh's links.

    f32[64, 512] +{tp}   ->   f32[64{tp}, 512]      comm.reduce_scatter(axes=[tp], dim=0)
    f32[64{tp}, 512]     ->   f32[64, 512{tp}]      comm.all_to_all(axes=[tp], dim=0, to=1)

Bytes are those that one rank sends: for n ranks and a whole (gathered, unreduced) local value of b bytes,
an all-gather or reduce-scatter (n-1)/n b, an all-reduce twice that (Patarasu and Yuan, 2009), an all-to-all
(n-1)/n of what the rank holds, a slice nothing.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .errors import Error
from .mesh import Mesh
from .spec import WHOLE, Cut, Part, Spec, TensorType, compound, project


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


@dataclass(frozen=True)
class Step:
    """One comm op: over ``axes``, on sub-dim ``dim`` (to ``to``) of the value seen as ``view``; gives ``spec``."""

    op: CommOp
    axes: tuple[str, ...]
    spec: Spec
    dim: int | None = None
    to: int | None = None
    reduce: str | None = None
    view: tuple[int, ...] | None = None
    seconds: float = 0.0


_State = tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, str], ...]]
SLICE_SECONDS = 1e-8
"""A local slice sends nothing; this only makes a shorter path win a tie."""


def refine(shape: Sequence[int], specs: Sequence[Spec], mesh: Mesh) -> tuple[tuple[int, ...], list[Spec]] | None:
    """The value seen as sub-dims in which all the specs' cuts are plain; None where their parts do not nest."""
    view: list[int] = []
    columns: list[list[Cut]] = [[] for _ in specs]
    for dim, size in enumerate(shape):
        cuts = [spec.dims[dim] for spec in specs]
        ends = {size}
        ones = size > 1 and any(cut.sub(size)[0].size == 1 for cut in cuts)
        for cut in cuts:
            end = 1
            for part in cut.sub(size):
                end *= part.size
                ends.add(end)
        ordered = sorted(ends - {0})
        factors = [b // a for a, b in itertools.pairwise([1, *ordered])] if size else [0]
        if math.prod(factors) != size:
            return None
        factors = [1] * ones + [f for f in factors if f != 1] or [1]
        for column, cut in zip(columns, cuts, strict=True):
            projected = project(cut, size, factors, mesh)
            if projected is None or any(c.parts for c in projected):
                return None
            column.extend(projected)
        view.extend(factors)
    return tuple(view), [Spec(tuple(c), spec.partial) for c, spec in zip(columns, specs, strict=True)]


def coarsen(shape: Sequence[int], view: Sequence[int], spec: Spec, mesh: Mesh) -> Spec:
    """The inverse of :func:`refine` for one spec."""
    dims, at = [], 0
    for size in shape:
        parts: list[Part] = []
        product = 1
        while at < len(view) and (product < size or (product == size == 1 and not parts)):
            parts.append(Part(view[at], spec.dims[at].axes))
            product *= view[at]
            at += 1
        if size == 0:
            parts, at = [Part(0, spec.dims[at].axes)], at + 1
        dims.append(Cut(parts[0].axes) if len(parts) == 1 else compound(parts, mesh))
    return Spec(tuple(dims), spec.partial)


def on_view(shape: Sequence[int], view: Sequence[int], spec: Spec, mesh: Mesh) -> Spec | None:
    """The spec of the value seen as ``view``: the inverse of :func:`coarsen`. None where a cut does not fall on it."""
    dims: list[Cut] = []
    at = 0
    for size, cut in zip(shape, spec.dims, strict=True):
        start, product = at, 1
        while at < len(view) and (at == start or product < size):
            product *= view[at]
            at += 1
        projected = project(cut, size, view[start:at], mesh) if product == size else None
        if projected is None or any(c.parts for c in projected):
            return None
        dims.extend(projected)
    return Spec(tuple(dims), spec.partial) if at == len(view) else None


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


@dataclass
class Planner:
    """Finds and remembers the cheapest sequences of steps on one mesh."""

    mesh: Mesh
    _known: dict[tuple[TensorType, Spec, Spec], tuple[Step, ...]] = field(default_factory=dict)

    def steps(self, type: TensorType, source: Spec, target: Spec) -> tuple[Step, ...]:
        """The cheapest steps from ``source`` to ``target``, in which nothing may be partial that is not so already."""
        if source == target:
            return ()
        key = (type, source, target)
        if key not in self._known:
            self._known[key] = self._search(type, source, target)
        return self._known[key]

    def seconds(self, type: TensorType, source: Spec, target: Spec) -> float:
        """The time of :meth:`steps` by the mesh's links."""
        return sum(step.seconds for step in self.steps(type, source, target))

    def cost(self, op: CommOp, axes: Sequence[str], local_bytes: float) -> float:
        """Seconds of one collective; ``local_bytes`` of the whole (gathered or unreduced) local value."""
        n = self.mesh.extent(axes)
        if op is shard or n == 1:
            return SLICE_SECONDS
        links = [self.mesh[axis].link for axis in axes]
        factor = 2.0 if op is all_reduce else 1.0
        return factor * (
            max(link.latency for link in links) * math.log2(n)
            + local_bytes * (n - 1) / n / min(link.bandwidth for link in links)
        )

    def _search(self, type: TensorType, source: Spec, target: Spec) -> tuple[Step, ...]:
        refined = refine(type.shape, [source, target], self.mesh)
        if refined is None:
            return self._through_whole(type, source, target)
        view, (start, goal) = refined
        goal_state: _State = (tuple(c.axes for c in goal.dims), goal.partial)
        start_state: _State = (tuple(c.axes for c in start.dims), start.partial)
        itemsize = type.dtype.itemsize
        queue: list[tuple[float, int, _State, tuple[Step, ...]]] = [(0.0, 0, start_state, ())]
        counter = itertools.count(1)
        done: set[_State] = set()
        plain = len(view) == len(type.shape)
        while queue:
            seconds, _, state, path = heapq.heappop(queue)
            if state == goal_state:
                return path
            if state in done:
                continue
            done.add(state)
            for op, axes, dim, to, reduce, after, scale in self._moves(state, goal_state):
                if after in done:
                    continue
                big = self._local_numel(view, state[0]) * scale * itemsize
                cost = self.cost(op, axes, big)
                spec = coarsen(type.shape, view, Spec(tuple(Cut(a) for a in after[0]), after[1]), self.mesh)
                step = Step(op, axes, spec, dim, to, reduce, None if plain else view, cost)
                heapq.heappush(queue, (seconds + cost, next(counter), after, (*path, step)))
        return self._through_whole(type, source, target)

    def _through_whole(self, type: TensorType, source: Spec, target: Spec) -> tuple[Step, ...]:
        """Gather the dims that differ, then cut them anew: always possible, where parts do not nest."""
        middle = Spec(
            tuple(a if a == b else WHOLE for a, b in zip(source.dims, target.dims, strict=True)), target.partial
        )
        if middle in (source, target):
            raise AssertionError(f"no way from {source} to {target} of {type}")
        return self.steps(type, source, middle) + self.steps(type, middle, target)

    def _local_numel(self, view: Sequence[int], dims: Sequence[tuple[str, ...]]) -> float:
        return math.prod(size / self.mesh.extent(axes) for size, axes in zip(view, dims, strict=True))

    def _moves(
        self, state: _State, goal: _State
    ) -> Iterator[tuple[CommOp, tuple[str, ...], int | None, int | None, str | None, _State, float]]:
        """The steps that lead nearer: gather any minor axes; cut only what the goal cuts next."""
        dims, partial = state

        def put(changes: dict[int, tuple[str, ...]], left: tuple[tuple[str, str], ...] = partial) -> _State:
            return tuple(changes.get(i, axes) for i, axes in enumerate(dims)), left

        wanted = {}
        for i, axes in enumerate(dims):
            full = goal[0][i]
            if len(axes) < len(full) and full[: len(axes)] == axes:
                wanted[full[len(axes)]] = i
        used = {axis for axes in dims for axis in axes} | {axis for axis, _ in partial}
        for i, axes in enumerate(dims):
            for count in range(1, len(axes) + 1):
                tail = axes[-count:]
                yield all_gather, tail, i, None, None, put({i: axes[:-count]}), float(self.mesh.extent(tail))
            if axes and axes[-1] in wanted and wanted[axes[-1]] != i:
                to = wanted[axes[-1]]
                after = put({i: axes[:-1], to: (*dims[to], axes[-1])})
                yield all_to_all, axes[-1:], i, to, None, after, 1.0
        to_reduce: dict[str, list[str]] = {}
        for axis, reduce in partial:
            if (axis, reduce) not in goal[1]:
                to_reduce.setdefault(reduce, []).append(axis)
        for reduce, names in to_reduce.items():
            for group in {tuple(names), *((name,) for name in names)}:
                left = tuple(p for p in partial if p[0] not in group)
                yield all_reduce, group, None, None, reduce, put({}, left), 1.0
            for name in names:
                if name in wanted:
                    i = wanted[name]
                    left = tuple(p for p in partial if p[0] != name)
                    yield reduce_scatter, (name,), i, None, reduce, put({i: (*dims[i], name)}, left), 1.0
            joint = tuple(names)
            for i, axes in enumerate(dims):
                full = goal[0][i]
                tail = full[len(axes) :]
                if len(tail) > 1 and full[: len(axes)] == axes and set(tail) <= set(joint):
                    left = tuple(p for p in partial if p[0] not in tail)
                    yield reduce_scatter, tail, i, None, reduce, put({i: full}, left), 1.0
        for axis, i in wanted.items():
            if axis not in used:
                yield shard, (axis,), i, None, None, put({i: (*dims[i], axis)}), 1.0
