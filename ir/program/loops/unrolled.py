"""Unrolling a rank's loops into ranks: the program of one iteration, as if the loop axis were an axis of ranks.

    iteration = loop.begin('mb', 4, ...)                  of iteration 2, where mb is an axis of ranks:
        at = loop.index(iteration, 0, 16)
        part = loop.slice(x, 0, at, 16)              (the slice of iteration 2 is all of x)
        grad = aten.mm(part, w)                      grad = aten.mm(x, w)
        sum = loop.add(total, grad)                  sum = c10d.all_reduce(grad, 'sum', 'mb4.dp2/mb@1')
    done = loop.end(iteration, ...)                      wait = c10d.wait_tensor(sum)

What a loop accumulates is what so many ranks would reduce or gather. So what is proven of ranks is proven of
iterations: each is there once, with its own rows, and is added once. What is no such program is rejected here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import fx

from shardfx.ir.graph import Graph, Node, Output, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops import memory_ops, pack
from shardfx.ir.ops.local_ops import COLLECTING, row_of
from shardfx.ir.ops.loop import loop_ops
from shardfx.ir.program.lower import fitting
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.shards import held_shape
from shardfx.ir.spec import Spec

from .loop_nest import iteration_place, iteration_rows, loop_axes
from .loop_regions import loop_role

c10d = torch.ops._c10d_functional
REDUCTION: dict[Any, tuple[str, float]] = {collect: (reduce, first) for reduce, (collect, first) in COLLECTING.items()}


class NotALoop(Exception):
    """The loops of a program differ from those of its plan: how, and at which node."""

    def __init__(self, what: str, node: fx.Node) -> None:
        super().__init__(what)
        self.what, self.node = what, node


@dataclass
class IterationOutput:
    """An iteration's part of an output: its place in the rank's result, and which call puts it there."""

    x: Any
    place: dict[int, tuple[int, int]]
    shape: list[int]
    dtype: Any
    node: fx.Node


def loops_as_ranks(mesh: Mesh) -> Mesh:
    """The mesh on which each iteration is a rank of its own."""
    return Mesh(links={axis.name: axis.link for axis in mesh.axes}, **{axis.name: axis.size for axis in mesh.axes})


def unrolled(program: RankProgram, graph: Graph, rank: int) -> RankProgram:
    """The program of one iteration of a rank's program as that of a ``rank`` of the mesh :func:`loops_as_ranks`, on
    which ``graph`` is planned. Scopes and orders of a valid program are right (:mod:`shardfx.ir.program.scopes`).

    Raises:
        NotALoop: iterations are left out or run twice, take other rows than their own, or something leaves them that
            they do not accumulate.
    """
    return _Unrolling(program, graph, rank).run()


class _Unrolling:
    """The unrolling of a program into one of its iterations."""

    def __init__(self, program: RankProgram, graph: Graph, rank: int) -> None:
        self.program, self.planned, self.rank = program, graph, rank
        self.coords = graph.mesh.coords(rank)
        self.time = loop_axes(program.mesh)
        self.fx = fx.Graph()
        self.env: dict[fx.Node, Any] = {}
        self.place_of = {value.name: node for node in graph.nodes for value in node.outs}
        self.sources = dict(zip((n for n in program.graph.nodes if n.op == "placeholder"), program.inputs, strict=True))
        self.taken: dict[fx.Node, frozenset[str]] = {}
        """Of an input that holds shards of several iterations, and of parts of it: the axes over which it is taken."""
        self.open: list[fx.Node] = []
        self.inside: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self.left: dict[fx.Node, tuple[fx.Node, ...]] = {}
        """Of what is collected: the loops that collect it."""
        self.memory: set[fx.Node] = set()
        """What iterations go on from."""

    def run(self) -> RankProgram:
        for node in self.program.graph.nodes:
            self.inside[node] = tuple(self.open)
            if node.op == "placeholder":
                self.env[node] = self.fx.node_copy(node)
                self.taken[node] = frozenset()
            elif node.op == "output":
                self._output(node)
            elif node.op == "get_attr":
                self.env[node] = self.fx.node_copy(node)
            else:
                self._call(node)
        of = {(inp.kind, inp.name): inp for inp in self.planned.inputs}
        to = {(output.kind, output.name): output for output in self.planned.outputs}
        return replace(
            self.program,
            rank=self.rank,
            mesh=self.planned.mesh,
            graph=self.fx,
            inputs=tuple(of[inp.kind, inp.name] for inp in self.program.inputs),
            outputs=tuple(to[output.kind, output.name] for output in self.program.outputs),
        )

    def _call(self, node: fx.Node) -> None:
        row = row_of(node.target)
        part = row.loop if row is not None else ""
        if part == "unit":
            return
        if part == "opens":
            self._opens(node)
        elif part == "closes":
            self.open.pop()
        elif part == "number":
            self.env[node] = row.function(*(self._number(arg, node) for arg in node.args))  # type: ignore[union-attr]
        elif part == "collects":
            self._collects(node)
        elif node.target is loop_ops.slice_of:
            self._shard(node)
        elif node.target is memory_ops.filled or (node.target is memory_ops.part and node.args[0] not in self.env):
            self.memory.add(node)
        elif node.target is memory_ops.join and node.args[0] in self.memory:
            self._copied(node, pack.flatten, node.args[1:])
        else:
            self._copied(node)

    def _opens(self, node: fx.Node) -> None:
        axis, count = node.args[:2]
        mesh = self.program.mesh
        if axis not in self.time or mesh[str(axis)].size != count:
            raise NotALoop(f"{count} iterations of {axis!r}, where the mesh is {mesh!r}", node)
        if any(other.args[0] == axis for other in self.open):
            raise NotALoop(f"iterations of {axis!r} within iterations of {axis!r}", node)
        self.open.append(node)
        self.env[node] = self.coords[str(axis)]

    def _copied(self, node: fx.Node, target: Any = None, args: Any = None) -> None:
        args = node.args if args is None else args
        fx.map_arg((args, node.kwargs), lambda used: self._usable(used, node))
        operands, named = fx.map_arg((args, node.kwargs), self.env.__getitem__)
        row = row_of(node.target)
        if row is not None and row.group is not None:
            operands = (*operands[: row.group], self._group(node, str(operands[row.group])), *operands[row.group + 1 :])
        self.env[node] = self._make(node, target or node.target, operands, named)

    def _shard(self, node: fx.Node) -> None:
        """An iteration's shard of an input."""
        args: Any = node.args
        source, dim, start, length = args
        if not isinstance(source, fx.Node) or source not in self.taken:
            raise NotALoop(f"{node.name} is an iteration's part of what is no input", node)
        start, length = self._number((start, length), node)
        left = [loop for loop in self.open if loop.args[0] in self._loop_axes_of(source) - self.taken[source]]
        origin = self._origin(source)
        spec, shape = self.sources[origin].value.spec, self.sources[origin].value.shape
        assert spec is not None
        over = next((loop for loop in left if dim < len(spec.dims) and loop.args[0] in spec.dims[dim].axes), None)
        if over is None:
            raise NotALoop(f"{node.name} takes a part of dim {dim}, which these iterations do not shard", node)
        axis = str(over.args[0])
        expected = iteration_rows(spec, shape, self.program.mesh, self.coords, axis, dim)
        if (start, length) != expected:
            what = f"iteration {self.coords[axis]} of {axis} takes {length} rows of {origin.name} from {start} on"
            raise NotALoop(f"{what}, where its own are {expected[1]} from {expected[0]} on", node)
        self.env[node] = self.env[source]
        self.taken[node] = self.taken[source] | {axis}

    def _output(self, node: fx.Node) -> None:
        value: Any = node.args[0]
        results = []
        for output, result in zip(self.program.outputs, value, strict=False):
            made = self.env.get(result) if isinstance(result, fx.Node) else result
            spec = output.value.spec
            if isinstance(made, IterationOutput):
                made = self._own_part(output, made)
            elif isinstance(result, fx.Node) and result not in self.taken:
                self._usable(result, node)
            assert spec is not None
            results.append(made)
        self.fx.output(tuple(results))

    def _own_part(self, output: Output, made: IterationOutput) -> Any:
        """What this iteration has put, where it is the output's own place for it."""
        spec, shape = output.value.spec, output.value.shape
        assert spec is not None
        place = iteration_place(spec, shape, self.program.mesh, self.coords)
        local = held_shape(spec, shape, self.program.mesh, self.program.rank)
        if made.place != place or tuple(made.shape) != local:
            what = f"an iteration's part of {output.kind} {output.name} is put at {made.place}, not {place}"
            raise NotALoop(what, made.node)
        if made.dtype != output.value.type.dtype:
            what = f"{output.kind} {output.name} is put into memory of {made.dtype}, not {output.value.type.dtype}"
            raise NotALoop(what, made.node)
        return made.x

    def _number(self, arg: Any, node: fx.Node) -> Any:
        def known(each: fx.Node) -> Any:
            if each not in self.env or isinstance(self.env[each], fx.Node):
                raise NotALoop(f"{each.name} is no number of these iterations", node)
            return self.env[each]

        return fx.map_arg(arg, known)

    def _group(self, node: fx.Node, name: str) -> str:
        """The group of this iteration's rank with the same iterations of others."""
        mesh, own = self.program.mesh, name.partition("/")[2].partition("@")[0].split(".")
        if not set(own) <= set(mesh.names) or name != mesh.group_name(self.program.rank, own):
            raise NotALoop(f"{name} is no group of rank {self.program.rank}", node)
        return self.planned.mesh.group_name(self.rank, own)

    def _usable(self, used: fx.Node, node: fx.Node) -> None:
        if used not in self.env:
            raise NotALoop(f"{used.name} is memory that iterations collect into, and is used otherwise", node)
        if any(loop in self.open for loop in self.left.get(used, ())):
            raise NotALoop(f"{used.name} is used in the iterations that collect it", node)
        if used in self.taken and (missing := self._loop_axes_of(used) - self.taken[used]):
            what = f"{used.name} holds what all iterations of {', '.join(sorted(missing))} have, and is used unsharded"
            raise NotALoop(what, node)

    def _origin(self, node: fx.Node) -> fx.Node:
        """The input of which a slice is taken."""
        while node.op != "placeholder":
            node = node.args[0]  # type: ignore[assignment]
        return node

    def _loop_axes_of(self, node: fx.Node) -> frozenset[str]:
        """The loop axes over which an input is sharded."""
        spec = self.sources[self._origin(node)].value.spec
        return frozenset(axis for axis in self.time if spec is not None and axis in spec.axes)

    def _make(
        self, like: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
    ) -> fx.Node:
        made = self.fx.call_function(target, args, dict(kwargs or {}))
        made.meta = dict(like.meta)
        planned = like.meta.get("shardfx")
        if isinstance(planned, Node) and planned.outs:
            made.meta["shardfx"] = self.place_of.get(planned.outs[0].name, planned)
        return made

    # ---- what leaves --------------------------------------------------------------------------------------------

    def _collects(self, node: fx.Node) -> None:
        """What a call collects over the iterations around it, as ranks would reduce or gather it."""
        memory = node.args[0]
        x = self._added(node)
        if not isinstance(memory, fx.Node) or not isinstance(x, fx.Node) or not self.open:
            raise NotALoop(f"{node.name} collects what is not done in iterations", node)
        others = [user for user in memory.users if user is not node and loop_role(user) not in ("opens", "closes")]
        depth = len(self.inside[memory])
        if others or self.inside[memory] != tuple(self.open[:depth]) or depth == len(self.open):
            raise NotALoop(f"{memory.name} is not memory that these iterations alone collect into", node)
        collected = self.open[depth:]
        self.left[node] = tuple(collected)
        if node.target is loop_ops.write:
            self._put(node, memory, collected)
            return
        self.env[node] = self._summed(node, memory, x, collected)

    def _added(self, node: fx.Node) -> Any:
        """What a call adds to what is collected, or puts there: an operand, or what it does itself."""
        row, operand = row_of(node.target), node.args[1]
        if row is None or row.adds is None:
            if isinstance(operand, fx.Node):
                self._usable(operand, node)
            return self.env[operand] if isinstance(operand, fx.Node) else None
        target, args, kwargs = row.adds(node.args, node.kwargs)
        fx.map_arg((args, kwargs), lambda used: self._usable(used, node))
        given, named = fx.map_arg((args, kwargs), self.env.__getitem__)
        made = self._make(node, target, given, named)
        planned = node.meta.get("shardfx")
        if isinstance(planned, Node) and planned.operands:
            made.meta["shardfx"] = self.place_of.get(planned.operands[0].name)
        return made

    def _summed(self, node: fx.Node, memory: fx.Node, x: Any, collected: list[fx.Node]) -> fx.Node:
        """The sum over so many ranks."""
        reduce, first = REDUCTION.get(node.target, REDUCTION[loop_ops.add])
        source: Any = memory.args[0] if memory.target is memory_ops.part else memory
        planned = node.meta.get("shardfx")
        if len(collected) != 1 or source.target is not memory_ops.filled or not isinstance(planned, Node):
            raise NotALoop(f"{node.name} goes on from what is no memory for sums of the plan", node)
        _, begins, dtype = source.args[:3]
        if dtype != planned.outs[0].type.dtype or begins != fitting(first, dtype):
            what = f"{node.name} goes on from {begins} of {dtype}"
            raise NotALoop(f"{what}, not from {first} of {planned.outs[0].type.dtype}", node)
        self._fits(node, memory, planned.outs[0])
        group = self.planned.mesh.group_name(self.rank, [str(collected[0].args[0])])
        sent = self._make(node, c10d.all_reduce.default, (x, reduce, group))
        return self._make(node, c10d.wait_tensor.default, (sent,))

    def _fits(self, node: fx.Node, memory: fx.Node, planned: Value) -> None:
        """Memory for a sum has the shape of what is summed; a part of a buffer may be strided."""
        spec = planned.spec or Spec.replicated(planned.type.ndim)
        local = held_shape(spec, planned.shape, self.program.mesh, self.program.rank)
        if memory.target is memory_ops.part:
            shards, _, asked = self._number(memory.args[1:], node)
            fits = prod(asked) == prod(local) and (shards == 1 or asked[0] % shards == 0)
        else:
            asked = self._number(memory.args[0], node)
            fits = tuple(asked) == local
        if not fits:
            raise NotALoop(f"{node.name} sums into memory of {list(asked)}, where what it adds has {list(local)}", node)

    def _put(self, node: fx.Node, memory: fx.Node, collected: list[fx.Node]) -> None:
        """What each iteration makes, contiguous, or at its offset."""
        args: Any = node.args
        x, dims, starts, lengths = args[1:]
        dims, starts, lengths = (self._number(arg, node) for arg in (dims, starts, lengths))
        full: Any = self._number(memory_ops.shape_asked(memory.target, memory.args), node)
        dtype: Any = memory_ops.dtype_asked(memory.target, memory.args)
        if not len(dims) == len(starts) == len(lengths):
            raise NotALoop(f"{node.name} puts a part at {starts} of dims {dims}, in lengths {lengths}", node)
        made = self.env[x]
        if self._leaves(node):
            place = dict(zip(dims, zip(starts, lengths, strict=True), strict=True))
            self.env[node] = IterationOutput(self._make(node, memory_ops.own, (made,)), place, list(full), dtype, node)
        elif len(collected) == 1 and len(dims) == 1:
            planned = node.meta.get("shardfx")
            if not isinstance(planned, Node) or dtype != planned.outs[0].type.dtype:
                raise NotALoop(f"{node.name} puts parts into memory of {dtype}, which is not what the plan has", node)
            self.env[node] = self._gathered(node, made, collected[0], dims[0], list(full), lengths[0])
        else:
            raise NotALoop(f"{node.name} puts parts of several axes together", node)

    def _leaves(self, node: fx.Node) -> bool:
        """Whether a node is an output that is sharded over a loop axis."""
        value: Any = self.program.result().args[0]
        return any(
            result is node
            and output.value.spec is not None
            and any(axis in output.value.spec.axes for axis in self.time)
            for output, result in zip(self.program.outputs, value, strict=False)
        )

    def _gathered(self, node: fx.Node, x: Any, loop: fx.Node, dim: int, full: list[int], length: int) -> fx.Node:
        """The parts of all iterations together: what so many ranks would gather."""
        axis, count = str(loop.args[0]), self.program.mesh[str(loop.args[0])].size
        rows, at = [self._rows(node, loop, iteration) for iteration in range(count)], 0
        for iteration, (start, length_) in enumerate(rows):
            if start != at:
                raise NotALoop(f"iteration {iteration} puts its part at {start}, where {at} is the next place", node)
            at += length_
        if at != full[dim]:
            raise NotALoop(f"iterations put {at} rows into memory for {full[dim]}", node)
        per = max(length_ for _, length_ in rows)
        packed = self._make(node, pack.pack, (x, [*full[:dim], length, *full[dim + 1 :]], dim, per))
        group = self.planned.mesh.group_name(self.rank, [axis])
        sent = self._make(node, c10d.all_gather_into_tensor.default, (packed, count, group))
        wait = self._make(node, c10d.wait_tensor.default, (sent,))
        return self._make(node, pack.unpack_gathered, (wait, per, [length_ for _, length_ in rows], dim, full))

    def _rows(self, node: fx.Node, loop: fx.Node, iteration: int) -> tuple[int, int]:
        """The rows into which another iteration writes its part."""

        def number(used: fx.Node) -> Any:
            if used is loop:
                return iteration
            if used.target in (loop_ops.index, loop_ops.piecewise_index):
                function: Any = used.target
                return function(*fx.map_arg(used.args, number))
            return self.env[used]

        args: Any = node.args
        (start,), (length,) = fx.map_arg(args[3:5], number)
        return start, length
