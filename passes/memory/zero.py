"""zero: parameters are stored sharded over the ranks that would all hold replicas (Rajbhandari et al., ZeRO, 2020).

    parameter %w : f32[512{tp}, 256]      ->      parameter %w : f32[512{tp,dp}, 256]

It changes where parameters are stored, and nothing else: that they are gathered before they are used, and that their
gradients are reduced and scattered, follows from placements that differ (``partition``). Where the optimizer's step is
in the graph, parameters stay replicated on levels 1 and 2; but master weights that are computed with in fewer bits are
stored sharded, for their casts are gathered in fewer bytes than new master weights would be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardfx.ir.dim_sharding import DimSharding, Part, compound
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, InputKind, OutputKind, Phase, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.traits import narrows
from shardfx.ir.reasons import ShardingDecision
from shardfx.ir.spec import Spec
from shardfx.passes.base import SHARDED, Pass, PassContext
from shardfx.passes.update_placement import place_update


@dataclass(frozen=True)
class Zero(Pass):
    """Shard the storage of parameters over ``axes``, in addition to their placement (ZeRO).

    Args:
        level: 1 and 2: trained parameters, so that optimizer states and gradients are sharded; 3: all parameters.
        axes: mesh axes, major first.
        least: the minimum number of elements of sharded parameters.
    """

    name: ClassVar[str] = "zero"
    requires: ClassVar[frozenset[str]] = frozenset({SHARDED})

    level: int = 1
    axes: tuple[str, ...] = ("dp",)
    least: int = 2**14

    def run(self, graph: Graph, context: PassContext) -> bool:
        for axis in self.axes:
            if graph.mesh[axis].loop or self.axes.count(axis) > 1:
                what, got = f"parameters cannot be stored sharded over {axis!r}", ", ".join(self.axes)
                expected = "axes of ranks, each once: each rank has what it stores in all iterations"
                remedy = "name an axis, or a tuple of axes, major first, such as that of data"
                raise Error(what, where="Hints(zero_axis=...)", expected=expected, got=got, remedy=remedy)
        trained = {output.name: output for output in graph.outputs if output.kind is OutputKind.GRADIENT}
        stepped = {output.name for output in graph.outputs if output.kind is OutputKind.PARAMETER}
        changed, stored, users = False, dict[str, Spec](), graph.users()
        for inp in graph.of_kind(InputKind.PARAMETER):
            value = inp.value
            if value.type.numel < self.least or (self.level < 3 and inp.name not in trained):
                continue
            spec = stored_spec(value, self.axes, graph.mesh)
            if inp.name in stepped:
                stored[inp.name] = spec
                if self.level < 3 and not all(narrows(n) or n.phase is Phase.UPDATE for n in users[value]):
                    continue
            changed |= spec != value.spec
            value.spec = spec
            self._say(graph, value)
            if inp.name in trained:
                trained[inp.name].spec = spec
        if any(node.phase is Phase.UPDATE for node in graph.nodes):
            place_update(graph, context.cache, stored)
            for inp in graph.of_kind(InputKind.STATE):
                if inp.name.rpartition(".")[0] in stored:
                    self._say(graph, inp.value)
        return changed or bool(stored)

    def _say(self, graph: Graph, value: Value) -> None:
        """Record a sharded storage of a value, where a hint places it as well."""
        for dim, sharding in enumerate(value.spec.dims if value.spec is not None else ()):
            if axes := tuple(axis for axis in self.axes if axis in sharding.axes):
                graph.reasons.add(ShardingDecision(value, dim, DimSharding(axes), f"zero={self.level}"))


def stored_spec(value: Value, axes: tuple[str, ...], mesh: Mesh) -> Spec:
    """The stored placement of a value that is also sharded over ``axes``: on the first dim that they divide, or on the
    one of which a rank has most; a compound dim only if there is no other."""
    spec = value.spec or Spec.replicated(value.type.ndim)
    more = tuple(axis for axis in axes if axis not in spec.axes)
    if not more or not spec.dims:
        return spec
    plain = [dim for dim, sharding in enumerate(spec.dims) if not sharding.parts]
    even = [dim for dim in plain if value.shape[dim] % mesh.extent((*spec.dims[dim].axes, *more)) == 0]
    local = {d: value.shape[d] / mesh.extent(spec.dims[d].axes) for d in plain or range(len(spec.dims))}
    dim = even[0] if even else max(local, key=local.__getitem__)
    sharding = spec.dims[dim]
    if not sharding.parts:
        return spec.with_dim(dim, DimSharding(sharding.axes + more))
    *rest, last = sharding.parts
    return spec.with_dim(dim, compound([*rest, Part(last.size, last.axes + more)], mesh))
