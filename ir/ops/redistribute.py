"""Redistribution: the cheapest steps from one placement to another, a shortest path costed by the mesh's links.

f32[64, 512] +{tp}   ->   f32[64{tp}, 512]      comm.reduce_scatter(axes=[tp], dim=0)
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shardfx.ir.dim_sharding import REPLICATED, DimSharding, Window, is_strided
from shardfx.ir.mesh import Mesh
from shardfx.ir.shards import RowExchange, has_rows, rows_for
from shardfx.ir.spec import Spec, TensorType, coarsen, refine

from .comm import all_gather, all_reduce, all_to_all, halo, reduce_scatter, shard
from .sends import exchanged
from .table import OwnOp


@dataclass(frozen=True)
class CommStep:
    """One comm op: over ``axes``, on sub-dim ``dim`` (to ``to``) of the value seen as ``view``; gives ``spec``."""

    op: OwnOp
    axes: tuple[str, ...]
    spec: Spec
    dim: int | None = None
    to: int | None = None
    reduce: str | None = None
    view: tuple[int, ...] | None = None
    seconds: float = 0.0
    rows: tuple[tuple[int, Window], ...] | None = None
    """The dims of a halo, and the windows through which they are read."""


_State = tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, str], ...]]
EARLY = 10**9
COLLECTED = 1.0
"""The extra cost of collecting over iterations, which ends the loop: so it is done only if necessary."""
SLICE_SECONDS = 1e-8
"""The nominal cost of a local slice, which sends nothing: it breaks ties in favour of shorter paths."""


@dataclass
class Redistribution:
    """Finds and caches the cheapest sequences of steps on one mesh."""

    mesh: Mesh
    each: bool = False
    """Reduce partial values in each iteration, before they are collected."""
    _known: dict[tuple[TensorType, Spec, Spec], tuple[CommStep, ...]] = field(default_factory=dict)

    def steps(self, type: TensorType, source: Spec, target: Spec) -> tuple[CommStep, ...]:
        """The cheapest steps from ``source`` to ``target``, which add no partial axes."""
        if source == target:
            return ()
        key = (type, source, target)
        if key not in self._known:
            self._known[key] = self._search(type, source, target)
        return self._known[key]

    def seconds(self, type: TensorType, source: Spec, target: Spec) -> float:
        """The time of :meth:`steps` by the mesh's links."""
        return sum(step.seconds for step in self.steps(type, source, target))

    def cost(self, op: OwnOp, axes: Sequence[str], local_bytes: float) -> float:
        """The time of one collective; ``local_bytes`` of the full (gathered or unreduced) local value."""
        ranks = self.mesh.extent(axes)
        if any(self.mesh[axis].loop for axis in axes):
            return COLLECTED if op is not shard else SLICE_SECONDS
        return self.mesh.link(axes).seconds(*op.sent(local_bytes, ranks)) or SLICE_SECONDS

    def _search(self, type: TensorType, source: Spec, target: Spec) -> tuple[CommStep, ...]:
        rows = any(a.rows is not None and a != b for a, b in zip(source.dims, target.dims, strict=True))
        if rows and has_rows(source, target, type.shape, self.mesh):
            return (self._halo(type, source, target),)
        if rows:  # that overlap: of nothing else may they be a part
            own = Spec(tuple(a if a.rows is None else DimSharding(a.axes) for a in source.dims), source.partial)
            return (self._halo(type, source, own), *self.steps(type, own, target))
        tiles = self._as_tiles(type.shape, source, target)
        if tiles != target:
            return (*self.steps(type, source, tiles), self._halo(type, tiles, target))
        refined = refine(type.shape, [source, target], self.mesh)
        if refined is None:
            return self._through_replicated(type, source, target)
        view, (start, goal) = refined
        goal_state: _State = (tuple(c.axes for c in goal.dims), goal.partial)
        start_state: _State = (tuple(c.axes for c in start.dims), start.partial)
        itemsize = type.dtype.itemsize
        queue: list[tuple[float, int, _State, tuple[CommStep, ...]]] = [(0.0, 0, start_state, ())]
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
                stored = math.prod(n / self.mesh.extent(axes) for n, axes in zip(view, state[0], strict=True))
                big = stored * scale * itemsize
                cost = self.cost(op, axes, big) * self._iterations(state, axes)
                spec = coarsen(type.shape, view, Spec(tuple(DimSharding(a) for a in after[0]), after[1]), self.mesh)
                step = CommStep(op, axes, spec, dim, to, reduce, None if plain else view, cost)
                heapq.heappush(queue, (seconds + cost, next(counter), after, (*path, step)))
        return self._through_replicated(type, source, target)

    def _as_tiles(self, shape: Sequence[int], source: Spec, target: Spec) -> Spec:
        """The placement from which a halo leads to the target: where the target has other rows than tiles of the
        dim, those tiles; where source and target have one contiguous range each for the same ranks, the source's."""
        found = target
        for dim, (a, b) in enumerate(zip(source.dims, target.dims, strict=True)):
            tiled = a.axes == b.axes and a != b and a.rows is None and not is_strided(a) and not is_strided(b)
            if tiled and not any(self.mesh[axis].loop for axis in a.axes) and self._reached(b, shape[dim]):
                found = found.with_dim(dim, a)
            elif b.rows is not None and a != b:
                found = found.with_dim(dim, DimSharding(b.axes))
        return found

    def _reached(self, sharding: DimSharding, size: int) -> bool:
        """Whether a halo exchange through the window of a sharding results in that sharding."""
        return rows_for(sharding.axes, _window(sharding, size), size, self.mesh) == sharding

    def _halo(self, type: TensorType, tiles: Spec, target: Spec) -> CommStep:
        rows = tuple(
            (dim, _window(b, size))
            for dim, (a, b, size) in enumerate(zip(tiles.dims, target.dims, type.shape, strict=True))
            if a != b
        )
        axes = tuple(axis for dim, _ in rows for axis in tiles.dims[dim].axes)
        dims, first = tuple(dim for dim, _ in rows), dict.fromkeys(self.mesh.names, 0)
        most = RowExchange(tiles, target, type.shape, self.mesh, first, dims).most * type.dtype.itemsize
        seconds = self.mesh.link(axes).seconds(*exchanged(self.mesh.extent(axes), most)) or SLICE_SECONDS
        return CommStep(halo, axes, target, rows=rows, seconds=seconds)

    def _through_replicated(self, type: TensorType, source: Spec, target: Spec) -> tuple[CommStep, ...]:
        """Gather the differing dims and shard them again: always possible, also if parts do not nest."""
        middle = Spec(
            tuple(a if a == b else REPLICATED for a, b in zip(source.dims, target.dims, strict=True)), target.partial
        )
        if middle in (source, target):
            raise AssertionError(f"no way from {source} to {target} of {type}")
        return self.steps(type, source, middle) + self.steps(type, middle, target)

    def _iterations(self, state: _State, over: Sequence[str]) -> int:
        """How often a step from there is done: what hangs on an iteration is sent in each. Where sums are to be reduced
        in each iteration, what is collected before counts as dear instead."""
        partial = {axis for axis, _ in state[1]}
        if self.each:
            early = any(self.mesh[axis].loop for axis in over) and any(not self.mesh[axis].loop for axis in partial)
            return EARLY if early else 1
        axes = {axis for dim in state[0] for axis in dim} | partial
        return self.mesh.extent(axis for axis in axes if self.mesh[axis].loop)

    def _moves(
        self, state: _State, goal: _State
    ) -> Iterator[tuple[OwnOp, tuple[str, ...], int | None, int | None, str | None, _State, float]]:
        """The steps towards the goal; over a loop axis only collecting and splitting."""
        for move in self._any_moves(state, goal):
            op, axes = move[:2]
            if not any(self.mesh[axis].loop for axis in axes) or self._over_iterations(op, axes, state, goal):
                yield move

    def _over_iterations(self, op: OwnOp, axes: Sequence[str], state: _State, goal: _State) -> bool:
        """Whether a step may be one over iterations: of one axis; and what hangs on iterations within these, and shall
        not, is collected over those before."""
        if len(axes) > 1 or op not in (all_gather, all_reduce):
            return len(axes) == 1 and op is shard
        hangs, shall = ({each for dim in at[0] for each in dim} | {each for each, _ in at[1]} for at in (state, goal))
        within = self.mesh.order(axes[0])
        return not any(self.mesh[each].loop and self.mesh.order(each) > within for each in hangs - shall)

    def _any_moves(
        self, state: _State, goal: _State
    ) -> Iterator[tuple[OwnOp, tuple[str, ...], int | None, int | None, str | None, _State, float]]:
        """The steps towards the goal: gather any minor axes; shard only as the goal requires next."""
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
                to = wanted.get(tail[0], i)
                if to != i and goal[0][to][len(dims[to]) :][:count] == tail:
                    after = put({i: axes[:-count], to: (*dims[to], *tail)})
                    yield all_to_all, tail, i, to, None, after, 1.0
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


def _window(sharding: DimSharding, size: int) -> Window:
    """The window of a sharding's rows: one row, or the rows of a block."""
    if sharding.rows is not None:
        return sharding.rows
    blocks, *rest = sharding.sub(size)
    each = math.prod(part.size for part in rest)
    return Window(blocks.size, each, 1, 0, each - 1)
