"""Local versions of comm ops: pack, start, wait, unpack, on ``torch.ops._c10d_functional``.

    %5 = comm.all_gather(%4, axes=[tp], dim=1)  ->  pack = pack.pack(mm, [4, 32], 1, 32)
                                                    start = c10d.all_gather_into_tensor(pack, 2, 'dp2.tp2/tp@0')
                                                    wait = c10d.wait_tensor(start)
                                                    %5 = pack.unpack_gathered(wait, 32, [32, 32], 1, [4, 64])

A collective joins and splits along the first dim, in equal shards. Several operands are sent as one flat buffer.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from shardfx.ir.dim_sharding import bounds, chunk
from shardfx.ir.mesh import Mesh
from shardfx.ir.shards import Box, RowExchange
from shardfx.ir.spec import Spec, on_view

from . import pack
from .loop import stage_transfer
from .table import RankEmit

c10d = torch.ops._c10d_functional


class Site:
    """A comm node on one rank: its first operand, viewed as sub-dims, and its process group."""

    def __init__(self, emit: RankEmit) -> None:
        kwargs, self.mesh = emit.node.kwargs, emit.mesh
        self.emit, self.value = emit, emit.node.operands[0]
        self.axes: tuple[str, ...] = tuple(kwargs.get("axes", ()))
        self.dim: int = kwargs.get("dim", 0)
        self.to: int = kwargs.get("to", 0)
        self.reduce: str = kwargs.get("reduce", "sum")
        source, target = self.value.spec, emit.node.outs[0].spec
        assert source is not None and target is not None
        self.plain = "view" not in kwargs
        if self.plain:
            self.view, self.source, self.target = self.value.shape, source, target
        else:
            self.view = tuple(kwargs["view"])
            self.source, self.target = (self._on(spec) for spec in (source, target))
        self.n = self.mesh.extent(self.axes)
        self.group = emit.group(self.axes)
        self.shape = list(emit.shape(emit.node.outs[0], target))

    @cached_property
    def members(self) -> list[dict[str, int]]:
        """The coordinates of the group's ranks."""
        return self.mesh.along(self.emit.coords, self.axes)

    def _on(self, spec: Spec) -> Spec:
        """A spec of the value, on its view."""
        found = on_view(self.value.shape, self.view, spec, self.mesh)
        assert found is not None, f"{spec} of {self.value} has no form on {self.view}"
        return found

    def local_view(self, spec: Spec) -> list[int]:
        """The local shape of the view."""
        return list(spec.local_shape(self.view, self.mesh, self.emit.coords))

    def lengths(self, spec: Spec, dim: int) -> list[int]:
        """The local length of a dim on each member of the group."""
        axes = spec.dims[dim].axes
        return [bounds(self.view[dim], axes, self.mesh, coords)[1] for coords in self.members]

    def alike(self, spec: Spec, dim: int) -> bool:
        """Whether all ranks have equal shards of a dim, in all iterations."""
        axes = spec.dims[dim].axes
        if self.view[dim] % self.mesh.extent(axes) == 0:
            return True
        iterations = self.mesh.along(self.emit.coords, (axis for axis in axes if self.mesh[axis].loop))
        everywhere = [at for iteration in iterations for at in self.mesh.along(iteration, self.axes)]
        return all(bounds(self.view[dim], axes, self.mesh, at)[1] == self.largest(spec, dim) for at in everywhere)

    def largest(self, spec: Spec, dim: int) -> int:
        """The largest shard of a dim on any rank of any such group: the padded length."""
        size: int = self.view[dim]
        for axis in spec.dims[dim].axes:
            size = chunk(size, self.mesh[axis].size, 0)[1]
        return size

    def rows(self, spec: Spec) -> tuple[list[int], bool]:
        """The local sizes beside the dim, and whether the operand can be sent unpacked, if ranks split it by a spec."""
        row = [size for dim, size in enumerate(self.local_view(self.source)) if dim != self.dim]
        return row, self.dim == 0 and self.alike(spec, self.dim) and self.plain

    def travels(self, op: Any, x: Any, shape: Sequence[int], *args: Any) -> Any:
        """Start a collective on ``x`` and wait for it; ``shape`` is the shape of its result."""
        started = self.emit.call(op, x, *args, self.group, gives=shape)
        return self.emit.call(c10d.wait_tensor.default, started, gives=shape)

    def together(self, op: Any, shards: int, joined: int, *args: Any) -> list[Any]:
        """Send operands as one buffer: first all shards for the first rank; back come those of ``joined`` ranks."""
        emit, node = self.emit, self.emit.node
        shapes = [list(emit.shape(v, v.spec)) for v in node.outs if v.spec is not None]
        numel = sum(torch.Size(shape).numel() for shape in shapes)
        flat = emit.call(pack.flatten, list(emit.args), shards, gives=[numel // joined * shards])
        waited = self.travels(op, flat, [numel], *args)
        parts = emit.call(pack.unflatten, waited, shapes, joined)
        return [emit.call(operator.getitem, parts, i, gives=shape) for i, shape in enumerate(shapes)]


def all_reduce(emit: RankEmit) -> list[Any]:
    """The sum (or another reduction) of the values of all ranks in the group."""
    site = Site(emit)
    if len(emit.args) > 1:
        return site.together(c10d.all_reduce.default, 1, 1, site.reduce)
    return [site.travels(c10d.all_reduce.default, emit.args[0], site.shape, site.reduce)]


def all_gather(emit: RankEmit) -> list[Any]:
    """The concatenated shards of all ranks. Several operands: even shards of dim 0."""
    site = Site(emit)
    if len(emit.args) > 1:
        return site.together(c10d.all_gather_into_tensor.default, 1, site.n, site.n)
    x, per, row, plain = emit.args[0], site.largest(site.source, site.dim), *site.rows(site.source)
    x = x if plain else emit.call(pack.pack, x, site.local_view(site.source), site.dim, per)
    waited = site.travels(c10d.all_gather_into_tensor.default, x, [per * site.n, *row], site.n)
    lengths = site.lengths(site.source, site.dim)
    return [waited if plain else emit.call(pack.unpack_gathered, waited, per, lengths, site.dim, site.shape)]


def reduce_scatter(emit: RankEmit) -> list[Any]:
    """This rank's shard of the sum. Several operands: even shards of dim 0."""
    site = Site(emit)
    if len(emit.args) > 1:
        return site.together(c10d.reduce_scatter_tensor.default, site.n, 1, site.reduce, site.n)
    x, per, row, plain = emit.args[0], site.largest(site.target, site.dim), *site.rows(site.target)
    view, lengths = site.local_view(site.source), site.lengths(site.target, site.dim)
    x = x if plain else emit.call(pack.pack_scattered, x, view, site.dim, per, lengths)
    waited = site.travels(c10d.reduce_scatter_tensor.default, x, [per, *row], site.reduce, site.n)
    mine = bounds(site.view[site.dim], site.target.dims[site.dim].axes, site.mesh, emit.coords)[1]
    return [waited if plain else emit.call(pack.unpack_scattered, waited, mine, site.dim, site.shape)]


def all_to_all(emit: RankEmit) -> list[Any]:
    """Each rank sends shard k of dim ``to`` to rank k, and concatenates the received ones along ``dim``."""
    site = Site(emit)
    mine, keep = site.local_view(site.source), site.local_view(site.target)
    send = site.lengths(site.target, site.to)
    shards = []
    for length in site.lengths(site.source, site.dim):
        shape = list(keep)
        shape[site.dim] = length
        shards.append(shape)
    x = emit.call(pack.pack_exchange, emit.args[0], mine, site.to, send)
    row = torch.Size(mine).numel() // max(mine[site.to], 1) if mine[site.to] else 0
    sent, got = [row * length for length in send], [torch.Size(p).numel() for p in shards]
    waited = site.travels(c10d.all_to_all_single.default, x, [sum(got)], got, sent)
    return [emit.call(pack.unpack_exchange, waited, shards, site.dim, site.shape)]


def halo(emit: RankEmit) -> list[Any]:
    """A halo exchange: each pair of ranks exchanges the rows that they need of each other, corners too; a local slice
    if no rows are missing."""
    site, dims = Site(emit), [dim for dim, _ in emit.node.kwargs["rows"]]
    moved = RowExchange(site.source, site.target, tuple(site.view), site.mesh, emit.coords, tuple(dims))
    me = next(k for k, at in enumerate(moved.members) if all(at[axis] == emit.coords[axis] for axis in site.axes))
    x, view = emit.args[0], site.local_view(site.source)
    if moved.is_silent and not all(length for _, length in moved.needed[me]):
        return [emit.call(pack.take, x, view, dims[0], 0, 0, list(site.shape))]
    if moved.is_silent:
        for dim, (first, _), (start, length) in zip(dims, moved.stored[me], moved.needed[me], strict=True):
            before, view[dim] = list(view), length  # also where that is all: what is held is then held otherwise
            x = emit.call(pack.take, x, before, dim, start - first, length, list(view))
        return [x]

    def within(box: Box | None) -> list[list[int]]:
        """The position of a box in a rank's rows."""
        if box is None:
            return [[0, 0] for _ in dims]
        return [[start - first, length] for (start, length), (first, _) in zip(box, moved.stored[me], strict=True)]

    def shape(box: Box) -> list[int]:
        found = list(site.shape)
        for dim, (_, length) in zip(dims, box, strict=True):
            found[dim] = length
        return found

    row = torch.Size(size for dim, size in enumerate(view) if dim not in dims).numel()
    to = moved.sends(me)
    sent = [row * math.prod(length for _, length in box) if box else 0 for box in to]
    tiles, counts = moved.tiles(me)
    come = {k: torch.Size(shape(box)).numel() for k, box in tiles if k != me}
    got = [come.get(k, 0) for k in range(site.n)]
    packed = emit.call(pack.pack_rows, x, dims, [within(box) for box in to], gives=[sum(sent)])
    waited = site.travels(c10d.all_to_all_single.default, packed, [sum(got)], got, sent)
    places = [-1 if k == me else sorted(come).index(k) for k, _ in tiles]
    own = within(next((box for k, box in tiles if k == me), None))
    shapes = [shape(box) for _, box in tiles]
    if not tiles:  # what is received, which is nothing, is all that this rank needs
        places, shapes, counts = [0], [list(site.shape)], [1] * len(dims)
    return [emit.call(pack.unpack_rows, x, waited, dims, own, places, shapes, counts, gives=site.shape)]


def take(emit: RankEmit) -> list[Any]:
    """A local slice: the target's bounds in local rows."""
    site = Site(emit)
    size = site.view[site.dim]
    local = bounds(size, site.source.dims[site.dim].axes, site.mesh, emit.coords)
    start, length = bounds(size, site.target.dims[site.dim].axes, site.mesh, emit.coords)
    view = site.local_view(site.source)
    return [emit.call(pack.take, emit.args[0], view, site.dim, start - local[0], length, site.shape)]


def send(emit: RankEmit) -> list[Any]:
    """One rank's part of a send: it sends to the ranks that need the value, or receives it; others do nothing."""
    kwargs, node, mesh = emit.node.kwargs, emit.node, emit.mesh
    (axis,) = kwargs["axes"]
    mine, origin, places, tag = emit.coords[axis], kwargs["origin"], kwargs["places"], kwargs["tag"]
    (spec,) = {value.spec for value in node.operands}
    assert spec is not None
    group, iteration = emit.group((axis,)), iteration_number(spec, mesh, emit.coords)
    if mine == origin:
        for place in places:
            if place != mine:
                emit.call(stage_transfer.send, emit.args[0], place, tag, iteration, group)
        return [emit.args[0] if mine in places else None]
    if mine not in places:
        return [None]
    (value,) = node.outs
    assert value.spec is not None
    shape = list(emit.shape(value, value.spec))
    started = emit.call(
        stage_transfer.receive, shape, value.type.dtype, emit.device, origin, tag, iteration, group, gives=shape
    )
    return [emit.call(c10d.wait_tensor.default, started, gives=shape)]


def iteration_number(spec: Spec, mesh: Mesh, coords: Mapping[str, int]) -> int:
    """The number of the iteration in which a value is sent: of all loop axes that it depends on, flattened."""
    iteration = 0
    for axis in mesh.axes:
        if axis.loop and (axis.name in spec.axes or axis.name in spec.partial_axes):
            iteration = iteration * axis.size + coords[axis.name]
    return iteration
