"""Pattern rewriting by example: the ops of one Python function in a graph are replaced by those of another.

>>> def pattern(x, y):
...     return torch.relu(x + y)
>>> def replacement(x, y):
...     return torch.clamp(x + y, min=0)
>>> matches = replace_pattern(graph, pattern, replacement)

As :func:`torch.fx.replace_pattern` has it: a function's arguments are the tensors that come in, what it returns is what
is replaced. Both may be any torch code: a call of the pattern stands for the ops that it is for the tensors at hand
(``F.linear`` of matrices for ``t`` and ``addmm``, of more dims for two views as well). The types of its operands are
sought among the values close behind its result: the call is run on ``meta`` tensors of such types, and traced where it
gives what is wanted.
"""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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


MOST_BEHIND = 16
"""The most values behind a call's result that are searched for the operands of a call of several ops."""


@dataclass(frozen=True)
class Match:
    """A match of a pattern: its input values by argument name, its nodes, and its results."""

    inputs: Mapping[str, Value]
    nodes: tuple[Node, ...]
    outputs: tuple[Value, ...]


@dataclass(frozen=True)
class _Ops:
    """The ops of a call for operands of some types, which are ``leaves``; their results are ``results``, one or
    (``several``) a list of them."""

    leaves: tuple[Value, ...]
    results: tuple[Any, ...]
    several: bool

    @property
    def is_one(self) -> bool:
        """Whether it is one op on the operands themselves."""
        makers = {value.node for value in self.results if isinstance(value, Value)}
        return len(makers) == 1 and all(n is not None and set(n.operands) <= set(self.leaves) for n in makers)


REFUSED = (RuntimeError, TypeError, IndexError, ValueError)
"""The exceptions that torch raises for invalid operands of a call."""
Bound = dict[Hashable, Any]
"""The bindings of a match: a value for each tensor of the pattern, a result for each call, a node for each op of it."""


