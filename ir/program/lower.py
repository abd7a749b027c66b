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

from shardfx.ir.dim_sharding import Part
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Input, Node, Output, OutputKind, Value, substitute
from shardfx.ir.ops import comm, pack
from shardfx.ir.ops.pools import transfer
from shardfx.ir.ops.table import OwnOp
from shardfx.ir.rules.book import Contiguous, RuleBook, perform
from shardfx.ir.rules.local import Emit, NodeShard, gives_list
from shardfx.ir.spec import Spec

from .devices import CPU, is_device_specific, on_device
from .loops.induction_variables import with_induction_variables
from .loops.loop_nest import PlannedLoop, loop_axes, loop_nest, looped_parts, uniform_runs
from .loops.lower_loops import LoopWriter
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
        self.loops = LoopWriter(self)
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
            self.loops.write(step)
        else:
            self.node(step)

    def node(self, node: Node) -> None:
        """Write this rank's version of a node."""
        self.current = node
        if isinstance(node.op, OwnOp):
            there = self.env.__getitem__ if node.op.fetches else self._there
            value_of = self.env.get if node.op is comm.send else there  # it is another rank's, perhaps
            emit = LocalEmit(node, self.mesh, self.coords, tuple(value_of(v) for v in node.operands), {}, self)
            made = self.loops.collected(emit) if self.loops.collects(node) else node.op.local(emit)
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
