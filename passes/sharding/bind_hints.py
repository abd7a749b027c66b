"""bind-hints: the user's hints, written onto the values of the graph.

Names are those of ``named_parameters()``, ``args.N``, ``kwargs.NAME``, ``targets.N``, and a module's path for its
output; ``*`` is one part of a name, ``**`` any. A spec is text (``"dp tp, -"``), a :class:`Spec`, or DTensor
placements, one per mesh axis. Text and placements say which dims are sharded, and a fused parameter is then stored by
its parts; a :class:`Spec`, as a plan has it, says how a parameter is stored, and wins over them.

    before   parameter %qkv.weight : f32[192, 64]                   hints: "qkv.weight": "tp, dp"
    after    parameter %qkv.weight : f32[(3 64{tp}), 64{dp}] hint [(3 64{tp}), 64] "qkv.weight"

Hints on ops (``Hints(strategies=...)``) are written onto nodes by :mod:`.op_hints`. An axis that shards the leading dim
of an input is a data axis (see :mod:`.seeds`): on a parameter it is storage.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from shardfx.ir.dim_sharding import DimSharding, Part, compound, project
from shardfx.ir.errors import Error, did_you_mean
from shardfx.ir.graph import Graph, InputKind, Node, Phase, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.names import module_outputs, pattern
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.spec import Spec
from shardfx.passes.base import HINTED, Pass, PassContext, RuleCache
from shardfx.passes.context_parallel import Context, in_stripes
from shardfx.passes.expert_parallel import Experts, experts_of, replicate_own

from .op_hints import pin_nodes
from .seeds import BY_PASS, as_used, data_axes

MOST_STEPS = 12
"""A dim is followed through so many ops."""


@dataclass(frozen=True)
class BindHints(Pass):
    """Write the user's hints onto the values and nodes that they name: on a parameter as it computes, and is stored."""

    name: ClassVar[str] = "bind-hints"
    establishes: ClassVar[frozenset[str]] = frozenset({HINTED})

    def run(self, graph: Graph, context: PassContext) -> bool:
        bound = named_values(graph, context)
        data = {inp.value for inp in graph.inputs if inp.kind in (InputKind.ARGUMENT, InputKind.TARGET)}
        for value, (spec, name) in bound.items():
            plain = value in data and isinstance(context.specs[name], str)
            value.hint = in_stripes(graph, value.shape, spec, context.specs) if plain else spec
            value.hinted_by = name
        parameters = [inp.value for inp in graph.of_kind(InputKind.PARAMETER) if inp.value in bound]
        exact = {value for value in parameters if isinstance(context.specs[bound[value][1]], Spec)}
        store(graph, parameters, context, exact)
        replicate_own(graph, {value: context.specs[text] for value, (_, text) in bound.items()})
        return pin_nodes(graph, context) or bool(bound)


def store(graph: Graph, parameters: Iterable[Value], context: PassContext, exact: Container[Value]) -> None:
    """Split the hints of parameters into stored placements (of a fused one by its parts), and compute placements.

    Args:
        exact: those that are stored as hinted, by parts or not.

    Raises:
        Error: a parameter is sharded over a loop axis.
    """
    data, users, mesh = data_axes(graph), graph.users(), graph.mesh
    for value in parameters:
        assert value.hint is not None
        for axis in (axis for axis in value.hint.axes if mesh[axis].loop):
            raise Error(
                f"a parameter is sharded over {axis!r}, a loop axis",
                where=f"hint {value.hinted_by!r}",
                expected="axes of ranks: each rank has what it stores in all iterations",
                got=str(value.hint),
                remedy=f"shard an input, or the output of a module, over {axis!r}",
            )
        layouts = list(value.hint.dims)
        for d, sharding in enumerate(layouts) if value not in exact else ():
            layouts[d] = fused_layout(value, d, sharding, set(sharding.axes) - data, context.cache, users)
        value.spec = Spec(tuple(layouts))
        value.hint = as_used(value.spec, data, value, mesh)


def hint_value(graph: Graph, value: Value, spec: Any, by: Pass, context: PassContext) -> bool:
    """Hint a value on behalf of a pass before ``propagate``; False if it has a hint, which stands.

    Args:
        spec: as in ``Hints(specs=...)``: text such as ``"tp, -"``, a :class:`Spec`, or DTensor placements.

    Raises:
        Error: the spec does not fit the value or the mesh.

    Example::

        hint_value(graph, graph.input("head.weight").value, "tp, -", self, context)
    """
    if value.hint is not None:
        return False
    value.hinted_by = f"{BY_PASS}{by.name}"
    value.hint = as_spec(spec, graph.mesh, value.type.ndim, value.name)
    if any(inp.value is value for inp in graph.of_kind(InputKind.PARAMETER)):
        store(graph, [value], context, {value} if isinstance(spec, Spec) else ())
    return True


