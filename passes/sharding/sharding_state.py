"""State of propagation: the sharding of every value, per dim, and the hint that each axis of it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from shardfx.ir.dim_sharding import REPLICATED, DimSharding, smallest
from shardfx.ir.graph import Graph, InputKind, Node, OutputKind, Phase, Value, Where
from shardfx.ir.mesh import Mesh
from shardfx.ir.program.store_layout import as_made
from shardfx.ir.rules.sharding_rule import Dim, ShardingRule
from shardfx.ir.spec import Spec
from shardfx.passes.base import RuleCache
from shardfx.passes.replicated_spatial_ops import space_axes

from .seeds import ChunkReach, strip


class NodeTensor(NamedTuple):
    """A tensor of a node, with the factors of its dims."""

    value: Value
    dims: tuple[Dim, ...]
    is_operand: bool


@dataclass(frozen=True)
class HintOrigin:
    """The hint that an axis came from; ``operator``: a parameter's or an op's, which says how ops are sharded.

    ``pinned`` is where the op stands that is pinned so.
    """

    hint: str
    operator: bool
    pinned: Where | None = None


WEAK = HintOrigin("", False)


@dataclass
class ShardingState:
    """The shardings of values, and the rules of the nodes between them: all but those of the optimizer's step.

    A ``closed`` value has a hint, and is never changed, but by loop axes, which say in which iterations it is made.
    """

    graph: Graph
    cache: RuleCache
    rules: dict[Node, ShardingRule] = field(default_factory=dict)
    shardings: dict[Value, list[DimSharding]] = field(default_factory=dict)
    closed: set[Value] = field(default_factory=set)
    origin: dict[tuple[Value, str], HintOrigin] = field(default_factory=dict)
    _tensors: dict[Node, list[NodeTensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mesh: Mesh = self.graph.mesh
        self.chunks = ChunkReach.of(self.graph)
        self.changed_graph()

    def changed_graph(self) -> None:
        """Refresh after a change of the graph: rules of new nodes, operands."""
        self._tensors.clear()
        self.nodes = [node for node in self.graph.nodes if node.phase is not Phase.UPDATE]
        for node in self.nodes:
            if node not in self.rules:
                self.rules[node] = self.cache.rule(node)

    def feeds(self, sharding: DimSharding, size: int) -> bool:
        """Whether a sharding of a dim is useful: no shard is empty, or it is sharded over axes of space alone, where a
        rank's tile of a small map may be empty; and there is something to be shared."""
        parts = [part for part in sharding.sub(size) if smallest(part.size, part.axes, self.mesh) == 0]
        return all(part.size > 1 and self.space.issuperset(part.axes) for part in parts)

    @cached_property
    def space(self) -> frozenset[str]:
        """The axes of space, which shard an image."""
        return frozenset(space_axes(self.graph))

    def tensors(self, node: Node) -> list[NodeTensor]:
        """The operands and results of a node with their factors."""
        found = self._tensors.get(node)
        if found is None:
            rule = self.rules[node]
            found = [NodeTensor(v, dims, True) for v, dims in zip(node.operands, rule.operands, strict=True)]
            pairs = zip(node.results, rule.results, strict=True)
            found += [NodeTensor(v, dims, False) for v, dims in pairs if v is not None and dims is not None]
            self._tensors[node] = found
        return found

    def take_over(self, old: Value, new: Value) -> None:
        """Transfer the sharding of ``old`` to ``new``, which replaces it."""
        if old in self.shardings:
            self.shardings[new] = self.shardings.pop(old)
        if old in self.closed:
            self.closed.add(new)
        for axis in self.mesh.names:
            if (old, axis) in self.origin:
                self.origin[new, axis] = self.origin.pop((old, axis))

    def of(self, value: Value) -> list[DimSharding]:
        """The sharding of each dim of a value; the list may be changed."""
        found = self.shardings.get(value)
        if found is None:
            found = self.shardings[value] = [REPLICATED] * value.type.ndim
        return found

    def spec(self, value: Value) -> Spec:
        """The placement of a value."""
        return Spec(tuple(self.of(value)))

    def gradients(self) -> dict[Value, list[Value]]:
        """The gradients of each parameter."""
        parameters = {inp.name: inp.value for inp in self.graph.of_kind(InputKind.PARAMETER)}
        found: dict[Value, list[Value]] = {}
        for output in self.graph.outputs:
            if output.kind is OutputKind.GRADIENT and output.name in parameters:
                found.setdefault(parameters[output.name], []).append(as_made(output.value))
        return found

    def of_closed(self, value: Value, shardings: Mapping[str, DimSharding], node: Node) -> dict[str, DimSharding]:
        """The part of a node's factor shardings that applies to a closed value: its own, and loop axes that the hints
        split inputs into."""
        have = {axis for sharding in self.of(value) for axis in sharding.axes}
        others = {axis for axis in self.mesh.names if axis not in have | self.loops}
        sizes = self.rules[node].sizes
        return {factor: strip(sharding, others, sizes[factor], self.mesh) for factor, sharding in shardings.items()}

    @cached_property
    def loops(self) -> frozenset[str]:
        """The loop axes over which the hints split inputs."""
        return frozenset(each.name for each in self.mesh.axes if each.loop and each.name not in self.chunks.modules)

    def loops_of(self, sharding: DimSharding, size: int) -> DimSharding:
        """The loop axes in the sharding of a factor."""
        return strip(sharding, set(self.mesh.names) - self.loops, size, self.mesh)

    def having(self, node: Node, axis: str, factor: str) -> list[Value]:
        """The tensors of a node that are sharded over an axis on a factor."""
        found, kin = [], self.rules[node].kin(factor)
        for value, dims, _ in self.tensors(node):
            shardings = self.shardings.get(value, ())
            if any(axis in sharding.axes and not kin.isdisjoint(dims[d]) for d, sharding in enumerate(shardings)):
                found.append(value)
        return found

    def origin_of(self, value: Value, axis: str) -> HintOrigin:
        """The hint that an axis of a value came from."""
        return self.origin.get((value, axis), WEAK)

    def follows(self, node: Node, value: Value, axis: str) -> bool:
        """Whether an axis of a value comes from the pin of the op whose backward a node belongs to."""
        return node.phase is not Phase.FORWARD and self.origin_of(value, axis).pinned == node.where
