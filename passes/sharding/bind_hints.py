"""bind-hints: the user's hints, written onto the values of the graph.

Names are those of ``named_parameters()``, ``args.N``, ``kwargs.NAME``, ``targets.N``, and a module's path for its
output; ``*`` stands for one part of a name, ``**`` for any. A spec is text (``"dp tp, -"``), a :class:`Spec`, or
DTensor placements, one per mesh axis. Text and placements say which dims are sharded, and a fused parameter is then
stored by its parts; a :class:`Spec`, as a plan has it, says how a parameter is stored, and wins over them.

    before   parameter %qkv.weight : f32[192, 64]                   hints: "qkv.weight": "tp, dp"
    after    parameter %qkv.weight : f32[(3 64{tp}), 64{dp}] hint [(3 64{tp}), 64] "qkv.weight"

Hints on ops (``Hints(strategies=...)``) are written onto nodes by :mod:`.bind_strategies`. An axis that shards the
leading dim of an input is a data axis (see :mod:`.seeds`): on a parameter it is storage.
"""

from __future__ import annotations

import difflib
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from shardfx.ir.dim_sharding import DimSharding
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, InputKind, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.names import module_outputs, pattern
from shardfx.ir.spec import Spec
from shardfx.passes.base import HINTED, Context, Pass

from .bind_strategies import pin_nodes
from .fused_layout import fused_layout
from .seeds import BY_PASS, as_used, data_axes

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class BindHints(Pass):
    """Write the user's hints onto the values and nodes that they name: on a parameter as it computes, and is stored."""

    name: ClassVar[str] = "bind-hints"
    establishes: ClassVar[frozenset[str]] = frozenset({HINTED})

    def run(self, graph: Graph, context: Context) -> bool:
        bound = named_values(graph, context)
        for value, (spec, name) in bound.items():
            value.hint, value.hinted_by = spec, name
        parameters = [given.value for given in graph.of_kind(InputKind.PARAMETER) if given.value in bound]
        exact = {value for value in parameters if isinstance(context.specs[bound[value][1]], Spec)}
        store(graph, parameters, context, exact)
        return pin_nodes(graph, context) or bool(bound)


def store(graph: Graph, parameters: Iterable[Value], context: Context, exact: Container[Value]) -> None:
    """Take the hints of parameters apart: how each is stored (a fused one by its parts), and how it computes.

    Args:
        exact: those that are stored as hinted, by parts or not.
    """
    data, users, mesh = data_axes(graph), graph.users(), graph.mesh
    for value in parameters:
        assert value.hint is not None
        check_stored(value, mesh)
        layouts = list(value.hint.dims)
        for d, sharding in enumerate(layouts) if value not in exact else ():
            layouts[d] = fused_layout(value, d, sharding, set(sharding.axes) - data, context.cache, users, mesh)
        value.spec = Spec(tuple(layouts))
        value.hint = as_used(value.spec, data, value, mesh)


def check_stored(value: Value, mesh: Mesh) -> None:
    """What is stored is stored by ranks.

    Raises:
        Error: a parameter is sharded over a loop axis.
    """
    over = [axis for axis in value.hint.axes if mesh[axis].loop] if value.hint is not None else []
    if over:
        raise Error(
            f"a parameter is sharded over {over[0]!r}, a loop axis",
            where=f"hint {value.hinted_by!r}",
            expected="axes of ranks: each rank has what it stores in all iterations",
            got=str(value.hint),
            remedy=f"sharded an input, or the output of a module, over {over[0]!r}",
        )


def hint_value(graph: Graph, value: Value, spec: Any, by: Pass, context: Context) -> bool:
    """Hint a value on behalf of a pass that stands before ``propagate``; False if it has a hint, which stays.

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
    if any(given.value is value for given in graph.of_kind(InputKind.PARAMETER)):
        store(graph, [value], context, {value} if isinstance(spec, Spec) else ())
    return True


def named_values(graph: Graph, context: Context) -> dict[Value, tuple[Spec, str]]:
    """What the user's hints say of each value.

    Raises:
        Error: a pattern matches nothing, two hints disagree, an axis is unknown or used twice, ...
    """
    inputs = {given.name: given for given in graph.inputs if not given.kind.is_of_optimizer}
    names = {name: known for name, known in graph.aliases.items() if known in inputs}
    modules = module_outputs(graph)
    bound: dict[Value, tuple[Spec, str]] = {}
    for text, given in context.specs.items():
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
            spec = as_spec(given, graph.mesh, value.type.ndim, text)
            other, by = bound.get(value, (spec, text))
            is_exact, was_exact = isinstance(given, Spec), isinstance(context.specs[by], Spec)
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
    """A user's spec of any of its forms, checked against the mesh and the number of dims."""
    where = f"hint {name!r}"
    if isinstance(hint, str):
        spec = Spec.parse(hint, mesh, ndim, where=where)
    elif isinstance(hint, Spec):
        spec = hint
    elif isinstance(hint, (list, tuple)) and hint and all(is_placement(p) for p in hint):
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
        raise Error(
            "a hint cannot ask for a partial value", where=where, expected="sharded or whole dims", got=str(spec)
        )
    return spec


def is_placement(given: object) -> bool:
    """Whether something is a placement of DTensor's."""
    from torch.distributed.tensor.placement_types import Placement  # all of DTensor, which most hints do not need

    return isinstance(given, Placement)


def from_placements(placements: Iterable[Placement], mesh: Mesh, ndim: int, where: str) -> Spec:
    """DTensor placements, one per axis of ranks, as a spec."""
    from torch.distributed.tensor.placement_types import Replicate, Shard

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
    return Spec(tuple(DimSharding(a) for a in axes))