def named_values(graph: Graph, context: PassContext) -> dict[Value, tuple[Spec, str]]:
    """The user's hint of each value.

    Raises:
        Error: a pattern matches nothing, two hints disagree, an axis is unknown or used twice, ...
    """
    inputs = {inp.name: inp for inp in graph.inputs if not inp.kind.is_of_optimizer}
    names = {name: known for name, known in graph.aliases.items() if known in inputs}
    modules = module_outputs(graph)
    bound: dict[Value, tuple[Spec, str]] = {}
    for text, hint in context.specs.items():
        if isinstance(hint, Context):
            continue  # of an op: see context-parallel
        matches = pattern(text).fullmatch
        hits = {names[n]: inputs[names[n]].value for n in names if matches(n)}
        values = list(hits.values()) or [v for m, vs in modules.items() if matches(m) for v in vs]
        own = experts_of(graph, text, hint) if isinstance(hint, Experts) else {}
        values = list(own) or values
        if not values:
            raise Error(
                f"hint {text!r} matches nothing",
                where="Hints(specs=...)",
                expected="a name of a parameter, args.N, kwargs.NAME, targets.N or a module's path",
                got=text,
                remedy=did_you_mean(text, [*names, *modules], "see model.named_parameters()", count=3),
            )
        for value in values:
            spec = as_spec(own.get(value, hint), graph.mesh, value.type.ndim, text)
            parts = [(each.parts, n) for each, n in zip(spec.dims, value.shape, strict=True) if each.parts]
            if any(math.prod(part.size for part in each) != n for each, n in parts):
                expected, got = "parts that make up each dim", f"{spec} of {list(value.shape)}"
                raise Error("a spec is of another size", where=f"hint {text!r}", expected=expected, got=got)
            other, by = bound.get(value, (spec, text))
            is_exact, was_exact = isinstance(hint, Spec), isinstance(context.specs[by], Spec)
            if other != spec and is_exact == was_exact:
                raise Error(
                    f"two hints disagree on {value!r}",
                    where=f"hints {by!r} and {text!r}",
                    expected="one spec per value",
                    got=f"{other} and {spec}",
                    remedy="make the patterns narrower",
                )
            bound[value] = (other, by) if was_exact and not is_exact else (spec, text)
    return bound


def as_spec(hint: Any, mesh: Mesh, ndim: int, name: str) -> Spec:
    """A user's spec in any of its forms, as a :class:`Spec`, checked against the mesh and the number of dims."""
    where = f"hint {name!r}"
    if isinstance(hint, str):
        spec = Spec.parse(hint, mesh, ndim, where=where)
    elif isinstance(hint, Spec):
        spec = hint
    elif isinstance(hint, (list, tuple)) and hint and all(hasattr(each, "is_replicate") for each in hint):
        spec = _from_placements(hint, mesh, ndim, where)
    else:
        expected = "text such as 'dp, -', a Spec, or a sequence of DTensor placements"
        raise Error("a hint is of no known form", where=where, expected=expected, got=repr(hint))
    if len(spec.dims) != ndim:
        raise Error("a spec does not have one entry per dim", where=where, expected=f"{ndim} dims", got=str(spec))
    if spec.partial:
        expected = "sharded or replicated dims"
        raise Error("a hint cannot ask for a partial value", where=where, expected=expected, got=str(spec))
    return spec


def _from_placements(args: Sequence[Any], mesh: Mesh, ndim: int, where: str) -> Spec:
    """A spec from DTensor placements, one per axis of ranks; DTensor itself is not imported, as most hints have
    none."""
    if len(args) != len(mesh.space):
        expected = f"{len(mesh.space)} placements, for {', '.join(a.name for a in mesh.space)}"
        raise Error("there is not one placement per mesh axis", where=where, expected=expected, got=len(args))
    axes: list[tuple[str, ...]] = [()] * ndim
    for axis, placement in zip(mesh.space, args, strict=True):
        if placement.is_shard():
            axes[placement.dim % ndim] = (*axes[placement.dim % ndim], axis.name)
        elif not placement.is_replicate():
            raise Error("a hint takes Shard and Replicate only", where=where, got=repr(placement))
    return Spec(tuple(DimSharding(a) for a in axes))


def fused_layout(
    value: Value,
    dim: int,
    sharding: DimSharding,
    axes: set[str],
    rules: RuleCache,
    users: Mapping[Value, list[Node]],
) -> DimSharding:
    """The stored sharding of a dim whose hint is ``sharding``; ``axes`` are those of it that shard ops.

    Follows the dim to the first op that splits it (a split, a view); where the plain sharding does not survive that,
    but one of a part does, each rank stores its share of every part: ``3 * 64`` rows of q, k and v sharded over heads
    are ``(3 64{tp})``.
    """
    size, at = value.shape[dim], dim
    for _ in range(MOST_STEPS if axes else 0):
        step = _follow(value, at, rules, users)
        if step is None:
            return sharding
        factors, rule, value, at = step
        if len(factors) == 1:
            continue
        sizes = rule.dim_sizes(factors)
        plain = project(sharding, size, sizes, rules.mesh)
        if plain is not None and not any(c.axes and f in rule.replicated for f, c in zip(factors, plain, strict=True)):
            return sharding
        extent = rules.mesh.extent(sharding.axes)
        for i, factor in enumerate(factors):
            if factor not in rule.replicated and sizes[i] % extent == 0:
                return compound([Part(s, sharding.axes if j == i else ()) for j, s in enumerate(sizes)], rules.mesh)
        return sharding
    return sharding


def _follow(
    value: Value, dim: int, rules: RuleCache, users: Mapping[Value, list[Node]]
) -> tuple[tuple[str, ...], ShardingRule, Value, int] | None:
    """The next forward value that has the dim, its index there, and its factors on the way."""
    for node in users[value]:
        if node.phase is not Phase.FORWARD:
            continue
        rule = rules.rule(node)
        factors = rule.operands[node.operands.index(value)][dim]
        if len(factors) != 1:
            return factors, rule, value, dim
        for result, dims in zip(node.results, rule.results, strict=True):
            for d, names in enumerate(dims or ()):
                if names == factors and result is not None:
                    return factors, rule, result, d
    return None
