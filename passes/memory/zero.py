"""zero: parameters are stored sharded over the ranks that would all hold the same (Rajbhandari et al., ZeRO, 2020).

    parameter %w : f32[512{tp}, 256]      ->      parameter %w : f32[512{tp,dp}, 256]

It changes where parameters are stored, and nothing else: that they are gathered before they are used, and that their
gradients are reduced and scattered, follows from placements that differ (``partition``). Where the optimizer's step is
in the graph, parameters stay whole on levels 1 and 2; but masters that are computed with in fewer bits are stored
sharded, for their casts are gathered in fewer bytes than new masters would be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardfx.ir.dim_sharding import DimSharding, Part, compound
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, InputKind, Node, OutputKind, Phase, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.sends import fetched
from shardfx.ir.ops.traits import narrows
from shardfx.ir.reasons import Decision
from shardfx.ir.spec import Spec
from shardfx.passes.base import COMM_EXPLICIT, SHARDED, Context, Pass
from shardfx.passes.update_placement import place_update

from .made_again import Repeats


@dataclass(frozen=True)
class Zero(Pass):
    """Store parameters sharded over ``axes``, on top of how they are sharded.

    Args:
        level: 1 and 2: those that are trained, so that optimizer states and gradients are sharded; 3: all of them.
        axes: mesh axes, major first.
        least: parameters of fewer elements stay as they are.
    """

    name: ClassVar[str] = "zero"
    requires: ClassVar[frozenset[str]] = frozenset({SHARDED})

    level: int = 1
    axes: tuple[str, ...] = ("dp",)
    least: int = 2**14

    def run(self, graph: Graph, context: Context) -> bool:
        for axis in self.axes:
            if axis not in graph.mesh.names:
                raise Error(
                    f"unknown mesh axis {axis!r}",
                    where="Hints(zero_axis=...)",
                    expected=f"one of {', '.join(graph.mesh.names)}",
                    got=axis,
                    remedy="name the axis, or a tuple of axes, over which parameters are to be stored sharded",
                )
            if self.axes.count(axis) > 1:
                raise Error(
                    f"parameters are to be stored sharded over {axis!r} twice",
                    where="Hints(zero_axis=...)",
                    expected="each axis once",
                    got=", ".join(self.axes),
                    remedy="name each axis once, major first",
                )
            if graph.mesh[axis].loop:
                raise Error(
                    f"parameters are to be stored sharded over {axis!r}, a loop axis",
                    where="Hints(zero_axis=...)",
                    expected="axes of ranks: each rank has what it stores in all iterations",
                    got=axis,
                    remedy="name an axis of ranks, such as that of data",
                )
        trained = {output.name: output for output in graph.outputs if output.kind is OutputKind.GRADIENT}
        stepped = {output.name for output in graph.outputs if output.kind is OutputKind.PARAMETER}
        changed, shardings, users = False, dict[str, Spec](), graph.users()
        for given in graph.of_kind(InputKind.PARAMETER):
            value = given.value
            if value.type.numel < self.least or (self.level < 3 and given.name not in trained):
                continue
            spec = stored(value, self.axes, graph.mesh)
            if given.name in stepped:
                shardings[given.name] = spec
                if self.level < 3 and not all(map(_casts, users[value])):
                    continue
            changed |= spec != value.spec
            value.spec = spec
            self._say(graph, value)
            if given.name in trained:
                trained[given.name].spec = spec
        if any(node.phase is Phase.UPDATE for node in graph.nodes):
            place_update(graph, context.cache, shardings)
            for given in graph.of_kind(InputKind.STATE):
                if given.name.rpartition(".")[0] in shardings:
                    self._say(graph, given.value)
        return changed or bool(shardings)

    def _say(self, graph: Graph, value: Value) -> None:
        """That a value is stored sharded over the axes, where a hint says so as well."""
        for dim, sharding in enumerate(value.spec.dims if value.spec is not None else ()):
            if axes := tuple(axis for axis in self.axes if axis in sharding.axes):
                graph.reasons.add(Decision(value, dim, DimSharding(axes), f"zero={self.level}"))


@dataclass(frozen=True)
class RematerializeGathers(Pass):
    """Gather stored parameters once more for the backward, so that they need not be whole between.

    ``Hints(zero=3)`` says so: a parameter's all-gather is a value that is made again, and so is its cast.
    """

    name: ClassVar[str] = "rematerialize-gathers"
    requires: ClassVar[frozenset[str]] = frozenset({COMM_EXPLICIT})

    def run(self, graph: Graph, context: Context) -> bool:
        return Repeats(graph, fetched(graph).__contains__).run()


def _casts(user: Node) -> bool:
    """Whether a node of a parameter gives it in fewer bits, or steps it."""
    return narrows(user) or user.phase is Phase.UPDATE


def stored(value: Value, axes: tuple[str, ...], mesh: Mesh) -> Spec:
    """How a value is stored that is sharded over ``axes`` too: on the first dim that they divide, or else on the one of
    which a rank holds most; a compound dim is left alone where there is another."""
    spec = value.spec or Spec.whole(value.type.ndim)
    more = tuple(axis for axis in axes if axis not in spec.axes)
    if not more or not spec.dims:
        return spec
    plain = [dim for dim, sharding in enumerate(spec.dims) if not sharding.parts]
    even = [dim for dim in plain if value.shape[dim] % mesh.extent((*spec.dims[dim].axes, *more)) == 0]
    if even:
        dim = even[0]
    else:
        dim = max(plain or range(len(spec.dims)), key=lambda d: value.shape[d] / mesh.extent(spec.dims[d].axes))
    return spec.with_dim(dim, _sharding_more(spec.dims[dim], value.shape[dim], more, mesh))


def _sharding_more(sharding: DimSharding, size: int, more: tuple[str, ...], mesh: Mesh) -> DimSharding:
    """The sharding with further axes, minor to those that it has."""
    if not sharding.parts:
        return DimSharding(sharding.axes + more)
    *rest, last = sharding.parts
    return compound([*rest, Part(last.size, last.axes + more)], mesh)
