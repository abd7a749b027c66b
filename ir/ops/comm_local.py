"""Lowering of ``comm`` ops to ``torch.ops._c10d_functional``, which torch.compile understands."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from shardfx.ir.cut import bounds, chunk
from shardfx.ir.graph import Node, Value
from shardfx.ir.spec import Spec, on_view

from . import pack

if TYPE_CHECKING:
    from shardfx.ir.program.lower import Writer

c10d = torch.ops._c10d_functional


@dataclass
class Pending:
    """A value whose collective is under way: ``finish`` writes the wait and what comes behind it."""

    finish: Callable[[], Any]


@dataclass
class Site:
    """One comm node on one rank: the value seen as sub-dims, and the group it talks to."""

    writer: Writer
    node: Node

    def __post_init__(self) -> None:
        kwargs = self.node.kwargs
        self.value: Value = self.node.operands[0]
        self.axes: tuple[str, ...] = tuple(kwargs.get("axes", ()))
        self.dim: int = kwargs.get("dim", 0)
        self.to: int = kwargs.get("to", 0)
        self.reduce: str = kwargs.get("reduce", "sum")
        mesh = self.writer.mesh
        source, target = self.value.spec, self.node.outs[0].spec
        assert source is not None and target is not None
        if "view" in kwargs:
            self.view = tuple(kwargs["view"])
            self.source, self.target = (self._on(spec) for spec in (source, target))
        else:
            self.view, self.source, self.target = self.value.shape, source, target
        self.n = mesh.extent(self.axes)
        self.group = mesh.group_name(self.writer.rank, self.axes)
        self.shape = self.writer.shape(self.node.outs[0])

    @cached_property
    def members(self) -> list[dict[str, int]]:
        """Where the ranks of the group stand."""
        mesh = self.writer.mesh
        return [mesh.coords(r) for r in mesh.group(self.writer.rank, self.axes)]

    def _on(self, spec: Spec) -> Spec:
        """A spec of the value on its view."""
        found = on_view(self.value.shape, self.view, spec, self.writer.mesh)
        assert found is not None, f"{spec} of {self.value} has no form on {self.view}"
        return found

    def local_view(self, spec: Spec) -> list[int]:
        return list(spec.local_shape(self.view, self.writer.mesh, self.writer.coords))

    def lengths(self, spec: Spec, dim: int) -> list[int]:
        """What each member of the group holds of a dim."""
        mesh, axes = self.writer.mesh, spec.dims[dim].axes
        return [bounds(self.view[dim], axes, mesh, coords)[1] for coords in self.members]


def _tail(site: Site, spec: Spec, dim: int) -> int:
    """The largest piece of a dim that any rank of any such group holds: what all pad to."""
    size: int = site.view[dim]
    for axis in spec.dims[dim].axes:
        size = chunk(size, site.writer.mesh[axis].size, 0)[1]
    return size


def all_reduce(writer: Writer, node: Node) -> None:
    site = Site(writer, node)
    started = writer.call(c10d.all_reduce.default, writer.use(site.value), site.reduce, site.group)
    writer.env[node.outs[0]] = Pending(lambda: _wait(writer, node, started))


def _wait(writer: Writer, node: Node, started: Any) -> Any:
    before, writer.current = writer.current, node
    waited = writer.call(c10d.wait_tensor.default, started)
    writer.current = before
    return waited


def all_gather(writer: Writer, node: Node) -> None:
    site = Site(writer, node)
    x = writer.use(site.value)
    lengths = site.lengths(site.source, site.dim)
    per = _tail(site, site.source, site.dim)
    plain = site.dim == 0 and all(length == per for length in lengths) and "view" not in node.kwargs
    if not plain:
        x = writer.call(pack.pack, x, site.local_view(site.source), site.dim, per)
    started = writer.call(c10d.all_gather_into_tensor.default, x, site.n, site.group)

    def finish() -> Any:
        waited = _wait(writer, node, started)
        if plain:
            return waited
        return writer.call(pack.unpack_gathered, waited, per, lengths, site.dim, list(site.shape))

    writer.env[node.outs[0]] = Pending(finish)


def reduce_scatter(writer: Writer, node: Node) -> None:
    site = Site(writer, node)
    x = writer.use(site.value)
    lengths = site.lengths(site.target, site.dim)
    per = _tail(site, site.target, site.dim)
    plain = site.dim == 0 and all(length == per for length in lengths) and "view" not in node.kwargs
    if not plain:
        x = writer.call(pack.pack_scattered, x, site.local_view(site.source), site.dim, per, lengths)
    started = writer.call(c10d.reduce_scatter_tensor.default, x, site.reduce, site.n, site.group)
    mine = bounds(site.view[site.dim], site.target.dims[site.dim].axes, writer.mesh, writer.coords)[1]

    def finish() -> Any:
        waited = _wait(writer, node, started)
        if plain:
            return waited
        return writer.call(pack.unpack_scattered, waited, mine, site.dim, list(site.shape))

    writer.env[node.outs[0]] = Pending(finish)


def all_to_all(writer: Writer, node: Node) -> None:
    """Each rank sends piece k of dim ``to`` to rank k, and joins what it gets along ``dim``."""
    site = Site(writer, node)
    x = writer.use(site.value)
    mine = site.local_view(site.source)
    send = site.lengths(site.target, site.to)
    keep = site.local_view(site.target)
    pieces = []
    for length in site.lengths(site.source, site.dim):
        shape = list(keep)
        shape[site.dim] = length
        pieces.append(shape)
    x = writer.call(pack.pack_exchange, x, mine, site.to, send)
    row = _numel(mine) // max(mine[site.to], 1) if mine[site.to] else 0
    sent, got = [row * length for length in send], [_numel(p) for p in pieces]
    started = writer.call(c10d.all_to_all_single.default, x, got, sent, site.group)

    def finish() -> Any:
        waited = _wait(writer, node, started)
        return writer.call(pack.unpack_exchange, waited, pieces, site.dim, list(site.shape))

    writer.env[node.outs[0]] = Pending(finish)


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def take(writer: Writer, node: Node) -> None:
    """A local slice: the target's bounds within what is held."""
    site = Site(writer, node)
    axes = site.source.dims[site.dim].axes
    held = bounds(site.view[site.dim], axes, writer.mesh, writer.coords)
    start, length = bounds(site.view[site.dim], site.target.dims[site.dim].axes, writer.mesh, writer.coords)
    view = site.local_view(site.source)
    x = writer.use(site.value)
    writer.env[node.outs[0]] = writer.call(pack.take, x, view, site.dim, start - held[0], length, list(site.shape))


