"""Selection of forward nodes by patterns of modules and ops."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shardfx.ir.errors import Error, did_you_mean
from shardfx.ir.graph import Graph, Node, Phase, op_name
from shardfx.ir.names import pattern, prefixes


def matching_modules(
    graph: Graph,
    modules: str | Iterable[str],
    skip: int = 0,
    count: int = 0,
    *,
    where: str,
    root: bool = False,
) -> dict[Node, str]:
    """The forward nodes of the modules that match patterns, each with its matching module.

    Args:
        skip, count: skip the first modules of each pattern, and take at most ``count`` of the rest (0: all).
        where: the hint that has the patterns, for errors.
        root: whether a pattern may match the model itself, so that ``**`` is all of it.

    Raises:
        Error: a pattern matches nothing, or nothing behind what is skipped.
    """
    forward: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if node.phase is Phase.FORWARD:
            forward.setdefault(node.where.module, []).append(node)
    paths = {module: (*([""] if root else []), *prefixes(module)) for module in forward}
    found: dict[Node, str] = {}
    for text in _as_tuple(modules):
        matches = pattern(text).fullmatch
        of_text: dict[str, list[Node]] = {}
        for module, nodes in forward.items():
            path = next((path for path in paths[module] if matches(path)), None)
            if path is not None:
                of_text.setdefault(path, []).extend(nodes)
        if not of_text:
            raise _no_match(text, "modules", {path for each in paths.values() for path in each if path}, where)
        if skip >= len(of_text):
            raise Error(
                f"of the modules that pattern {text!r} matches none is left",
                where=where,
                expected=f"skip= less than {len(of_text)}, for so many match: {', '.join([*of_text][:4])}",
                got=f"skip={skip}",
                remedy="skip fewer of them",
            )
        for path in list(of_text)[skip:][: count or None]:
            for node in of_text[path]:
                found.setdefault(node, path)
    return {node: found[node] for node in graph.nodes if node in found}


def joined(graph: Graph, of: Mapping[Node, str], into: Mapping[str, str]) -> dict[Node, str]:
    """Regions of several consecutive modules, with the nodes of enclosing modules between them.

    Args:
        of: the nodes of modules, in the order of the graph.
        into: the region that each module becomes part of.
    """
    around: dict[str, set[str]] = {}
    for path, region in into.items():
        around.setdefault(region, {""}).update(prefixes(path)[:-1])
    last = {into[path]: node for node, path in of.items()}
    found: dict[Node, str] = {}
    begun = ""
    for node in graph.nodes:
        if node in of:
            begun = found[node] = into[of[node]]
        elif begun and node.phase is Phase.FORWARD and node.where.module in around[begun]:
            found[node] = begun
        if begun and node is last[begun]:
            begun = ""
    return found


def successive(modules: Sequence[str], together: int) -> dict[str, str]:
    """The first module of the group of ``together`` consecutive ones that each belongs to."""
    return {path: modules[at - at % together] for at, path in enumerate(modules)}


def matching_ops(nodes: Iterable[Node], ops: str | Iterable[str], *, where: str) -> list[Node]:
    """The nodes whose ops match patterns: ``"aten.mm"``, or with a module ``"layers.*.mlp:aten.mm"``, ``":aten.mm"``
    for the model's own.

    Raises:
        Error: a pattern matches nothing.
    """
    found: list[Node] = []
    for text in _as_tuple(ops):
        module, colon, op = text.rpartition(":")
        is_op, is_module = pattern(op).fullmatch, pattern(module if colon else "**").fullmatch
        named = [node for node in nodes if is_op(op_name(node.op)) and is_module(node.where.module)]
        if not named:
            known = {f"{f'{node.where.module}:' if colon else ''}{op_name(node.op)}" for node in nodes}
            raise _no_match(text, "ops", known, where)
        found += named
    return found


def _as_tuple(patterns: str | Iterable[str]) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def _no_match(text: str, what: str, known: Iterable[str], where: str) -> Error:
    names = sorted(known)
    hint = did_you_mean(text, names, "in a pattern * is one part of a name, ** any number")
    expected = f"the name of one of the {what} of the forward, such as {', '.join(names[:4])}"
    return Error(f"pattern {text!r} matches none of the {what}", where=where, expected=expected, got=text, remedy=hint)
