"""Replay of a program on fake tensors: its collectives by group, storages, and the work of each call."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from torch import fx

from shardfx.ir.errors import DOES_NOT_RUN
from shardfx.ir.graph import InputKind, OutputKind, Phase, Value
from shardfx.ir.ops import comm, memory_ops
from shardfx.ir.ops.comm import row_of_collective
from shardfx.ir.ops.local_ops import row_of, sent_by
from shardfx.ir.ops.pools import pool_ops, transfer
from shardfx.ir.ops.sends import Sent, is_comm
from shardfx.ir.ops.table import LocalOp, OwnOp
from shardfx.ir.ops.traits import base_name_of, is_cast, uncast
from shardfx.ir.program.aliasing import view_source
from shardfx.ir.program.loops.loop_regions import Lifetimes, loop_of, loop_role, regions
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.program.store_layout import contiguous_parameters
from shardfx.ir.shards import held_shape
from shardfx.ir.spec import dim_order_of

from .amounts import Cost, Work
from .curve import TOUCH, VIEW
from .fake_calls import CallEffect, FakeCalls, Result, TensorLayout, call_error, leaves, map_nest
from .flops import CAUSAL, MASKED
from .footprint import BUFFERS, FIRST, At, CallTimeline, Footprint, Scope, Storage, StoredTensor, set_iteration_sizes
from .fusion import drop_inlined_values, inlined_values, is_computed, kernels, maker_of, root


def group_of(node: fx.Node) -> str | None:
    """The process group of a collective's call; None for any other call."""
    row = row_of(node.target)
    return str(node.args[row.group]) if row is not None and row.group is not None else None


def is_memory(node: fx.Node) -> bool:
    """Whether a call allocates uninitialized memory."""
    row = row_of(node.target)
    return row is not None and row.memory and not row.filled


def collective_name(node: fx.Node) -> str:
    """The name of a collective in programs."""
    row = row_of(node.target)
    return row.name if row is not None else str(node.target)


def kind_of(node: fx.Node) -> str:
    """The kind of a call, by which machines have curves: ``mm``, ``gelu``, ``loop.addmm``; causal attention is a kind
    of its own."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return collective_name(node)
    at, window = MASKED.get(node.target), node.kwargs.get("window")
    causal = at is not None and not window and (node.args[at] if at < len(node.args) else node.kwargs.get("causal"))
    return f"{CAUSAL if causal else ''}{base_name_of(node.target)}"


def mutated_operands(node: fx.Node) -> list[fx.Node]:
    """The operands that a call mutates, as a fused optimizer step does; ``out`` arguments are not included."""
    row, target = row_of(node.target), node.target
    if row is not None:
        into = row.destination(node)
        return [into] if into is not None and row.reads_into else []
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return []
    found: list[fx.Node] = []
    for place, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write and not argument.is_out:
            args = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            fx.map_arg(args, found.append)
    return found


def before_communication(node: fx.Node, seen: set[fx.Node]) -> list[fx.Node]:
    """The sources of a value before communication and offloading, without those ``seen`` already."""
    found: dict[fx.Node, None] = {}
    todo = [node]
    while todo:
        each = todo.pop()
        if each in seen:
            continue
        seen.add(each)
        maker = each.args[0] if each.target is operator.getitem else each
        planned = maker.meta.get("shardfx") if isinstance(maker, fx.Node) else None
        if planned is not None and isinstance(planned.op, OwnOp):
            todo += [used for used in each.all_input_nodes if used.op != "placeholder"]
        else:
            found[each] = None
    return list(found)


def source_of(value: Value) -> Value:
    """The value of the graph before any communication, and before it was offloaded and fetched."""
    while value.node is not None and isinstance(value.node.op, OwnOp):
        operands = value.node.operands
        value = operands[value.index if len(operands) > 1 else 0]
    return value


KEPT = {
    OutputKind.GRADIENT: "gradients",
    OutputKind.LOSS: "results",
    OutputKind.RESULT: "results",
    OutputKind.BUFFER: "new buffers",
    OutputKind.PARAMETER: "new parameters",
    OutputKind.STATE: "new states",
    OutputKind.GUARD: "results",
    OutputKind.OVERFLOW: "results",
    OutputKind.ROWS: "results",
}


def replay(program: RankProgram, ahead: int = 0, fakes: FakeCalls | None = None, compiled: bool = False) -> Footprint:
    """Replay a rank's program (rank 0 has the largest shards). ``fakes`` caches calls of other programs, too.

    ``ahead``: how many messages are received ahead (:class:`.Footprint`). ``compiled``: elementwise values are fused
    into kernels (:mod:`.fusion`). A call that cannot run is a :class:`CallError`.
    """
    fakes = fakes or FakeCalls()
    walk = _replayed(program, fakes)
    if compiled:
        walk.costs = _fused_costs(walk)
        drop_inlined_values(walk.calls, lambda node: (each.storage for each in leaves(walk.values[node], StoredTensor)))
    set_iteration_sizes(
        program.graph.nodes, walk.storages, lambda iteration: _replayed(program, fakes, iteration).storages
    )
    return walk.footprint(ahead)


def _fused_costs(walk: _Replay) -> list[Cost]:
    """The costs of calls in fused kernels: each kernel's at its last call."""
    places = {node: at for at, node in enumerate(walk.calls)}
    inside, costs = inlined_values(walk.calls), [*walk.costs]

    def layouts(node: fx.Node) -> list[TensorLayout]:
        return [tensor.layout for tensor in leaves(walk.values[node], StoredTensor)]

    def loop(node: fx.Node) -> tuple[Scope, float]:
        """The loop of a call, and its trip count."""
        at = places[node]
        return walk.scopes[at], max(walk.costs[at].work.values(), default=1)

    for kernel in kernels(walk.calls, inside, layouts, loop):
        last = kernel.calls[-1]
        if kernel.size is None or (len(kernel.calls) == 1 and kernel.loads.keys() == {*last.all_input_nodes}):
            continue
        _, count = loop(last)
        for node in kernel.calls:
            costs[places[node]] = NOTHING
        work = Work(0.0, kernel.touched(layouts), layouts(kernel.calls[0])[0].dtype, TOUCH)
        costs[places[last]] = Cost({work: count})
    for node in walk.calls:
        if node in inside or (view_source(node, None) is not None and is_computed(maker_of(root(node)))):
            costs[places[node]] = NOTHING  # computed in kernels, which store the layout that is used
    return costs