def fused_all_reduce(writer: Writer, node: Node) -> None:
    values = node.operands
    shapes = [list(writer.shape(v)) for v in node.outs]
    group = writer.mesh.group_name(writer.rank, node.kwargs["axes"])
    flat = writer.call(pack.flatten, [writer.use(v) for v in values], 1)
    started = writer.call(c10d.all_reduce.default, flat, node.kwargs.get("reduce", "sum"), group)
    _unflatten(writer, node, started, shapes, 1)


def fused_all_gather(writer: Writer, node: Node) -> None:
    """Even gathers along dim 0: the buffer holds every rank's pieces one rank after the other."""
    shapes = [list(writer.shape(v)) for v in node.outs]
    n = writer.mesh.extent(node.kwargs["axes"])
    group = writer.mesh.group_name(writer.rank, node.kwargs["axes"])
    flat = writer.call(pack.flatten, [writer.use(v) for v in node.operands], 1)
    started = writer.call(c10d.all_gather_into_tensor.default, flat, n, group)
    _unflatten(writer, node, started, shapes, n)


def fused_reduce_scatter(writer: Writer, node: Node) -> None:
    shapes = [list(writer.shape(v)) for v in node.outs]
    n = writer.mesh.extent(node.kwargs["axes"])
    group = writer.mesh.group_name(writer.rank, node.kwargs["axes"])
    flat = writer.call(pack.flatten, [writer.use(v) for v in node.operands], n)
    started = writer.call(c10d.reduce_scatter_tensor.default, flat, node.kwargs.get("reduce", "sum"), n, group)
    _unflatten(writer, node, started, shapes, 1)


def _unflatten(writer: Writer, node: Node, started: Any, shapes: list[list[int]], pieces: int) -> None:
    done: list[Any] = []

    def finish(i: int) -> Any:
        if not done:
            waited = _wait(writer, node, started)
            done.append(writer.call(pack.unflatten, waited, shapes, pieces))
        return writer.call(operator.getitem, done[0], i)

    for i, value in enumerate(node.outs):
        writer.env[value] = Pending(partial(finish, i))


LOWER: dict[str, Callable[[Any, Node], None]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "slice": take,
    "all_reduce_fused": fused_all_reduce,
    "all_gather_fused": fused_all_gather,
    "reduce_scatter_fused": fused_reduce_scatter,
}
