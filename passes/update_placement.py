"""How the optimizer's step is placed: forward from what it is given, the parameter, its gradient and its states.

Hints do not go through it: nothing of it decides how the model computes. ``propagate`` places it as the parameters are
stored; ``zero`` once more, as their states are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from shardfx.ir.graph import Graph, Input, InputKind, Node, OutputKind, Phase, Value, substitute
from shardfx.ir.rules.as_placed import as_placed
from shardfx.ir.spec import Spec

from .rule_cache import RuleCache


@contextmanager
def update_apart(graph: Graph, cache: RuleCache) -> Iterator[None]:
    """Within, the graph is without the optimizer's step; behind, that is there again, placed as parameters are."""
    nodes = [node for node in graph.nodes if node.phase is Phase.UPDATE]
    read = {value for node in graph.nodes if node.phase is not Phase.UPDATE for value in node.operands}
    inputs = [given for given in graph.inputs if given.kind.is_of_optimizer and given.value not in read]
    outputs = [output for output in graph.outputs if output.kind.is_stepped]
    clipped = {output: output.value for output in graph.outputs if output.kind is OutputKind.GRADIENT}
    gradients = {output: as_made(value) for output, value in clipped.items()}
    if not nodes and not outputs:
        yield
        return
    for output, value in gradients.items():
        output.value = value
    apart = set(nodes)
    graph.nodes = [node for node in graph.nodes if node not in apart]
    graph.inputs = [given for given in graph.inputs if given not in inputs]
    graph.outputs = [output for output in graph.outputs if not output.kind.is_stepped]
    yield
    moved = {was: output.value for output, was in gradients.items()}

    def now(value: Value) -> Value:
        return moved.get(value, value)

    for node in nodes:
        node.args = substitute(node.args, now)
        node.kwargs = {name: substitute(arg, now) for name, arg in node.kwargs.items()}
    for output in outputs:
        output.value = now(output.value)
    for output, value in clipped.items():
        output.value = now(value)
    graph.nodes += nodes
    graph.inputs += inputs
    graph.outputs += outputs
    place_update(graph, cache, {})
    graph.rename()


def place_update(graph: Graph, cache: RuleCache, shardings: Mapping[str, Spec]) -> None:
    """Place the step of each parameter as the parameter is stored, or as ``shardings`` says of it by name.

    States of the parameter's shape lie so too; what has another shape is as the step makes it of its parameter.
    """
    parameters = {given.name: given for given in graph.of_kind(InputKind.PARAMETER)}
    seen = _given(graph, parameters, shardings)
    for given in graph.inputs:
        if given.kind.is_of_optimizer:
            like = _owner(given, parameters)
            alike = like is not None and like.value.shape == given.value.shape
            given.value.spec = seen[like.value] if alike and like is not None else Spec.whole(given.value.type.ndim)
            seen[given.value] = given.value.spec
    made = {output.name: output for output in graph.outputs if output.kind is OutputKind.STATE}
    odd = [given for given in graph.of_kind(InputKind.STATE) if given.name in made and given.value.type.ndim]
    _place(graph, cache, seen)
    for given in odd:  # of another shape than the parameter: as its new content comes out, and then all once more
        spec = made[given.name].value.spec
        assert spec is not None
        like = _owner(given, parameters)
        if like is None or like.value.shape != given.value.shape:
            given.value.spec = seen[given.value] = spec.reduced()
    _place(graph, cache, seen)
    for output in graph.outputs:
        if output.kind.is_stepped:
            output.spec = graph.input(output.name).value.spec


def _given(graph: Graph, parameters: Mapping[str, Input], shardings: Mapping[str, Spec]) -> dict[Value, Spec]:
    """How the step sees parameters and gradients."""
    found: dict[Value, Spec] = {}
    for name, given in parameters.items():
        spec = shardings.get(name) or given.value.spec
        assert spec is not None
        found[given.value] = spec
    for output in graph.outputs:
        if output.kind is OutputKind.GRADIENT and output.name in parameters:
            found[as_made(output.value)] = found[parameters[output.name].value]
    return found


def as_made(gradient: Value) -> Value:
    """A gradient before it was clipped: as the backward makes it."""
    while gradient.node is not None and gradient.node.phase is Phase.UPDATE:
        gradient = gradient.node.operands[0]
    return gradient


def _owner(given: Input, parameters: Mapping[str, Input]) -> Input | None:
    """The parameter that a state is of."""
    return parameters.get(given.name.rpartition(".")[0])


def _place(graph: Graph, cache: RuleCache, seen: dict[Value, Spec]) -> None:
    """Each node of the step as its operands are seen; its results are seen as they are made, once they are reduced."""
    for node in graph.nodes:
        if node.phase is Phase.UPDATE:
            _settle(node, cache, seen)


def _settle(node: Node, cache: RuleCache, seen: dict[Value, Spec]) -> None:
    """A value that goes in twice is needed in one way: whole, where it would be needed in two."""
    rule = cache.rule(node)
    made = as_placed(rule, node, cache.mesh, seen.get)
    needs: dict[Value, set[Spec]] = {}
    for value, spec in zip(node.operands, made.operands, strict=True):
        needs.setdefault(value, set()).add(spec)
    torn = {value: Spec.whole(value.type.ndim) for value, specs in needs.items() if len(specs) > 1}
    node.strategy = as_placed(rule, node, cache.mesh, lambda v: torn.get(v) or seen.get(v)) if torn else made
    for value, spec in zip(node.outs, node.strategy.results, strict=True):
        value.spec = spec
        seen[value] = spec.reduced()
