"""Placement of the optimizer's step: propagated from the parameter, its gradient and its states.

Hints do not go through it: nothing of it decides how the model computes. ``propagate`` places it as the parameters are
stored; ``zero`` once more, as their states are.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping

from shardfx.ir.graph import Graph, InputKind, OutputKind, Phase, Value
from shardfx.ir.program.store_layout import as_made
from shardfx.ir.rules.strategy import as_placed
from shardfx.ir.spec import Spec

from .base import RuleCache


def place_update(graph: Graph, cache: RuleCache, stored: Mapping[str, Spec]) -> None:
    """Place the step of each parameter as the parameter is stored, or as ``stored`` says of it by name.

    States of the parameter's shape are placed so too; what has another shape is as the step makes it of its parameter.
    """
    parameters = {inp.name: inp for inp in graph.of_kind(InputKind.PARAMETER)}
    seen: dict[Value, Spec] = {}
    for name, inp in parameters.items():
        spec = stored.get(name) or inp.value.spec
        assert spec is not None
        seen[inp.value] = spec
    for output in graph.outputs:
        if output.kind is OutputKind.GRADIENT and output.name in parameters:
            seen[as_made(output.value)] = seen[parameters[output.name].value]
    made = {output.name: output.value for output in graph.outputs if output.kind is OutputKind.STATE}
    odd: dict[Value, Value] = {}
    """New contents of states of another shape."""
    for inp in graph.inputs:
        if inp.kind.is_of_optimizer:
            owner = parameters.get(inp.name.rpartition(".")[0])
            like = owner.value if owner is not None and owner.value.shape == inp.value.shape else None
            spec = seen[like] if like is not None else Spec.replicated(inp.value.type.ndim)
            inp.value.spec = seen[inp.value] = spec
            if like is None and inp.kind is InputKind.STATE and inp.name in made and inp.value.type.ndim:
                odd[inp.value] = made[inp.name]
    _place(graph, cache, seen)
    for value, new in odd.items():  # as their new content comes out, and then all once more
        assert new.spec is not None
        value.spec = seen[value] = new.spec.reduced()
    _place(graph, cache, seen)
    for output in graph.outputs:
        if output.kind.is_stepped:
            output.spec = graph.input(output.name).value.spec


def _place(graph: Graph, cache: RuleCache, seen: dict[Value, Spec]) -> None:
    """Place each node of the step as its operands are seen; its results are seen as they are made, once reduced. A
    value that goes in twice is needed in one way: replicated, where it would be needed in two."""
    for node in (node for node in graph.nodes if node.phase is Phase.UPDATE):
        rule, needs = cache.rule(node), dict[Value, set[Spec]]()
        node.strategy = as_placed(rule, node, cache.mesh, seen.get)
        for value, spec in zip(node.operands, node.strategy.operands, strict=True):
            needs.setdefault(value, set()).add(spec)
        both = {value: Spec.replicated(value.type.ndim) for value, specs in needs.items() if len(specs) > 1}
        if both:
            node.strategy = as_placed(rule, node, cache.mesh, ChainMap(both, seen).get)
        for value, spec in zip(node.outs, node.strategy.results, strict=True):
            value.spec = spec
            seen[value] = spec.reduced()