@dataclass
class Pattern:
    """A traced pattern, and what its calls are in the graph, by the types of their operands."""

    function: Callable[..., Any]
    mesh: Mesh
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    known: dict[Hashable, _Ops | None] = field(default_factory=dict)
    gives: dict[Hashable, tuple[TensorType, ...]] = field(default_factory=dict)
    fitting: dict[Hashable, dict[TensorType, list[tuple[TensorType, ...]]]] = field(default_factory=dict)
    one_op: set[fx.Node] = field(default_factory=set)

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
        returned = output.args[0]
        self.outputs = list(returned) if isinstance(returned, (list, tuple)) else [returned]
        if not all(isinstance(node, fx.Node) and node.op != "placeholder" for node in self.outputs):
            raise Error("a pattern gives what it does not compute", where=name_of(self.function), got=str(returned))

    def match(self, node: Node) -> Match | None:
        """The match whose first output ``node`` makes, if there is one."""
        for value in node.outs:
            bound: Bound = {}
            if self._is(self.outputs[0], value, bound):
                outputs = [self._made(each, bound) for each in self.outputs]
                inputs = {str(each.target): bound.get(each) for each in self.inputs}
                nodes = tuple(dict.fromkeys(each for each in bound.values() if isinstance(each, Node)))
                full = all(isinstance(each, Value) for each in (*outputs, *inputs.values()))
                if full and len({each.phase for each in nodes}) == 1:
                    return Match(inputs, nodes, tuple(outputs))  # type: ignore[arg-type]
        return None

    def _is(self, wanted: fx.Node, value: Value, bound: Bound) -> bool:
        """Whether ``value`` may be what ``wanted`` computes; what stands for what is noted in ``bound``."""
        if wanted in bound:
            return bound[wanted] is value
        if wanted.op == "placeholder":
            bound[wanted] = value
            return True
        call, index = _call_of(wanted)
        if call in bound:
            bound[wanted] = value
            return index is not None and bound[call][index] is value
        return any(self._stands(call, index, made, value, bound, wanted) for made in self._forms(call, value, bound))

    def _stands(
        self, call: fx.Node, index: int | None, made: _Ops, value: Value, bound: Bound, wanted: fx.Node
    ) -> bool:
        """Whether ``value`` is a result of these ops of a call; then ``bound`` has all that is behind it."""
        if made.several != (index is not None) or (index or 0) >= len(made.results):
            return False
        image: dict[Any, Any] = {}
        if not _covers(made.results[index or 0], value, image) or any(leaf not in image for leaf in made.leaves):
            return False
        trial: Bound = dict(bound)
        trial[wanted] = value
        trial.update(((call, op), node) for op, node in image.items() if isinstance(op, Node))
        if index is not None:
            trial[call] = [_image(each, image) for each in made.results]
        operands = zip(_operands(call), made.leaves, strict=True)
        if not all(self._is(each, image[leaf], trial) for each, leaf in operands):
            return False
        bound.update(trial)
        return True

    def _forms(self, call: fx.Node, value: Value, bound: Bound) -> Iterator[_Ops]:
        """What a call that ends in ``value`` may be: by the types of its operands, which stand close behind it."""
        node, operands = value.node, _operands(call)
        if node is None:
            return
        for values in (node.operands, list(dict.fromkeys(node.operands))):
            if len(values) == len(operands):
                yield from self._ops(call, tuple(each.type for each in values), node)
        if call not in self.one_op:
            near = tuple(dict.fromkeys(each.type for each in _behind(value)))
            known = (bound.get(each) for each in operands)
            choices = tuple((each.type,) if isinstance(each, Value) else near for each in known)
            for types in self._fitting(call, choices).get(value.type, ()):
                yield from self._ops(call, types, node)

    def _fitting(
        self, call: fx.Node, choices: tuple[tuple[TensorType, ...], ...]
    ) -> Mapping[TensorType, list[tuple[TensorType, ...]]]:
        """The operand types that give each result type, of those that may be chosen for each operand."""
        found = self.fitting.get((call, choices))
        if found is None:
            found = self.fitting[call, choices] = {}
            for types in itertools.product(*choices):
                for each in self._gives(call, types):
                    found.setdefault(each, []).append(types)
        return found

    def _gives(self, call: fx.Node, types: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
        """The types of a call's results; none where it takes no such operands."""
        if (call, types) not in self.gives:
            tensors = [torch.empty(type.shape, dtype=type.dtype, device="meta") for type in types]
            try:
                made = _run(call, tensors)
            except REFUSED:
                made = ()
            results = made if isinstance(made, (list, tuple)) else [made]
            result_types = (TensorType(tuple(t.shape), t.dtype) for t in results if isinstance(t, torch.Tensor))
            self.gives[call, types] = tuple(dict.fromkeys(result_types))
        return self.gives[call, types]

    def _ops(self, call: fx.Node, types: tuple[TensorType, ...], like: Node) -> Iterator[_Ops]:
        """The ops that a call is for operands of these types; nothing where it takes no such operands."""
        if (call, types) not in self.known:
            self.known[call, types] = self._trace(call, types, like)
        made = self.known[call, types]
        if made is not None:
            self.one_op.update([call] if made.is_one else ())
            yield made

    def _trace(self, wanted: fx.Node, types: tuple[TensorType, ...], like: Node) -> _Ops | None:
        several = False

        def call(*tensors: torch.Tensor) -> Any:
            nonlocal several
            result = _run(wanted, tensors)
            several = isinstance(result, (list, tuple))
            return list(result) if several else result

        leaves = tuple(Value(type, None, 0, str(index)) for index, type in enumerate(types))
        try:
            traced = trace_function(call, types)
        except REFUSED:
            return None  # operands of these types are not for this call
        _, results = splice(traced, leaves, like=like, mesh=self.mesh)
        return _Ops(leaves, tuple(results), several)

    def _made(self, wanted: fx.Node, bound: Bound) -> Value | None:
        """The value of an output, once the first one was matched; None if nothing of it depends on that."""
        call, index = _call_of(wanted)
        found = bound.get(wanted)
        if found is None and index is not None and call in bound:
            found = bound[call][index]
        return found if isinstance(found, Value) else None


def _run(call: fx.Node, tensors: Sequence[torch.Tensor]) -> Any:
    """The result of a call of the pattern for these operands."""
    values = dict(zip(_operands(call), tensors, strict=True))
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


def _behind(value: Value) -> list[Value]:
    """The values close behind one, and the value itself: what a call takes stands among them."""
    found = [value]
    for each in found:
        if len(found) < MOST_BEHIND and each.node is not None:
            found += [operand for operand in each.node.operands if operand not in found]
    return found


def _call_of(wanted: fx.Node) -> tuple[fx.Node, int | None]:
    """The call that gives a tensor, and as which of several results."""
    if wanted.target is not operator.getitem or not isinstance(wanted.args[1], int):
        return wanted, None
    call, index = wanted.args
    assert isinstance(call, fx.Node) and isinstance(index, int)
    return call, index


def _operands(wanted: fx.Node) -> list[fx.Node]:
    """The tensors that go into a call, each once, in the order of its arguments."""
    found: dict[fx.Node, None] = {}
    fx.map_arg((wanted.args, wanted.kwargs), found.setdefault)
    return list(found)


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
