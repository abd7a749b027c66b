"""What a plan stores, and where: all plans of a module work on one store."""

from __future__ import annotations

from collections.abc import Mapping

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Input
from shardfx.ir.spec import Spec
from shardfx.runtime.step import HELD


def stored(graph: Graph) -> Mapping[str, Spec]:
    """The stored placements of parameters, buffers and states."""
    return {g.name: g.value.spec for g in graph.inputs if g.kind in HELD and g.value.spec is not None}


def reject_stored_otherwise(first: Graph, other: Graph) -> None:
    """Refuse a plan whose programs do not find what they need where the first plan of a module stores it.

    Raises:
        Error: naming a parameter, buffer or state, and both places.
    """
    held = {given.name: given for given in first.inputs if given.kind in HELD}
    written = {output.name for output in other.outputs if output.kind.is_kept}
    for given in other.inputs:
        ours = held.get(given.name)
        if given.kind not in HELD or ours is None:
            continue
        there, here = _places(ours, first), _places(given, other)
        if ours.value.spec == given.value.spec and (here == there or (here < there and given.name not in written)):
            continue
        raise Error(
            f"{given.name!r} would be stored otherwise for this call",
            where="pm(...)",
            expected=_text(ours, first),
            got=_text(given, other),
            remedy="say in Hints(specs=...) how it is stored, and in Pipeline(stages=...) where; or parallelize the "
            "model for this call on its own, and move weights by full_state_dict()",
        )


def _places(given: Input, graph: Graph) -> frozenset[int]:
    """The coordinates along the axis of stages at which an input is held."""
    return frozenset(graph.pipeline.places(given.at) if graph.pipeline is not None else ())


def _text(given: Input, graph: Graph) -> str:
    if not given.at:
        return str(given.value.spec)
    return f"{given.value.spec} in stages {list(given.at)}, at {sorted(_places(given, graph))} along their axis"
