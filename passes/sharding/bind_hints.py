"""The user's hints, bound to values of the graph.

Names are those of ``named_parameters()``, ``args.N``, ``kwargs.NAME``, ``targets.N``, and a module's path for its
output; ``*`` stands for one part of a name, ``**`` for any. A spec is text (``"dp tp, -"``), a :class:`Spec`, or
DTensor placements, one per mesh axis.

An axis that cuts the leading dim of an input of the model is a *data axis*: on a parameter it says how the parameter
is stored, not how it computes (gathered at use, its gradient reduce-scattered).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from shardfx.ir.cut import Cut, Part, compound, project
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, InputKind, Node, Phase, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.names import module_outputs, pattern
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.spec import Spec

from .fixpoint import Seed


def as_spec(hint: Any, mesh: Mesh, ndim: int, name: str) -> Spec:
    """A user's spec of any of its forms, checked against the mesh and the number of dims."""
    where = f"hint {name!r}"
    if isinstance(hint, str):
        spec = Spec.parse(hint, mesh, ndim, where=where)
    elif isinstance(hint, Spec):
        spec = hint
    elif isinstance(hint, (list, tuple)) and hint and all(isinstance(p, Placement) for p in hint):
        spec = from_placements(hint, mesh, ndim, where)
    else:
        raise Error(
            "a hint is of no known form",
            where=where,
            expected="text such as 'dp, -', a Spec, or a sequence of DTensor placements",
            got=repr(hint),
        )
    if len(spec.dims) != ndim:
        raise Error("a spec does not have one entry per dim", where=where, expected=f"{ndim} dims", got=str(spec))
    if spec.partial:
        raise Error("a hint cannot ask for a partial value", where=where, expected="cut or whole dims", got=str(spec))
    for axis in spec.axes:
        if mesh[axis].time:
            raise Error(
                f"mesh axis {axis!r} is an axis of time",
                where=where,
                expected="axes of ranks; time axes come with pipelines",
                got=str(spec),
            )
    return spec


def from_placements(placements: Iterable[Placement], mesh: Mesh, ndim: int, where: str) -> Spec:
    """DTensor placements, one per axis of ranks, as a spec."""
    given = tuple(placements)
    if len(given) != len(mesh.space):
        raise Error(
            "there is not one placement per mesh axis",
            where=where,
            expected=f"{len(mesh.space)} placements, for {', '.join(a.name for a in mesh.space)}",
            got=len(given),
        )
    axes: list[tuple[str, ...]] = [()] * ndim
    for axis, placement in zip(mesh.space, given, strict=True):
        if isinstance(placement, Shard):
            axes[placement.dim % ndim] = (*axes[placement.dim % ndim], axis.name)
        elif not isinstance(placement, Replicate):
            raise Error("a hint takes Shard and Replicate only", where=where, got=repr(placement))
    return Spec(tuple(Cut(a) for a in axes))


