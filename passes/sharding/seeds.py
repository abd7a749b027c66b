"""Where propagation starts: the values that have a hint, and the gradients of parameters that have one.

An axis that cuts the leading dim of an input of the model is a *data axis*: on a parameter it says how the parameter
is stored, not how it computes (gathered at use, its gradient reduce-scattered), and is no part of the seed.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardfx.ir.cut import Cut, Part, compound
from shardfx.ir.graph import Graph, InputKind, OutputKind, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.spec import Spec


@dataclass(frozen=True)
class Seed:
    """A value, how it is cut, and who says so.

    ``operator`` seeds are parameters: their cuts decide conflicts. A ``closed`` value is never changed.
    """

    value: Value
    spec: Spec
    name: str
    operator: bool = False
    closed: bool = True

    @property
    def by_pass(self) -> bool:
        """Whether a pass says so, and no hint of the user."""
        return self.name.startswith(BY_PASS)


BY_PASS = "pass "
"""The name of what hints begins so where that is a pass."""


def seeds_of(graph: Graph) -> list[Seed]:
    """The seeds of a graph: inputs first, then nodes, then gradients that have no hint of their own."""
    seeds = []
    used: dict[str, Seed] = {}
    for given in graph.inputs:
        if given.value.hint is not None:
            is_parameter = given.kind is InputKind.PARAMETER
            seed = used[given.name] = Seed(given.value, given.value.hint, given.value.hinted_by, operator=is_parameter)
            seeds.append(seed)
    for node in graph.nodes:
        seeds += [Seed(value, value.hint, value.hinted_by) for value in node.outs if value.hint is not None]
    for output in graph.outputs:
        known = used.get(output.name)
        if output.kind is OutputKind.GRADIENT and known is not None and output.value.hint is None:
            seeds.append(Seed(output.value, known.spec, known.name, operator=known.operator, closed=False))
    return seeds


def data_axes(graph: Graph) -> set[str]:
    """The axes that cut the leading dim of an input of the model, by the hints."""
    return {
        axis
        for given in graph.of_kind(InputKind.ARGUMENT)
        if given.value.hint is not None and given.value.type.ndim
        for axis in given.value.hint.dims[0].axes
    }


def as_used(stored: Spec, data: set[str], value: Value, mesh: Mesh) -> Spec:
    """How a parameter is held where it is used: without the data axes."""
    return Spec(tuple(strip(cut, data, value.shape[d], mesh) for d, cut in enumerate(stored.dims)))


def strip(cut: Cut, axes: set[str], size: int, mesh: Mesh) -> Cut:
    """The cut without some axes."""
    if not axes & set(cut.axes):
        return cut
    return compound([Part(p.size, tuple(a for a in p.axes if a not in axes)) for p in cut.sub(size)], mesh)