def values(program: RankProgram) -> dict[str, Any]:
    """Each node's fake value by name, as torch keeps it in ``meta["val"]``: tensors on ``meta`` of local shapes and
    strides, nested as the call gives them."""

    def tensor(stored: StoredTensor) -> torch.Tensor:
        shape, stride = stored.layout.shape, stored.layout.stride
        return torch.empty_strided(shape, stride, dtype=stored.layout.dtype, device="meta")

    return {node.name: map_nest(stored, tensor, StoredTensor) for node, stored in _replayed(program).values.items()}


def _replayed(program: RankProgram, fakes: FakeCalls | None = None, at: At = FIRST) -> _Replay:
    walk = _Replay(program, fakes or FakeCalls(), at)
    places = dict(zip((node for node in program.graph.nodes if node.op == "placeholder"), program.inputs, strict=True))
    for node, inp in places.items():
        assert inp.value.spec is not None
        shape = held_shape(inp.value.spec, inp.value.shape, walk.mesh, program.rank)
        walk.give(node, TensorLayout.dense(shape, inp.value.type.dtype, inp.dim_order), inp.pool.partition(":")[0])
    nodes = {inp.value: node for node, inp in places.items()}
    for together in contiguous_parameters(program.planned().values(), program.inputs):
        walk.make_contiguous(nodes[inp.value] for inp in together)
    for node in program.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "get_attr":
            constant = program.constants[str(node.target)]
            walk.give(node, TensorLayout.dense(tuple(constant.shape), constant.dtype, dim_order_of(constant)))
        elif node.op == "call_function":
            try:
                walk.call(node)
            except DOES_NOT_RUN as error:
                raise call_error(node, error) from error
        else:
            for output, result in zip(program.outputs, node.args[0], strict=True):
                walk.keep(result, KEPT[output.kind])
    return walk


