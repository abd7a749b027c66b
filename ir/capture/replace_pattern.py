"""Rewriting by example: where the ops of one Python function stand in a graph, put those of another.

>>> def pattern(x, y):
...     return torch.relu(x + y)
>>> def replacement(x, y):
...     return torch.clamp(x + y, min=0)
>>> matches = replace_pattern(graph, pattern, replacement)

As :func:`torch.fx.replace_pattern` has it: a function's arguments are the tensors that come in, what it returns is what
is replaced. Each call of the pattern must be one op of the graph (``x @ w`` of matrices is; ``F.linear`` is two, and
is written as ``torch.addmm(b, x, w.t())``); the replacement may be any torch code.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Node, Value, op_name
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.alike import argument_key, type_of
from shardfx.ir.rewriter import Rewriter, dead_code
from shardfx.ir.rules.book import RuleBook
from shardfx.ir.spec import TensorType

from .splice import splice, trace_function


@dataclass(frozen=True)
class Match:
    """Where a pattern stands: the values that come in, by the names of its arguments, its nodes, and what it gives."""

    inputs: Mapping[str, Value]
    nodes: tuple[Node, ...]
    outputs: tuple[Value, ...]


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
        Error: a call of the pattern is not one op of the graph, or the replacement gives other types.
    """
    wanted = _Pattern(pattern, graph.mesh)
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
        _replace(match, replacement, graph, rewriter, why or f"{_name(replacement)} in place of {_name(pattern)}")
    if not found:
        wanted.complain()
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
            f"the replacement {_name(replacement)} cannot be applied here",
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


