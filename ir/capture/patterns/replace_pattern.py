"""Rewriting by example: where the ops of one Python function stand in a graph, put those of another.

>>> def pattern(x, y):
...     return torch.relu(x + y)
>>> def replacement(x, y):
...     return torch.clamp(x + y, min=0)
>>> matches = replace_pattern(graph, pattern, replacement)

As :func:`torch.fx.replace_pattern` has it: a function's arguments are the tensors that come in, what it returns is what
is replaced. Both may be any torch code: a call of the pattern stands for the ops that it is for the tensors at hand
(``F.linear`` of matrices for ``t`` and ``addmm``, of more dims for two views as well).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardfx.ir.capture.splice import splice, trace_function
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Node, Value
from shardfx.ir.rewriter import Rewriter, dead_code
from shardfx.ir.rules.book import RuleBook
from shardfx.ir.spec import TensorType

from .find_pattern import Match, Pattern, name_of


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
