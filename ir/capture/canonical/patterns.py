"""Pattern rewriting by example: the ops of one Python function in a graph are replaced by those of another.

>>> def pattern(x, y):
...     return torch.relu(x + y)
>>> def replacement(x, y):
...     return torch.clamp(x + y, min=0)
>>> matches = replace_pattern(graph, pattern, replacement)

As :func:`torch.fx.replace_pattern` has it: a function's arguments are the tensors that come in, what it returns is what
is replaced. Both may be any torch code: a call of the pattern stands for the ops that it is for the tensors at hand
(``F.linear`` of matrices for ``t`` and ``addmm``, of more dims for two views as well). The types of its arguments are
sought among the values close behind its result: the pattern is run on ``meta`` tensors of such types, and traced where
it gives what is wanted.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardfx.ir.builder import GraphBuilder, trace_on_meta
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Node, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.alike import argument_key, type_of
from shardfx.ir.rewriter import Rewriter, dead_code
from shardfx.ir.rules.book import RuleBook
from shardfx.ir.spec import TensorType

from .canonical_ops import convert_call


def replace_pattern(
    graph: Graph,
    pattern: Callable[..., Any],
    replacement: Callable[..., Any],
    rules: RuleBook | None = None,
    *,
    why: str = "",
) -> list[Match]:
    """Put ``replacement`` wherever ``pattern`` stands in ``graph``; gives the places, in order.

    What something else uses of the pattern's inner values is still computed. Ops of one match are of one phase.

    Args:
        rules: the op rules, to place the new nodes in a graph that is placed already.

    Raises:
        Error: the pattern is no function of tensors, or the replacement gives other types.
    """
    wanted = Pattern(pattern, graph.mesh)
    found: list[Match] = []
    rewriter = Rewriter(graph, rules)
    used: set[Node] = set()
    order = {node: position for position, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        match = wanted.match(node)
        if match is None or used & set(match.nodes) or not _can_stand(match, order):
            continue
        used.update(match.nodes)
        found.append(match)
        _replace(match, replacement, graph, rewriter, why or f"{name_of(replacement)} in place of {name_of(pattern)}")
    if rewriter.apply():
        dead_code(graph)
    graph.rename()
    return found


def _can_stand(match: Match, order: Mapping[Node, int]) -> bool:
    """Whether all that comes in is made before the first of what the pattern gives."""
    first = min(order[value.node] for value in match.outputs if value.node is not None)
    return all(value.node is None or order[value.node] < first for value in match.inputs.values())


def _replace(match: Match, replacement: Callable[..., Any], graph: Graph, rewriter: Rewriter, why: str) -> None:
    makers = [value.node for value in match.outputs if value.node is not None]
    anchor = next(node for node in match.nodes if node in makers)
    values = list(match.inputs.values())
    try:
        traced = trace_function(replacement, [value.type for value in values])
    except (RuntimeError, TypeError, IndexError, ValueError) as error:
        raise Error(
            f"the replacement {name_of(replacement)} cannot be applied here",
            where=str(anchor.where),
            expected=f"a function of {', '.join(_text(value.type) for value in values)}",
            got=f"{type(error).__name__}: {error}",
        ) from error
    made, results = splice(traced, values, like=anchor, mesh=graph.mesh)
    types = [value.type if isinstance(value, Value) else value for value in results]
    if types != [value.type for value in match.outputs]:
        expected = ", ".join(_text(value.type) for value in match.outputs)
        got = ", ".join(_text(type) for type in types)
        raise Error("the replacement gives other types", where=str(anchor.where), expected=expected, got=got)
    for node in made:
        node.why = why
        rewriter.place(node)
        rewriter.before(anchor, node)
    for old, new in zip(match.outputs, results, strict=True):
        if new.hint is None and new.node in made:
            new.hint, new.hinted_by = old.hint, old.hinted_by
        rewriter.replace(old, new)
    for maker in dict.fromkeys(makers):
        if set(maker.outs) <= set(match.outputs):
            rewriter.erase(maker)


def _text(type: Any) -> str:
    return f"{list(type.shape)} of {type.dtype}" if isinstance(type, TensorType) else repr(type)


NEAR = 16
"""The values behind a result whose types the inputs of a pattern may have: so many for each of its calls."""


@dataclass(frozen=True)
class Match:
    """A match of a pattern: its input values by argument name, its nodes, and its results."""

    inputs: Mapping[str, Value]
    nodes: tuple[Node, ...]
    outputs: tuple[Value, ...]


REFUSED = (RuntimeError, TypeError, IndexError, ValueError)
"""The exceptions that torch raises for invalid operands of a call."""
Types = tuple[TensorType, ...]


class Pattern:
    """A function whose ops are sought in a graph: traced for the input types that give a result's type."""

    def __init__(self, function: Callable[..., Any], mesh: Mesh) -> None:
        if not inspect.isfunction(function):
            raise Error(
                "a pattern is no Python function",
                expected="a function or lambda whose arguments are tensors",
                got=repr(function),
                remedy="lambda x: torch.relu(x), say, in place of torch.relu",
            )
        self.function, self.mesh = function, mesh
        traced = fx.symbolic_trace(function)
        self.names = [str(node.target) for node in traced.graph.nodes if node.op == "placeholder"]
        *self._calls, output = (node for node in traced.graph.nodes if node.op != "placeholder")
        returned = output.args[0]
        outputs = list(returned) if isinstance(returned, (list, tuple)) else [returned]
        if not all(isinstance(node, fx.Node) and node.op != "placeholder" for node in outputs):
            raise Error("a pattern gives what it does not compute", where=name_of(function), got=str(returned))
        self._places = [node for node in traced.graph.nodes if node.op == "placeholder"]
        self._first: fx.Node = outputs[0]
        self._typings: dict[tuple[Types, TensorType], list[Types]] = {}
        self._traced: dict[Types, tuple[list[Value], list[Any]]] = {}

    def match(self, node: Node) -> Match | None:
        """The match whose first output ``node`` makes, if there is one."""
        for value in node.outs:
            near = tuple(dict.fromkeys(each.type for each in _behind(value, NEAR * len(self._calls))))
            if (near, value.type) not in self._typings:
                self._typings[near, value.type] = [*self._fitting(near, value.type, self._calls, {})]
            for types in self._typings[near, value.type]:
                if (found := self._covered(types, value)) is not None:
                    return found
        return None

    def _fitting(
        self, near: Types, wanted: TensorType, calls: Sequence[fx.Node], known: Mapping[fx.Node, Any]
    ) -> Iterator[Types]:
        """The types of inputs for which the first output is of a type, found call by call on ``meta`` tensors."""
        if not calls:
            made = known[self._first]
            if isinstance(made, torch.Tensor) and _type_of(made) == wanted and known.keys() >= {*self._places}:
                yield tuple(_type_of(known[each]) for each in self._places)
            return
        open_ = [each for each in dict.fromkeys(calls[0].all_input_nodes) if each not in known]
        for types in itertools.product(near, repeat=len(open_)):
            tensors = (torch.empty(each.shape, dtype=each.dtype, device="meta") for each in types)
            values = {**known, **dict(zip(open_, tensors, strict=True))}
            try:
                values[calls[0]] = _run(calls[0], values)
            except REFUSED:
                continue  # operands of these types are not for this call
            yield from self._fitting(near, wanted, calls[1:], values)

    def _covered(self, types: Types, value: Value) -> Match | None:
        """The match that ends in ``value``, where that is computed as the pattern computes of such inputs."""
        if types not in self._traced:
            leaves = [Value(type, None, 0, name) for type, name in zip(types, self.names, strict=True)]
            assert value.node is not None
            traced = trace_function(self.function, types)
            self._traced[types] = leaves, splice(traced, leaves, like=value.node, mesh=self.mesh)[1]
        leaves, results = self._traced[types]
        image: dict[Any, Any] = {}
        if not _covers(results[0], value, image) or any(leaf not in image for leaf in leaves):
            return None
        outputs = tuple(each for result in results if (each := _image(result, image)) is not None)
        nodes = tuple(each for each in image.values() if isinstance(each, Node))
        if len(outputs) < len(results) or len({each.phase for each in nodes}) > 1:
            return None
        return Match(dict(zip(self.names, map(image.__getitem__, leaves), strict=True)), nodes, outputs)


