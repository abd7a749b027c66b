"""Seeds of propagation: the values that have a hint, and the gradients of parameters that have one.

An axis that shards the leading dim of an input of the model is a *data axis*: on a parameter it says how the parameter
is stored, not how it computes (gathered at use, its gradient reduce-scattered), and is no part of the seed.

A loop axis that shards no input makes chunks of a step (``head "dp, chunk, -"``). It reaches from what is hinted to
what follows, and into the backward of these: chunks that came back along the residual stream to an attention would have
to meet there, layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from shardfx.ir.dim_sharding import DimSharding, Part, compound
from shardfx.ir.graph import Graph, InputKind, Node, OutputKind, Phase, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.program.store_layout import as_made
from shardfx.ir.reasons import ShardingDecision
from shardfx.ir.spec import Spec

BY_PASS = "pass "
"""The name of what hints begins so where that is a pass."""


@dataclass(frozen=True)
class Seed:
    """A value with its hinted sharding, and who hinted it.

    ``operator`` seeds are parameters: they decide conflicts. A ``closed`` value is never changed.
    """

    value: Value
    spec: Spec
    name: str
    operator: bool = False
    closed: bool = True

    @property
    def by_pass(self) -> bool:
        """Whether the seed is a pass's, and no user's hint."""
        return self.name.startswith(BY_PASS)


def seeds_of(graph: Graph) -> list[Seed]:
    """The seeds of a graph: inputs first, then nodes, then gradients that have no hint of their own."""
    used: dict[str, Seed] = {}
    for inp in graph.inputs:
        if inp.value.hint is not None:
            is_parameter = inp.kind is InputKind.PARAMETER
            used[inp.name] = Seed(inp.value, inp.value.hint, inp.value.hinted_by, operator=is_parameter)
    seeds = [*used.values()]
    for node in graph.nodes:
        seeds += [Seed(value, value.hint, value.hinted_by) for value in node.outs if value.hint is not None]
    for output in graph.outputs:
        known = used.get(output.name) if output.kind is OutputKind.GRADIENT else None
        if known is not None and (made := as_made(output.value)).hint is None:
            seeds.append(Seed(made, known.spec, known.name, operator=known.operator, closed=False))
    return seeds


def stored_by_hints(graph: Graph) -> Iterator[ShardingDecision]:
    """Reasons of parameters' stored placements over data axes, which are no part of their seeds."""
    for value in (inp.value for inp in graph.of_kind(InputKind.PARAMETER)):
        if value.hint is not None and value.spec is not None:
            seed = Seed(value, value.hint, value.hinted_by)
            for dim, sharding in enumerate(value.spec.dims):
                if axes := tuple(axis for axis in sharding.axes if axis not in value.hint.axes):
                    hint = "" if seed.by_pass else seed.name
                    yield ShardingDecision(value, dim, DimSharding(axes), f"by {seed.name}", hint)


def data_axes(graph: Graph) -> set[str]:
    """The data axes: those that shard the leading dim of a model input, by the hints."""
    hints = (inp.value.hint for inp in graph.of_kind(InputKind.ARGUMENT) if inp.value.type.ndim)
    return {axis for hint in hints if hint is not None for axis in hint.dims[0].axes}


def as_used(stored: Spec, data: set[str], value: Value, mesh: Mesh) -> Spec:
    """The placement of a parameter where it is used: without the data axes."""
    return Spec(tuple(strip(sharding, data, value.shape[d], mesh) for d, sharding in enumerate(stored.dims)))


def strip(sharding: DimSharding, axes: set[str], size: int, mesh: Mesh) -> DimSharding:
    """A sharding without some axes."""
    if not axes & set(sharding.axes):
        return sharding
    return compound([Part(p.size, tuple(a for a in p.axes if a not in axes)) for p in sharding.sub(size)], mesh)


@dataclass(frozen=True)
class ChunkReach:
    """By loop axis that shards no input, the modules whose ops may be sharded over it."""

    modules: Mapping[str, frozenset[str]]

    @staticmethod
    def of(graph: Graph) -> ChunkReach:
        """The chunk reach of a graph's hints."""
        shared = {axis for each in graph.of_kind(InputKind.ARGUMENT) for axis in _loops(each.value, graph.mesh)}
        axes = [axis.name for axis in graph.mesh.axes if axis.loop and axis.name not in shared]
        return ChunkReach({axis: _reached(graph, axis) for axis in axes})

    def has(self, node: Node, axis: str) -> bool:
        """Whether a node may be sharded over an axis. The sum of two gradients is no module's: both must be so made."""
        known = self.modules.get(axis)
        if known is None:
            return True
        is_sum = node.op is torch.ops.aten.add.Tensor and node.phase is Phase.BACKWARD
        summed = [value.node for value in node.operands if value.node is not None] if is_sum else []
        return all(each.where.module in known for each in (node, *summed))


def _reached(graph: Graph, axis: str) -> frozenset[str]:
    """The modules whose output a hint shards, or one of whose ops is pinned so, and all that use their results."""
    forward = [node for node in graph.nodes if node.phase is Phase.FORWARD]
    found = {node.where.module for node in forward if any(axis in _loops(value, graph.mesh) for value in node.outs)}
    for node in forward:
        if node.pin is not None and any(axis in axes for _, axes in node.pin.shardings):
            found.add(node.where.module)
    behind: set[Value] = {each.value for each in graph.inputs if axis in _loops(each.value, graph.mesh)}
    for node in forward:
        if node.where.module in found or not behind.isdisjoint(node.operands):
            behind.update(node.outs)
    return frozenset(found | {node.where.module for node in forward if not behind.isdisjoint(node.outs)})


def _loops(value: Value, mesh: Mesh) -> tuple[str, ...]:
    """The loop axes in the hint on a value."""
    return tuple(axis for axis in value.hint.axes if mesh[axis].loop) if value.hint is not None else ()
