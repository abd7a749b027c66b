"""Where propagation starts: the values that have a hint, and the gradients of parameters that have one.

An axis that cuts the leading dim of an input of the model is a *data axis*: on a parameter it says how the parameter
is stored, not how it computes (gathered at use, its gradient reduce-scattered), and is no part of the seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardfx.ir.cut import Cut, Part, compound
from shardfx.ir.graph import Graph, InputKind, OutputKind, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.spec import Spec
from shardfx.passes.base import Hint


@dataclass(frozen=True)
class Seed:
    """A value, how it is cut, and who says so.

    ``operator`` seeds are parameters: their cuts decide conflicts. A ``closed`` value is never changed.
    """

    value: Value
    spec: Spec
    hint: Hint
    operator: bool = False
    closed: bool = True


def seeds_of(graph: Graph, hints: Mapping[Value, Hint]) -> list[Seed]:
    """The seeds of a graph: inputs first, then nodes, then gradients that have no hint of their own."""
    data = data_axes(graph, {value: hint.spec for value, hint in hints.items()})
    seeds = []
    used: dict[str, Seed] = {}
    for given in graph.inputs:
        hint = hints.get(given.value)
        if hint is None:
            continue
        is_parameter = given.kind is InputKind.PARAMETER
        spec = as_used(hint.spec, data, given.value, graph.mesh) if is_parameter else hint.spec
        used[given.name] = Seed(given.value, spec, hint, operator=is_parameter)
        seeds.append(used[given.name])
    for node in graph.nodes:
        seeds += [Seed(value, hints[value].spec, hints[value]) for value in node.outs if value in hints]
    for output in graph.outputs:
        seed = used.get(output.name)
        if output.kind is OutputKind.GRADIENT and seed is not None and output.value not in hints:
            seeds.append(Seed(output.value, seed.spec, seed.hint, operator=True, closed=False))
    return seeds


def data_axes(graph: Graph, placed: Mapping[Value, Spec]) -> set[str]:
    """The axes that cut the leading dim of an input of the model."""
    return {
        axis
        for given in graph.inputs
        if given.kind is InputKind.ARGUMENT and given.value in placed and given.value.type.ndim
        for axis in placed[given.value].dims[0].axes
    }


def as_used(stored: Spec, data: set[str], value: Value, mesh: Mesh) -> Spec:
    """How a parameter is held where it is used: without the data axes."""
    return Spec(tuple(strip(cut, data, value.shape[d], mesh) for d, cut in enumerate(stored.dims)))


def strip(cut: Cut, axes: set[str], size: int, mesh: Mesh) -> Cut:
    """The cut without some axes."""
    if not axes & set(cut.axes):
        return cut
    return compound([Part(p.size, tuple(a for a in p.axes if a not in axes)) for p in cut.sub(size)], mesh)