class _Replay:
    """The state of a replay between two calls."""

    def __init__(self, program: RankProgram, fakes: FakeCalls, iteration: At) -> None:
        self.mesh, self.iteration = program.mesh, iteration
        self.parameters = {inp.value for inp in program.inputs if inp.kind is InputKind.PARAMETER}
        self.values: dict[fx.Node, Any] = {}
        self.storages: list[Storage] = []
        self.calls: list[fx.Node] = []
        self.costs: list[Cost] = []
        self.inside: list[int] = []
        self.inside_of = regions(program.graph.nodes)
        """The loops and actions around each node."""
        self.scopes: list[Scope] = []
        """The actions around each call."""
        self._fakes = fakes
        self._costs: dict[Any, Cost] = {}
        self._before_sent: set[fx.Node] = set()
        """By the result of a reduce-scatter that is an exchange: what is received."""

    def give(self, node: fx.Node, layout: TensorLayout, pool: str = "") -> None:
        """Bind an input to memory of the caller's."""
        self.values[node] = StoredTensor(layout, Storage(0, 0, 0, None, pool=pool))

    def make_contiguous(self, nodes: Iterable[fx.Node]) -> None:
        """Bind inputs that are contiguous in the caller's memory."""
        storage, offset = Storage(0, 0, 0, None), 0
        for node in nodes:
            layout = self.values[node].layout
            self.values[node] = StoredTensor(layout, storage, offset)
            offset += layout.numel

    def call(self, node: fx.Node) -> None:
        """Replay one call: use its operands, and bind its results."""
        row = row_of(node.target)
        if row is not None and row.loop in NO_TENSORS:
            self._iteration(node, row)
            return
        at, planned = len(self.calls), node.meta.get("shardfx")
        self.calls.append(node)
        around = self.inside_of[node]
        scope = tuple(each for each in around if loop_role(each) == "unit")
        self.scopes.append(scope)
        args, kwargs = (map_nest(nest, self.values.__getitem__, fx.Node) for nest in (node.args, node.kwargs))
        operands: list[StoredTensor] = list(leaves((args, kwargs), StoredTensor))
        for tensor in operands:
            tensor.storage.use(at, scope)
            if planned is not None:
                tensor.storage.used_in = planned.phase
        for sent in sent_by(node):
            self.values[sent].storage.use(at, scope)
        if node.target is operator.getitem:
            self.values[node] = args[0][args[1]]
            self.costs.append(NOTHING)
            self.inside.append(0)
            return
        layouts = [map_nest(nest, lambda tensor: tensor.layout, StoredTensor) for nest in (args, kwargs)]
        made = self._adjoined(node, operands) or self._fakes.made(node.target, *layouts)
        pool = pool_ops.pool_of_row(row, any(tensor.storage.pool for tensor in operands))
        got = row is not None and row.message == "receives"
        fresh = [Storage(n, at, at, planned, kept=is_memory(node), pool=pool, message=got) for n in made.fresh]
        if node.target is memory_ops.arena:
            fresh[0].category = "arena"
        self.storages += fresh

        def bind(result: Result) -> StoredTensor:
            if result.fresh:
                return StoredTensor(result.layout, fresh[result.owner], result.offset)
            owner = operands[result.owner]
            return StoredTensor(result.layout, owner.storage, owner.offset + result.offset)

        self.values[node] = map_nest(made.results, bind, Result)
        self.inside.append(made.inside - sum(made.fresh) if made.inside and not pool else 0)
        if row is not None and row.copies:
            memory = pool or operands[0].storage.pool or transfer.HOST
            self.costs.append(Cost(copied={memory: Sent(1.0, operands[-1].layout.nbytes)}))
            return
        group = group_of(node)
        written = row.rewrites(args) if row is not None and row.rewrites is not None else []
        cost = self._work(node, made, operands + written) if group is None else self._sent(node, group, args[0])
        trips: list[Any] = [each.args[1] for each in around if loop_role(each) == "opens"]
        self.costs.append(cost * prod(trips) if trips else cost)

    def _iteration(self, node: fx.Node, row: LocalOp) -> None:
        """Replay the start or end of a loop or action, or an induction variable: of the first iteration by default."""
        args: Any = map_nest(node.args, self.values.__getitem__, fx.Node)
        self.values[node] = int(row.function(*args)) if row.loop == "number" else self.iteration.get(node, 0)
        if row.loop == "closes":
            loop = node.args[0]
            ends = {scope: i for i, scope in enumerate(self.scopes) if any(loop_of(each) is loop for each in scope)}
            for tensor in leaves(args, StoredTensor):  # all that iterations use is there until the last one is over
                tensor.storage.last = max(len(self.calls) - 1, tensor.storage.born)
                tensor.storage.uses |= ends

    def _adjoined(self, node: fx.Node, operands: list[StoredTensor]) -> CallEffect | None:
        """The effect of a call that joins its operands without a copy, if they are contiguous in memory."""
        row = row_of(node.target)
        if row is None or not row.adjoins:
            return None
        first, end = operands[0], operands[0].offset
        for tensor in operands:
            if tensor.storage is not first.storage or tensor.offset != end or not tensor.layout.is_dense:
                return None
            end += tensor.layout.numel
        return CallEffect(Result(TensorLayout.dense((end - first.offset,), first.layout.dtype), 0))

    def _work(self, node: fx.Node, made: CallEffect, operands: list[StoredTensor]) -> Cost:
        """The work of a call: FLOPs, bytes read and written; a view only has the overhead of a call."""
        if not made.writes or is_memory(node):
            return A_VIEW
        layouts = [tensor.layout for tensor in operands] or [result.layout for result in leaves(made.results, Result)]
        real = [layout.dtype for layout in layouts if layout.dtype.is_floating_point or layout.dtype.is_complex]
        touching = (*operands, *leaves([self.values[used] for used in mutated_operands(node)], StoredTensor))
        touched = sum(tensor.layout.nbytes for tensor in touching) + sum(made.fresh)
        work = Work(made.flops, touched, (real or [layouts[0].dtype])[0], kind_of(node))
        return self._costs.setdefault(work, Cost({work: 1}))

    def _sent(self, node: fx.Node, group: str, put_in: Any) -> Cost:
        """The cost of a collective."""
        axes, row = self.mesh.group_axes(group), row_of_collective(collective_name(node))
        n, nbytes = self.mesh.extent(axes), sum(tensor.layout.nbytes for tensor in leaves(put_in, StoredTensor))
        planned = node.meta.get("shardfx")
        if planned is not None and isinstance(planned.op, OwnOp) and planned.op.rows is not None:
            row = planned.op
        key = (row, axes, nbytes)
        if key not in self._costs:
            sent = Sent(1.0, nbytes) if row is None else row.sent(row.full_bytes_of(nbytes, n), n)
            self._costs[key] = Cost(sent={self.mesh.sort(axes): sent})
        return self._costs[key]

    def keep(self, node: fx.Node, category: str) -> None:
        """Keep an output live to the end. The unreduced sources of a gradient are gradients, too."""
        for tensor in leaves(self.values[node], StoredTensor):
            tensor.storage.last = len(self.calls) - 1
            tensor.storage.category = tensor.storage.category or category
        if category == "gradients":
            for source in before_communication(node, self._before_sent):
                for tensor in leaves(self.values[source], StoredTensor):
                    tensor.storage.category = tensor.storage.category or category

    def footprint(self, ahead: int) -> Footprint:
        """The footprint of the replayed program."""
        for storage in self.storages:
            storage.category = self._category(storage)
        moments = self._timeline() if any(self.scopes) else None
        calls, costs, inside = tuple(self.calls), tuple(self.costs), tuple(self.inside)
        return Footprint(calls, tuple(self.storages), costs, inside, moments, ahead)

    def _timeline(self) -> CallTimeline:
        nodes, at = list(self.calls[0].graph.nodes), {node: place for place, node in enumerate(self.calls)}
        made_for = {at[node]: at[user] for node, user in Lifetimes(nodes).made_for.items()}
        return CallTimeline(nodes, at, self.scopes, made_for)

    def _category(self, storage: Storage) -> str:
        node = storage.node
        if storage.category or node is None:
            return storage.category or "temporaries"
        if node.op is comm.all_gather and all(uncast(value) in self.parameters for value in node.operands):
            return "gathered parameters"
        if is_cast(node) and uncast(node.outs[0]) in self.parameters:
            return "cast parameters"
        if isinstance(node.op, OwnOp) and node.op.fetches:
            return "fetched"
        if node.phase is Phase.FORWARD and storage.used_in is Phase.BACKWARD:
            return "activations"
        return BUFFERS if is_comm(node) else "temporaries"


NOTHING, A_VIEW = Cost(), Cost({Work(0.0, 0.0, kind=VIEW): 1})
NO_TENSORS = ("opens", "unit", "closes", "number")
"""Roles of loop calls that return no tensor."""
