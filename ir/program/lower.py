"""Lowering: one rank's program, as a ``torch.fx`` graph on plain local tensors.

    %3 = aten.mm(%1, %2) : f32[64{dp}, 512] +{tp}    mm = aten.mm.default(x, w)  # layers.0.w2  model.py:42
    %4 = comm.all_reduce(%3, axes=[tp])          ->  all_reduce = c10d.all_reduce.default(mm, 'sum', 'dp2.tp2/tp@0')
                                                     wait = c10d.wait_tensor.default(all_reduce)

Nodes keep the order of the planned graph, so that all ranks run their collectives in one order. Shapes among the
arguments become the local ones; what else differs between ranks is written by the ``local`` function of an op's rule,
or of its row. Rank passes improve the result (later waits, no copies).
"""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from shardfx.ir.dim_sharding import Part, bounds
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Input, Node, Output, OutputKind, Value, substitute
from shardfx.ir.ops import comm, memory_ops, pack
from shardfx.ir.ops.comm_local import Site
from shardfx.ir.ops.local_ops import COLLECTING
from shardfx.ir.ops.loop import loop_ops
from shardfx.ir.ops.pools import transfer
from shardfx.ir.ops.table import OwnOp, RankEmit
from shardfx.ir.rules.book import Contiguous, RuleBook, perform
from shardfx.ir.rules.local import Emit, NodeShard, gives_list
from shardfx.ir.shards import held_shape
from shardfx.ir.spec import Spec

from .devices import CPU, is_device_specific, on_device
from .loops.induction_variables import with_induction_variables
from .loops.loop_nest import (
    PlannedLoop,
    iteration_place,
    iteration_rows,
    loop_axes,
    loop_nest,
    looped_parts,
    nodes_of,
    uniform_runs,
    varies_over,
)
from .loops.loop_regions import close_loop
from .loops.schedule_actions import local_ends, rank_actions
from .rank_program import RankProgram


@dataclass(frozen=True)
class SharedLowering:
    """The part of a graph that outputs of some kinds need. It is found once, and the graph must stay as it is."""

    graph: Graph
    kinds: frozenset[OutputKind]

    @cached_property
    def chosen(self) -> tuple[list[Input], list[Node], list[Output]]:
        """The selected inputs, nodes and outputs."""
        return select(self.graph, self.kinds)

    @cached_property
    def steps(self) -> Sequence[Node | PlannedLoop]:
        """The nodes in a valid execution order, loops with those of their iterations."""
        _, nodes, outputs = self.chosen
        return loop_nest(nodes, outputs, self.graph.mesh)

    @cached_property
    def parts(self) -> set[Part]:
        """The parts of all values that are sharded over loop axes."""
        return looped_parts(self.chosen[1], self.graph.mesh)


def select(graph: Graph, kinds: Iterable[OutputKind]) -> tuple[list[Input], list[Node], list[Output]]:
    """The subgraph that outputs of some kinds need, with the guards in effect for them."""
    wanted = {*kinds, OutputKind.OVERFLOW} if kinds else set[OutputKind]()
    outputs = [o for o in graph.outputs if o.kind in wanted or (o.guard is not None and o.guard.concerns(wanted))]
    needed = {output.value for output in outputs}
    nodes = []
    for node in reversed(graph.nodes):
        if any(value in needed for value in node.outs):
            node = _without(node, needed)
            needed.update(node.operands)
            nodes.append(node)
    return [inp for inp in graph.inputs if inp.value in needed], nodes[::-1], outputs


def _without(node: Node, needed: Container[Value]) -> Node:
    """Dead results of communication are dropped: a target is not sent where there is no loss."""
    kept = [i for i, value in enumerate(node.outs) if value in needed]
    if not isinstance(node.op, OwnOp) or len(kept) == len(node.outs):
        return node
    args, results = tuple(node.operands[i] for i in kept), [node.results[i] for i in kept]
    return replace(node, args=args, results=results, strategy=None)


