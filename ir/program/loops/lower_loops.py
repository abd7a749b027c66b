"""Lowering of loops: where they begin and end, each iteration's part of inputs, and collected results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from shardfx.ir.dim_sharding import bounds
from shardfx.ir.graph import Node, Value
from shardfx.ir.ops import comm, memory_ops
from shardfx.ir.ops.comm_local import Site
from shardfx.ir.ops.local_ops import COLLECTING
from shardfx.ir.ops.loop import loop_ops
from shardfx.ir.ops.table import RankEmit
from shardfx.ir.shards import held_shape

from .loop_nest import PlannedLoop, iteration_place, iteration_rows, nodes_of, varies_over
from .loop_regions import close_loop

if TYPE_CHECKING:
    from shardfx.ir.program.lower import Lowering


aten = torch.ops.aten


@dataclass
class OpenLoop:
    """A loop that is being written: its first call, and its results by value."""

    begin: fx.Node
    left: dict[Value, Any] = field(default_factory=dict)
    behind: list[tuple[Value, Callable[[], Any]]] = field(default_factory=list)
    """What is made of collected values, once iterations are done."""


class LoopWriter:
    """Writes loops into a program that is being lowered."""

    def __init__(self, lowering: Lowering) -> None:
        self._to, self.mesh = lowering, lowering.mesh
        self._open: dict[str, OpenLoop] = {}

    def write(self, loop: PlannedLoop) -> None:
        """Write the steps of a loop, and its begin and end."""
        to, axis = self._to, loop.axis
        to.current = None
        opened = OpenLoop(to.call(loop_ops.begin, axis, self.mesh[axis].size, []))
        before = dict(to.env)
        self._open[axis] = opened
        if loop.order:
            opened.begin.args = (*opened.begin.args, loop.order)
        for name, steps in loop.units or (("", loop.steps),):
            if name:
                to.current = None
                to.call(loop_ops.action, opened.begin, name)
            full = self._take_shards(axis, steps)
            self._write(steps, loop)
            to.env.update(full)  # another action takes its own
        to.current = None
        close_loop(to.fx, opened.begin)
        del self._open[axis]
        to.env.clear()
        to.env.update(before | opened.left)
        for value, make in opened.behind:
            to.current = value.node
            to.env[value] = make()

    def _write(self, steps: Sequence[Node | PlannedLoop], loop: PlannedLoop) -> None:
        for step in steps:
            self._to.step(step)
            if isinstance(step, Node):
                for value in step.outs:
                    if value in loop.ends:
                        self._give_out(value)

    # ---- inputs and outputs -------------------------------------------------------------------------------------

    def _take_shards(self, axis: str, steps: Sequence[Node | PlannedLoop]) -> dict[Value, Any]:
        """Slice inputs that are sharded over the axis for this iteration, for some steps; gives what was known of
        them."""
        nodes = nodes_of(steps)
        taken = dict.fromkeys(value for node in nodes for value in node.operands if value.node is None)
        before = {value: self._to.env[value] for value in taken}
        for value in taken:
            assert value.spec is not None
            for dim, sharding in enumerate(value.spec.dims):
                if axis in sharding.axes:
                    rows = iteration_rows(value.spec, value.shape, self.mesh, self._to.coords, axis, dim)
                    self._to.env[value] = self._to.call(loop_ops.slice_of, self._to.env[value], dim, *rows)
        return before

    def _give_out(self, value: Value) -> None:
        """Write an iteration's part of an output to its place."""
        assert value.spec is not None
        to = self._to
        place = iteration_place(value.spec, value.shape, self.mesh, to.coords)
        dims, starts, lengths = list(place), [at[0] for at in place.values()], [at[1] for at in place.values()]
        shape = list(held_shape(value.spec, value.shape, self.mesh, to.rank))
        outermost = next(axis for axis in self._open if varies_over(axis, value))
        memory = self._before(outermost, memory_ops.empty, shape, value.type.dtype, str(to.device))
        made = to.call(loop_ops.write, memory, to.env[value], dims, starts, lengths, gives=shape)
        self._open[outermost].left[value] = made

    # ---- reductions ---------------------------------------------------------------------------------------------

    def collects(self, node: Node) -> bool:
        """Whether a node sums or concatenates a value over the iterations."""
        axes = node.kwargs.get("axes", ())
        return node.op in (comm.all_reduce, comm.all_gather) and any(self.mesh[axis].loop for axis in axes)

    def collected(self, emit: RankEmit) -> list[Any]:
        """Accumulate (or reduce otherwise) a value over the iterations, or concatenate its slices."""
        site = Site(emit)
        (axis,), (out,) = site.axes, emit.node.outs
        opened, dtype, device = self._open[axis], out.type.dtype, emit.device
        if emit.node.op is comm.all_reduce:
            collect, first = COLLECTING[site.reduce]
            memory = self._before(axis, memory_ops.filled, site.shape, fitting(first, dtype), dtype, device)
            made = emit.call(collect, memory, emit.args[0], gives=site.shape)
        else:
            full = site.local_view(site.target)
            memory = self._before(axis, memory_ops.empty, full, dtype, device)
            local = bounds(site.view[site.dim], site.target.dims[site.dim].axes, self.mesh, emit.coords)[0]
            start, length = bounds(site.view[site.dim], site.source.dims[site.dim].axes, self.mesh, emit.coords)
            made = emit.call(loop_ops.write, memory, emit.args[0], [site.dim], [start - local], [length], gives=full)
            if full != site.shape:
                opened.behind.append((out, lambda: self._to.call(aten.reshape.default, made, list(site.shape))))
        opened.left[out] = made
        return [made]

    def _before(self, axis: str, target: Any, *args: Any) -> fx.Node:
        """Write a call before the iterations of an axis."""
        with self._to.fx.inserting_before(self._open[axis].begin):
            return self._to.call(target, *args)


def fitting(number: float, dtype: torch.dtype) -> float | int:
    """A number clamped to a dtype's range: the largest there is for infinity."""
    if dtype.is_floating_point or dtype.is_complex:
        return number
    info = torch.iinfo(dtype) if dtype is not torch.bool else None
    if number == 0 or info is None:
        return int(number > 0)
    return info.max if number > 0 else info.min