def bind(
    graph: Graph, specs: Mapping[str, Any], aliases: Mapping[str, str], rules: Mapping[Node, ShardingRule]
) -> list[Seed]:
    """The seeds of propagation that the hints make. Sets the stored placement of hinted parameters.

    Raises:
        Error: a pattern matches nothing, two hints disagree, an axis is unknown or used twice, ...
    """
    mesh = graph.mesh
    inputs = {given.name: given for given in graph.inputs}
    names = {**{n: n for n in inputs}, **{a: n for a, n in aliases.items() if n in inputs}}
    modules = module_outputs(graph)
    bound: dict[Value, tuple[str, Spec]] = {}
    for text, hint in specs.items():
        matcher = pattern(text)
        hits = {names[n]: inputs[names[n]].value for n in names if matcher.fullmatch(n)}
        values = list(hits.values()) or [v for m, vs in modules.items() if matcher.fullmatch(m) for v in vs]
        if not values:
            near = difflib.get_close_matches(text, [*names, *modules], 3, 0.5)
            raise Error(
                f"hint {text!r} matches nothing",
                where="Hints(specs=...)",
                expected="a name of a parameter, args.N, kwargs.NAME, targets.N or a module's path",
                got=text,
                remedy=f"did you mean {' or '.join(map(repr, near))}?" if near else "see model.named_parameters()",
            )
        for value in values:
            spec = as_spec(hint, mesh, value.type.ndim, text)
            if value in bound and bound[value][1] != spec:
                raise Error(
                    f"two hints disagree on {value!r}",
                    where=f"hints {bound[value][0]!r} and {text!r}",
                    expected="one spec per value",
                    got=f"{bound[value][1]} and {spec}",
                    remedy="make the patterns narrower",
                )
            bound[value] = (text, spec)
    data = data_axes(graph, {v: s for v, (_, s) in bound.items()})
    users = graph.users()
    seeds = []
    kinds = {given.value: given.kind for given in graph.inputs}
    for value, (text, spec) in bound.items():
        if kinds.get(value) is InputKind.PARAMETER:
            layout = Spec(
                tuple(
                    fused_layout(value, d, cut, set(cut.axes) - data, rules, users, mesh)
                    for d, cut in enumerate(spec.dims)
                )
            )
            value.spec = layout
            use = Spec(tuple(strip(cut, data, value.shape[d], mesh) for d, cut in enumerate(layout.dims)))
            seeds.append(Seed(value, use, text, operator=True))
        else:
            seeds.append(Seed(value, spec, text))
    for output in graph.outputs:
        given = inputs.get(output.name)
        if output.kind.value == "gradient" and given is not None and given.value in bound:
            seed = next(s for s in seeds if s.value is given.value)
            if output.value not in bound:
                seeds.append(Seed(output.value, seed.spec, seed.name, operator=True, closed=False))
    return seeds


def data_axes(graph: Graph, bound: Mapping[Value, Spec]) -> set[str]:
    """The axes that cut the leading dim of an input of the model."""
    return {
        axis
        for given in graph.inputs
        if given.kind is InputKind.ARGUMENT and given.value in bound and given.value.type.ndim
        for axis in bound[given.value].dims[0].axes
    }


def strip(cut: Cut, axes: set[str], size: int, mesh: Mesh) -> Cut:
    """The cut without some axes."""
    if not axes & set(cut.axes):
        return cut
    return compound([Part(p.size, tuple(a for a in p.axes if a not in axes)) for p in cut.sub(size)], mesh)


def fused_layout(
    value: Value,
    dim: int,
    cut: Cut,
    operator: set[str],
    rules: Mapping[Node, ShardingRule],
    users: Mapping[Value, list[Node]],
    mesh: Mesh,
) -> Cut:
    """How a fused weight's dim is best laid out: ``3 * 64`` rows of q, k and v cut over heads are ``(3 64{tp})``.

    Follows the dim to the first op that takes it apart (a split, a view); where the plain cut does not survive
    that, but a cut of one of its parts does, each rank stores its share of every part.
    """
    if not operator:
        return cut
    size, at, seen = value.shape[dim], dim, 0
    while seen < 12:
        seen += 1
        step = _follow(value, at, rules, users)
        if step is None:
            return cut
        factors, rule, value, at = step
        if len(factors) == 1:
            continue
        sizes = rule.dim_sizes(factors)
        plain = project(cut, size, sizes, mesh)
        if plain is not None and not any(c.axes and f in rule.whole for f, c in zip(factors, plain, strict=True)):
            return cut
        extent = mesh.extent(cut.axes)
        for i, factor in enumerate(factors):
            if factor not in rule.whole and sizes[i] % extent == 0:
                parts = [Part(s, cut.axes if j == i else ()) for j, s in enumerate(sizes)]
                return compound(parts, mesh)
        return cut
    return cut


def _follow(
    value: Value, dim: int, rules: Mapping[Node, ShardingRule], users: Mapping[Value, list[Node]]
) -> tuple[tuple[str, ...], ShardingRule, Value, int] | None:
    """The next forward value that carries the dim on, where it stands there, and its factors on the way."""
    for node in users[value]:
        if node.phase is not Phase.FORWARD:
            continue
        rule = rules[node]
        factors = rule.operands[node.operands.index(value)][dim]
        if len(factors) != 1:
            return factors, rule, value, dim
        for result, dims in zip(node.results, rule.results, strict=True):
            for d, names in enumerate(dims or ()):
                if names == factors and result is not None:
                    return factors, rule, result, d
    return None