aten = torch.ops.aten
Steps = Sequence[Node | PlannedLoop]


def lower(
    graph: Graph,
    rank: int,
    book: RuleBook,
    kinds: Iterable[OutputKind],
    device: torch.device = CPU,
    arrange: Callable[[Steps], Steps] | None = None,
    common: SharedLowering | None = None,
) -> RankProgram:
    """The program of one rank, for the outputs of some kinds, on a device. Needs no process group and no tensors.

    Args:
        arrange: changes the order of steps, as ``split_into_actions`` does.
        common: the analysis that the programs of all ranks share.
    """
    if graph.repeats:
        raise Error(
            "this graph leaves equal blocks out",
            where=", ".join(map(str, graph.repeats)),
            expected="all blocks, as behind the pass unfold-repeats",
            got="a graph that was captured, or planned up to partition",
            remedy="lower pm.after, or run the pass",
        )
    common = common or SharedLowering(graph, frozenset(kinds))
    coords = graph.mesh.coords(rank)
    steps = rank_actions(common.steps if arrange is None else arrange(common.steps), graph, coords)
    inputs, outputs = local_ends(graph, common.chosen[0], common.chosen[2], coords)

    def written(iterations: Mapping[str, int]) -> fx.Graph:
        """The program specialized to one iteration of each loop axis."""
        lowering = Lowering(graph, rank, book, device=device, iterations=iterations)
        for inp in inputs:
            lowering.placeholder(inp)
        for step in steps:
            lowering.step(step)
        lowering.fx.output(tuple(lowering.result(output) for output in outputs))
        return lowering.fx

    made = written({})
    if any(isinstance(step, PlannedLoop) for step in steps):
        made = with_induction_variables(made, written, graph.mesh, uniform_runs(common.parts, graph.mesh, coords))
    return RankProgram(rank, graph.mesh, made, tuple(inputs), tuple(outputs))


@dataclass
class OpenLoop:
    """A loop that is being written: its first call, and its results by value."""

    begin: fx.Node
    left: dict[Value, Any] = field(default_factory=dict)
    behind: list[tuple[Value, Callable[[], Any]]] = field(default_factory=list)
    """What is made of collected values, once iterations are done."""


