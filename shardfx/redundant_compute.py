"""Redundant compute: the mesh axes that shard too little of a plan, each in one warning with the hint to write.

An op that is not sharded over an axis is computed in full by each rank along it; one that is sharded unevenly (3 heads
over 2 ranks) takes as long as the largest shard. Both are FLOPs of a rank that an even sharding over the axis would not
need::

    Mesh(dp=2, tp=2), specs={"args.0": "dp, -"}        tp shards nothing: half of the FLOPs of a rank are redundant
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from shardfx.ir.cost.flops import flops_of
from shardfx.ir.cost.traffic import TripCounts
from shardfx.ir.dim_sharding import DimSharding
from shardfx.ir.errors import ShardfxWarning
from shardfx.ir.graph import Graph, Input, InputKind, Node, Phase, op_name
from shardfx.ir.mesh import Axis, Mesh
from shardfx.ir.names import pattern
from shardfx.ir.ops import comm
from shardfx.ir.ops.alike import alike
from shardfx.ir.ops.sends import is_comm
from shardfx.ir.ops.traits import is_heavy, uncast
from shardfx.ir.spec import Spec
from shardfx.passes import Pipeline
from shardfx.passes.replicated_spatial_ops import space_axes

from .compile import Compiled
from .hints import Hints

LOST = 0.05
"""Of the FLOPs of a rank, the part from which on what is sharded unevenly over an axis, or gathered over it and then
computed by each rank, is worth a warning: the hints ask for a sharding that is not there, and for lack of it a step
computes at least 5 % longer. Vocabularies and sequences that an axis does not divide stay far below. Of axes that shard
an image :mod:`shardfx.passes.replicated_spatial_ops` says what is gathered."""
UNSHARDED = 0.5
"""Of the FLOPs of one device, the part from which on an axis that leaves it alone is worth a warning: it shards less
than it replicates. Less is left to the hints, for a tensor-parallel plan may leave a head or a router replicated.
Norms, residuals and losses, which any such plan replicates, are not counted: they have next to no FLOPs."""


@dataclass(frozen=True)
class Redundancy:
    """What a rank computes redundantly over one axis, in FLOPs of a step.

    ``total`` is all that the rank computes, ``by_node`` the redundant part of each op; ``lost`` are those of these ops
    that the hints shard over the axis: unevenly, or in vain. ``unsharded`` is the part of one device's FLOPs in ops
    that are replicated over the axis.
    """

    axis: Axis
    total: int
    by_node: Mapping[Node, float]
    lost: frozenset[Node]
    unsharded: float

    @property
    def flops(self) -> float:
        """The redundant FLOPs of all ops."""
        return sum(self.by_node.values())

    @property
    def reported(self) -> list[Node]:
        """The ops that a warning names: those that are lost, if there are such."""
        return [node for node in self.by_node if node in self.lost or not self.lost]

    @property
    def is_reported(self) -> bool:
        """Whether there is so much of it that a warning says so."""
        lost = sum(self.by_node[node] for node in self.lost)
        return lost > LOST * self.total or self.unsharded > UNSHARDED


def report_redundant_compute(compiled: Compiled) -> None:
    """Warn, once for each axis of ranks or loop axis that shards too little, and of ``zero`` that shards nothing; and
    note it in the plan."""
    graph, hints = compiled.after, compiled.hints
    texts = [_of_ranks(found, compiled) for found in redundancies(graph) if found.is_reported]
    texts += [
        f"loop axis {axis.name} ({axis.size} iterations) is not used: a step is one iteration, with the memory of the "
        f"global batch and 0 redundant FLOPs. Write {_batch_hint(axis, graph)}"
        for axis in unused_loops(graph)
    ]
    texts += _of_zero(graph, hints)
    for text in texts:
        graph.notes.append(text)
        warnings.warn(text, ShardfxWarning, stacklevel=2)


def redundancies(graph: Graph) -> Iterator[Redundancy]:
    """What a rank computes redundantly over each axis of ranks, but for that of a pipeline, which has stages."""
    axes = [axis for axis in graph.mesh.space if axis.size > 1]
    nodes = [node for node in graph.nodes if is_heavy(node)]
    if not axes or not nodes:
        return
    keys = {node: (alike(node), node.strategy) for node in nodes}
    ranks = {axis.name: 1 if axis.loop else axis.size for axis in graph.mesh.axes}
    full, spent = _flops(keys, None), _flops(keys, Mesh(links=None, **ranks))
    for axis in axes:
        name = axis.name
        if graph.pipeline is not None and name == graph.pipeline.axis:
            continue
        needed = _flops(keys, Mesh(links=None, **{**ranks, name: 1}))
        extra = {node: spent[node] - needed[node] / axis.size for node in nodes}
        by_node = {node: flops for node, flops in extra.items() if flops > 0}
        lost = frozenset() if name in space_axes(graph) else _lost(by_node, name, graph)
        unsharded = sum(full[node] for node in nodes if not _is_sharded(node, name))
        yield Redundancy(axis, sum(spent.values()), by_node, lost, unsharded / max(sum(full.values()), 1))


def _lost(nodes: Iterable[Node], axis: str, graph: Graph) -> frozenset[Node]:
    """Those of some ops that the hints shard over an axis, unevenly or in vain: they are made of an argument that is
    sharded over it (sums over it apart), or of what is gathered over it. The border rows of tiles do not count."""
    behind = {inp.value for inp, _, _ in _sharded_arguments(graph, axis)}
    for node in graph.nodes:
        is_sum = is_comm(node) and axis in node.kwargs["axes"] and node.op is not comm.all_gather
        if not is_sum and any(value in behind for value in node.operands):
            behind.update(node.outs)

    def is_lost(node: Node) -> bool:
        if _is_sharded(node, axis):
            made = node.strategy
            specs = (*made.operands, *made.results) if made is not None else ()
            return not any(
                sharding.rows is not None and axis in sharding.axes for spec in specs for sharding in spec.dims
            )
        return any(value in behind for value in node.operands) or _gather_before(node, axis) is not None

    return frozenset(filter(is_lost, nodes))


def _flops(keys: Mapping[Node, Hashable], mesh: Mesh | None) -> dict[Node, int]:
    """The FLOPs of each node in a step: of one device, or of the rank with the largest shards on a mesh. Nodes of equal
    keys have the same."""
    counted = {key: flops_of(node, mesh) for key, node in {key: node for node, key in keys.items()}.items()}
    return {node: counted[key] for node, key in keys.items()}


def unused_loops(graph: Graph) -> list[Axis]:
    """The loop axes over which nothing is iterated."""
    iterated = {name for axes in TripCounts.of(graph).axes.values() for name in axes}
    return [axis for axis in graph.mesh.axes if axis.loop and axis.size > 1 and axis.name not in iterated]


def _of_ranks(found: Redundancy, compiled: Compiled) -> str:
    """The warning of an axis of ranks."""
    name, graph = found.axis.name, compiled.after
    said = (
        f"redundant compute over {name} ({found.axis.size} ranks): {found.flops:.3g} of the {found.total:.3g} FLOPs of "
        f"a rank in a step ({found.flops / found.total:.0%}), in {len(found.by_node)} ops"
    )
    if not any(_is_sharded(node, name) for node in graph.nodes) and not any(_sharded_arguments(graph, name)):
        return f"{said}: nothing is sharded over it. Write {_batch_hint(found.axis, graph)}"
    node = found.reported[0]
    begins = (
        f"It begins at {_op(node)}, which {name} {'shards unevenly' if _is_sharded(node, name) else 'does not shard'}"
    )
    cause = _gather_before(node, name)
    if cause is not None and cause is not node:
        begins += f", for {_op(cause)} needs more than a shard"
    return f"{said}. {begins}. Write {_hint(found, compiled)}"


def _op(node: Node) -> str:
    return f"{op_name(node.op)} ({node.where} {node.where.code})"


def _is_sharded(node: Node, axis: str) -> bool:
    return node.strategy is not None and any(axis in axes for _, axes in node.strategy.shardings)


def _gather_before(node: Node, axis: str) -> Node | None:
    """The op by which a replicated one is replicated: itself, or one before it with no product in between, that has an
    operand gathered over the axis. Stored parameters are gathered as a matter of course."""
    seen, todo = {node}, [node]
    for each in todo:
        for maker in (value.node for value in each.operands if value.node is not None):
            if is_comm(maker) and axis in maker.kwargs["axes"]:
                if maker.op is comm.all_gather and any(uncast(value).node is not None for value in maker.operands):
                    return each
            elif maker not in seen and not is_heavy(maker) and not _is_sharded(maker, axis):
                seen.add(maker)
                todo.append(maker)
    return None


def _hint(found: Redundancy, compiled: Compiled) -> str:
    """What to write to have the axis shard more."""
    axis, graph = found.axis, compiled.after
    for inp, dim, sharding in _sharded_arguments(graph, axis.name):
        parts, size = graph.mesh.extent(sharding.axes), inp.value.shape[dim]
        if size % parts:
            return f"a multiple of {parts} in place of {size} as dim {dim} of {inp.name}"
    forward = [node for node in found.reported if node.phase is Phase.FORWARD]
    node = max(forward or found.reported, key=found.by_node.__getitem__)
    strategy = dict(node.strategy.shardings) if node.strategy is not None else {}
    rule = compiled.context.cache.rule(node)
    free = [factor for dims in rule.results for dim in dims or () for factor in dim if factor not in rule.replicated]
    for factor in sorted(free, key=lambda factor: bool(strategy.get(factor))):  # those that are not sharded first
        axes = (*strategy.get(factor, ()), axis.name)
        if axis.name not in axes[:-1] and rule.sizes[factor] % graph.mesh.extent(axes) == 0:
            return f'strategies={{"{_hint_name(node, graph)}": "{factor}{{{",".join(axes)}}}"}}'
    sizes = ", ".join(f"{factor}={size}" for factor, size in rule.sizes.items() if factor not in rule.replicated)
    return f"a mesh whose {axis.name} divides a dim of {op_name(node.op)}: {sizes}"


def _hint_name(node: Node, graph: Graph) -> str:
    """How a hint names an op; with those of other layers, where these are alike."""
    op, path = op_name(node.op).split(".")[1], node.where.module
    layers = ".".join("*" if part.isdigit() else part for part in path.split("."))
    forward = [each for each in graph.nodes if each.phase is Phase.FORWARD and op_name(each.op) == op_name(node.op)]
    those = [each for each in forward if pattern(layers).fullmatch(each.where.module)]
    return f"{layers if all(alike(each) == alike(node) for each in those) else path}:{op}"


def _sharded_arguments(graph: Graph, axis: str) -> Iterator[tuple[Input, int, DimSharding]]:
    """The arguments that a hint shards over an axis: each with the dim, and how it is sharded."""
    for inp in graph.of_kind(InputKind.ARGUMENT):
        for dim, sharding in enumerate(inp.value.hint.dims if inp.value.hint is not None else ()):
            if axis in sharding.axes:
                yield inp, dim, sharding


def _batch_hint(axis: Axis, graph: Graph) -> str:
    """The spec of the first argument whose leading dim, the batch, the axis divides."""
    stages = f'pipeline=sx.Pipeline(axis="{axis.name}", microbatches=""), or ' if axis.name == Pipeline.axis else ""
    for inp in graph.of_kind(InputKind.ARGUMENT):
        spec, shape = inp.value.hint or Spec.replicated(inp.value.type.ndim), inp.value.shape
        dims = [list(sharding.axes) for sharding in spec.dims]
        if not dims:
            continue
        dims[0] = [axis.name, *dims[0]] if axis.loop else [*dims[0], axis.name]
        if shape[0] and shape[0] % graph.mesh.extent(dims[0]) == 0:
            text = ", ".join(" ".join(axes) or "-" for axes in dims)
            return f'{stages}specs={{"{inp.name}": "{text}"}}, or leave {axis.name} out of the mesh'
    name = axis.name
    return f"{stages}specs of parameters over {name}, or leave {name} out of the mesh: no batch is a multiple of it"


def _of_zero(graph: Graph, hints: Hints) -> Iterator[str]:
    """The warning of ``zero`` where no parameter or state is sharded over its axis."""
    axes = {hints.zero_axis} if isinstance(hints.zero_axis, str) else set(hints.zero_axis)
    stored = [inp for inp in graph.inputs if inp.kind in (InputKind.PARAMETER, InputKind.STATE)]
    sharded = any(inp.value.spec is not None and axes & set(inp.value.spec.axes) for inp in stored)
    largest = max((inp.value.type.numel for inp in stored), default=0)
    if hints.zero and graph.mesh.extent(axes) > 1 and not sharded and 0 < largest < hints.zero_min_numel:
        yield (
            f"zero={hints.zero} shards nothing over {', '.join(sorted(axes))}: the largest has {largest} elements, "
            f"fewer than zero_min_numel={hints.zero_min_numel}, and each rank stores all; 0 FLOPs are redundant. "
            f"Write zero_min_numel={largest}, or a smaller one, or leave zero out"
        )