@dataclass
class _Pattern:
    """A traced pattern, and what its calls are in the graph, by the types of their operands."""

    function: Callable[..., Any]
    mesh: Mesh
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    known: dict[Hashable, Node | None] = field(default_factory=dict)
    several: dict[fx.Node, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not inspect.isfunction(self.function):
            raise Error(
                "a pattern is no Python function",
                expected="a function or lambda whose arguments are tensors",
                got=repr(self.function),
                remedy="lambda x: torch.relu(x), say, in place of torch.relu",
            )
        traced = fx.symbolic_trace(self.function)
        self.inputs = [node for node in traced.graph.nodes if node.op == "placeholder"]
        (output,) = (node for node in traced.graph.nodes if node.op == "output")
        given = output.args[0]
        self.outputs = list(given) if isinstance(given, (list, tuple)) else [given]
        if not all(isinstance(node, fx.Node) and node.op != "placeholder" for node in self.outputs):
            raise Error("a pattern gives what it does not compute", where=_name(self.function), got=str(given))

    def match(self, node: Node) -> Match | None:
        """The match whose first output ``node`` makes, if there is one."""
        for value in node.outs:
            bound: dict[fx.Node, Value | Node] = {}
            if self._is(self.outputs[0], value, bound):
                outputs = [self._made(each, bound) for each in self.outputs]
                inputs = {str(each.target): bound.get(each) for each in self.inputs}
                nodes = _nodes(bound)
                if (
                    all(isinstance(v, Value) for v in (*outputs, *inputs.values()))
                    and len({n.phase for n in nodes}) == 1
                ):
                    return Match(inputs, nodes, tuple(outputs))  # type: ignore[arg-type]
        return None

    def _is(self, wanted: fx.Node, value: Value, bound: dict[fx.Node, Value | Node]) -> bool:
        """Whether ``value`` may be what ``wanted`` computes; what stands for what is noted in ``bound``."""
        if wanted in bound:
            return bound[wanted] is value
        bound[wanted] = value
        if wanted.op == "placeholder":
            return True
        if value.node is None:
            return False
        if wanted.target is operator.getitem:
            source, index = wanted.args
            assert isinstance(source, fx.Node)
            if source in bound:
                return bound[source] is value.node and value.index == index
            bound[source] = value.node
            return value.index == index and self._calls(source, value.node, bound)
        return len(value.node.results) == 1 and self._calls(wanted, value.node, bound)

    def _calls(self, wanted: fx.Node, node: Node, bound: dict[fx.Node, Value | Node]) -> bool:
        """Whether ``node`` is the call ``wanted``, with operands that are what the call has."""
        stands = _nodes_in(wanted)
        given = node.operands
        if len(stands) != len(given):
            return False
        types = dict(zip(stands, (value.type for value in given), strict=True))
        made = self._op(wanted, types, node)
        if made is None or made.op is not node.op or len(made.results) != len(node.results):
            return False
        if [argument_key(made.args, type_of), *_sorted(made)] != [argument_key(node.args, type_of), *_sorted(node)]:
            return False
        operands = list(types)
        pairs = zip((operands[int(value.name)] for value in made.operands), given, strict=True)
        return all(self._is(each, value, bound) for each, value in pairs)

    def _op(self, wanted: fx.Node, types: Mapping[fx.Node, TensorType], like: Node) -> Node | None:
        """The node that a call is for operands of these types (called 0, 1, ...); None where it is not one."""
        key = wanted, tuple(types.items())
        if key not in self.known:
            self.known[key] = self._make(wanted, types, like)
        return self.known[key]

    def _make(self, wanted: fx.Node, types: Mapping[fx.Node, TensorType], like: Node) -> Node | None:
        def call(*tensors: torch.Tensor) -> Any:
            given = dict(zip(types, tensors, strict=True))
            args = fx.map_arg(wanted.args, given.__getitem__)
            kwargs = fx.map_arg(wanted.kwargs, given.__getitem__)
            if wanted.op == "call_method":
                return getattr(args[0], str(wanted.target))(*args[1:], **kwargs)
            assert callable(wanted.target)
            return wanted.target(*args, **kwargs)

        values = [Value(type, None, 0, str(index)) for index, type in enumerate(types.values())]
        try:
            traced = trace_function(call, list(types.values()))
        except (RuntimeError, TypeError, IndexError, ValueError):
            return None  # operands of these types are not for this call
        nodes, _ = splice(traced, values, like=like, mesh=self.mesh)
        if len(nodes) == 1:
            self.several[wanted] = ""
        else:
            self.several.setdefault(wanted, ", ".join(op_name(node.op) for node in nodes) or "nothing")
        return nodes[0] if len(nodes) == 1 else None

    def complain(self) -> None:
        """Raise if the pattern stood nowhere because one of its calls is not one op."""
        for wanted, ops in self.several.items():
            if ops:
                raise Error(
                    "a call of a pattern is not one op of the graph",
                    where=f"{_name(self.function)}: {wanted.format_node()}",
                    expected="calls of one op each, for each stands for one node",
                    got=ops,
                    remedy="leave it out" if ops == "nothing" else "write these ops one by one",
                )

    def _made(self, wanted: fx.Node, bound: Mapping[fx.Node, Value | Node]) -> Value | Node | None:
        """What an output is, once the first one was matched; None if nothing of it hangs on that."""
        if wanted not in bound and wanted.target is operator.getitem:
            source, index = wanted.args
            assert isinstance(source, fx.Node) and isinstance(index, int)
            node = bound.get(source)
            return node.results[index] if isinstance(node, Node) else None
        return bound.get(wanted)


def _nodes(bound: Mapping[fx.Node, Value | Node]) -> tuple[Node, ...]:
    """The nodes of the graph that the pattern's calls stand for, each once."""
    made = [
        found.node if isinstance(found, Value) else found for each, found in bound.items() if each.op != "placeholder"
    ]
    return tuple(dict.fromkeys(node for node in made if node is not None))


def _nodes_in(wanted: fx.Node) -> list[fx.Node]:
    """The tensors that go into a call, in the order of its arguments, as often as they stand there."""
    found: list[fx.Node] = []
    fx.map_arg((wanted.args, wanted.kwargs), found.append)
    return found


def _sorted(node: Node) -> list[Any]:
    return sorted((key, argument_key(arg, type_of)) for key, arg in node.kwargs.items())


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _text(type: Any) -> str:
    return f"{list(type.shape)} of {type.dtype}" if isinstance(type, TensorType) else repr(type)