@dataclass
class Lowering:
    """Writes the fx graph of one rank."""

    graph: Graph
    rank: int
    book: RuleBook
    fx: fx.Graph = field(default_factory=fx.Graph)
    env: dict[Value, Any] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    current: Node | None = None
    device: torch.device = CPU
    iterations: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mesh = self.graph.mesh
        self.coords = {**dict.fromkeys(loop_axes(self.mesh), 0), **self.mesh.coords(self.rank), **self.iterations}
        self._open: dict[str, OpenLoop] = {}
        self._shapes: dict[tuple[Any, Spec], tuple[int, ...]] = {}
        self._groups: dict[tuple[str, ...], str] = {}

    def placeholder(self, inp: Input) -> None:
        """Write the placeholder of an input."""
        name = identifier(inp.name)
        while name in self.taken:  # "a.b" and "a_b" are two names of a model, and one of Python
            name += "_"
        self.taken.add(name)
        self.env[inp.value] = self.fx.placeholder(name)

    @cached_property
    def dense(self) -> dict[Contiguous, Callable[[Value], Any]]:
        """An operand in the memory layout that the op's kernel takes."""
        return {
            Contiguous.ANY: self._there,
            Contiguous.LAST_DIM: lambda v: self.call(pack.dense_last, self._there(v)) if v.shape else self._there(v),
            Contiguous.ALL: lambda value: self.call(aten.contiguous.default, self._there(value)),
            Contiguous.ALIGNED: lambda value: self.call(pack.aligned, self._there(value)),
        }

    def call(self, target: Any, *args: Any, gives: Sequence[int] | None = None, **kwargs: Any) -> torch.fx.Node:
        """Write a call; ``gives`` is the shape of its result, where known."""
        if is_device_specific(target):
            share = NodeShard(self.current, self.mesh, self.coords) if self.current is not None else None
            target, args, kwargs = on_device(share, (target, args, kwargs), self.device)
        name = target._opname if isinstance(target, torch._ops.OpOverload) else None
        made = self.fx.create_node("call_function", target, name=name)
        made.args = args  # given to create_node, they would be searched for symbolic sizes
        if kwargs:
            made.kwargs = kwargs
        if self.current is not None:
            made.meta["shardfx"] = self.current
        if gives is not None:
            made.meta["shape"] = tuple(gives)
        return made

    def shape(self, value: Value, spec: Spec) -> tuple[int, ...]:
        """The local shape of a value on this rank."""
        key = (value.type.shape, spec)
        if key not in self._shapes:
            self._shapes[key] = spec.local_shape(value.shape, self.mesh, self.coords)
        return self._shapes[key]

    def group(self, axes: tuple[str, ...]) -> str:
        """The name of this rank's process group along some axes."""
        if axes not in self._groups:
            self._groups[axes] = self.mesh.group_name(self.rank, axes)
        return self._groups[axes]

    def step(self, step: Node | PlannedLoop) -> None:
        """Write a node, or a loop."""
        if isinstance(step, PlannedLoop):
            self.loop(step)
        else:
            self.node(step)

    def loop(self, loop: PlannedLoop) -> None:
        """Write the steps of a loop, and its begin and end."""
        axis = loop.axis
        self.current = None
        opened = OpenLoop(self.call(loop_ops.begin, axis, self.mesh[axis].size, []))
        before = dict(self.env)
        self._open[axis] = opened
        if loop.order:
            opened.begin.args = (*opened.begin.args, loop.order)
        for name, steps in loop.units or (("", loop.steps),):
            if name:
                self.current = None
                self.call(loop_ops.action, opened.begin, name)
            full = self._take_shards(axis, steps)
            for step in steps:
                self.step(step)
                for value in step.outs if isinstance(step, Node) else ():
                    if value in loop.ends:
                        self._give_out(value)
            self.env.update(full)  # another action takes its own
        self.current = None
        close_loop(self.fx, opened.begin)
        del self._open[axis]
        self.env.clear()
        self.env.update(before | opened.left)
        for value, make in opened.behind:
            self.current = value.node
            self.env[value] = make()

    def _take_shards(self, axis: str, steps: Sequence[Node | PlannedLoop]) -> dict[Value, Any]:
        """Slice inputs that are sharded over the axis for this iteration, for some steps; gives what was known of
        them."""
        nodes = nodes_of(steps)
        taken = dict.fromkeys(value for node in nodes for value in node.operands if value.node is None)
        before = {value: self.env[value] for value in taken}
        for value in taken:
            assert value.spec is not None
            for dim, sharding in enumerate(value.spec.dims):
                if axis in sharding.axes:
                    rows = iteration_rows(value.spec, value.shape, self.mesh, self.coords, axis, dim)
                    self.env[value] = self.call(loop_ops.slice_of, self.env[value], dim, *rows)
        return before

    def _give_out(self, value: Value) -> None:
        """Write an iteration's part of an output to its place."""
        assert value.spec is not None
        place = iteration_place(value.spec, value.shape, self.mesh, self.coords)
        dims, starts, lengths = list(place), [at[0] for at in place.values()], [at[1] for at in place.values()]
        shape = list(held_shape(value.spec, value.shape, self.mesh, self.rank))
        outermost = next(axis for axis in self._open if varies_over(axis, value))
        memory = self._before(outermost, memory_ops.empty, shape, value.type.dtype, str(self.device))
        made = self.call(loop_ops.write, memory, self.env[value], dims, starts, lengths, gives=shape)
        self._open[outermost].left[value] = made

    def _collects(self, node: Node) -> bool:
        """Whether a node sums or concatenates a value over the iterations."""
        axes = node.kwargs.get("axes", ())
        return node.op in (comm.all_reduce, comm.all_gather) and any(self.mesh[axis].loop for axis in axes)

    def _collected(self, emit: RankEmit) -> list[Any]:
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
                opened.behind.append((out, lambda: self.call(aten.reshape.default, made, list(site.shape))))
        opened.left[out] = made
        return [made]

    def _before(self, axis: str, target: Any, *args: Any) -> torch.fx.Node:
        """Write a call before the iterations of an axis."""
        with self.fx.inserting_before(self._open[axis].begin):
            return self.call(target, *args)

    def node(self, node: Node) -> None:
        """Write this rank's version of a node."""
        self.current = node
        if isinstance(node.op, OwnOp):
            there = self.env.__getitem__ if node.op.fetches else self._there
            value_of = self.env.get if node.op is comm.send else there  # it is another rank's, perhaps
            emit = LocalEmit(node, self.mesh, self.coords, tuple(value_of(v) for v in node.operands), {}, self)
            made = self._collected(emit) if self._collects(node) else node.op.local(emit)
            self.env.update(zip(node.outs, made, strict=True))
            return
        entry = self.book.entry(node.op)
        use = self.dense[Contiguous.ANY if entry is None else entry.contiguous]
        args = substitute(node.args, use)
        kwargs = {k: substitute(a, use) for k, a in node.kwargs.items()}
        result = perform(entry, LocalEmit(node, self.mesh, self.coords, args, kwargs, self))
        if len(node.results) == 1 and not gives_list(node.op):
            self.env[node.results[0]] = result  # type: ignore[index]
            return
        for i, value in enumerate(node.results):
            if value is not None:
                self.env[value] = self.call(operator.getitem, result, i)

    def _there(self, value: Value) -> Any:
        """The local value of an operand, after any wait for its copy into another pool."""
        made = self.env[value]
        if isinstance(made, fx.Node) and made.target is transfer.stored:
            taker, self.current = self.current, value.node
            made = self.env[value] = self.call(transfer.arrived, made, gives=made.meta.get("shape"))
            self.current = taker
        return made

    def result(self, output: Output) -> Any:
        """The local value of an output, after any wait for its copy into another pool, unless it is a state, which
        nobody reads before :func:`shardfx.ir.ops.pools.transfer.finish`."""
        return self.env[output.value] if output.kind is OutputKind.STATE else self._there(output.value)