def _type_of(tensor: torch.Tensor) -> TensorType:
    return TensorType(tuple(tensor.shape), tensor.dtype)


def _run(call: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """The result of a call of the pattern for these operands."""
    args, kwargs = fx.map_arg((call.args, call.kwargs), values.__getitem__)
    run: Any = getattr(type(args[0]), str(call.target)) if call.op == "call_method" else call.target
    return run(*args, **kwargs)


def _covers(made: Any, value: Value, image: dict[Any, Any]) -> bool:
    """Whether ``value`` is computed as ``made`` is; ``image`` then has what stands for each value and op behind it."""
    if made in image:
        return image[made] is value
    if not isinstance(made, Value) or made.type != value.type:
        return False
    image[made] = value
    op, node = made.node, value.node
    if op is None:
        return True
    if node is None or op.op is not node.op or made.index != value.index or image.setdefault(op, node) is not node:
        return False
    if len(op.results) != len(node.results) or len(op.operands) != len(node.operands):
        return False
    if [argument_key(op.args, type_of), *_sorted(op)] != [argument_key(node.args, type_of), *_sorted(node)]:
        return False
    return all(_covers(a, b, image) for a, b in zip(op.operands, node.operands, strict=True))


def _image(made: Any, image: Mapping[Any, Any]) -> Value | None:
    """The image of a call's result: the same result of the matched node."""
    node = image.get(made.node) if isinstance(made, Value) else None
    found = node.results[made.index] if isinstance(node, Node) else image.get(made)
    return found if isinstance(found, Value) else None


def _behind(value: Value, most: int) -> list[Value]:
    """The values close behind one, and the value itself."""
    found = [value]
    for each in found:
        if len(found) < most and each.node is not None:
            found += [operand for operand in each.node.operands if operand not in found]
    return found


def _sorted(node: Node) -> list[Any]:
    return sorted((key, argument_key(arg, type_of)) for key, arg in node.kwargs.items())


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function."""
    return getattr(function, "__name__", type(function).__name__)


def trace_function(function: Callable[..., Any], types: Sequence[TensorType]) -> torch.fx.GraphModule:
    """The aten ops of ``function`` on tensors of these types, traced on ``meta``."""
    traced = trace_on_meta(function, types)
    for made in traced.graph.nodes:
        if made.kwargs.get("device") == torch.device("meta"):  # where it was traced, not where it will run
            made.kwargs = {**made.kwargs, "device": torch.device("cpu")}
    return traced


def splice(
    traced: torch.fx.GraphModule, values: Sequence[Value], *, like: Node, mesh: Mesh
) -> tuple[list[Node], list[Any]]:
    """The nodes of a traced function applied to ``values``, which are in no graph yet, and its results.

    Phase, source and stage are those of ``like``.

    Raises:
        Error: the function holds a constant tensor, or draws random numbers.
    """
    builder = GraphBuilder(mesh)
    builder.where, builder.phase = like.where, like.phase
    remaining = iter(values)
    results: Any = None
    for each in traced.graph.nodes:
        if each.op == "placeholder":
            builder.env[each] = next(remaining)
        elif each.op == "call_function":
            builder.env[each] = convert_call(builder, each)
        elif each.op == "get_attr":
            raise Error("a function that stands for an op holds a constant tensor", where=str(like.where))
        else:
            results = torch.fx.map_arg(each.args[0], builder.env.__getitem__)
    if builder.graph.inputs:
        raise Error("a function that stands for an op draws random numbers", where=str(like.where))
    given_back = list(results) if isinstance(results, (list, tuple)) else [results]
    read = {value for made in builder.graph.nodes for value in made.operands}.union(
        each for each in given_back if each is not None
    )
    for made in builder.graph.nodes:
        made.at = like.at
        if len(made.results) > 1:  # kernels differ in what they make of a result that nobody reads
            made.results = [value if value in read else None for value in made.results]
    return builder.graph.nodes, given_back