@dataclass
class LocalEmit(Emit):
    """The writer of lowering for ``local`` functions of rules and rows (see :class:`shardfx.ir.rules.local.Emit`)."""

    lowering: Lowering

    @property
    def device(self) -> str:
        """The device of the program."""
        return str(self.lowering.device)

    def call(self, op: Any, *args: Any, gives: Sequence[int] | None = None, **kwargs: Any) -> torch.fx.Node:
        """Append a call to the rank's program; ``gives`` is the local shape of its result, where known."""
        return self.lowering.call(op, *args, gives=gives, **kwargs)

    def shape(self, value: Value, spec: Spec) -> tuple[int, ...]:
        """The local shape of a value under a spec."""
        return self.lowering.shape(value, spec)

    def group(self, axes: tuple[str, ...]) -> str:
        """The name of this rank's process group along some axes."""
        return self.lowering.group(axes)


def identifier(name: str) -> str:
    """A Python name for a dotted one: ``layers.0.weight`` is ``layers_0_weight``, ``0.weight`` is ``_0_weight``."""
    made = re.sub(r"\W", "_", name)
    return f"_{made}" if made[0].isdigit() or keyword.iskeyword(made) else made


def fitting(number: float, dtype: torch.dtype) -> float | int:
    """A number clamped to a dtype's range: the largest there is for infinity."""
    if dtype.is_floating_point or dtype.is_complex:
        return number
    info = torch.iinfo(dtype) if dtype is not torch.bool else None
    if number == 0 or info is None:
        return int(number > 0)
    return info.max if number > 0 else info.min
