"""When two nodes are alike."""

from __future__ import annotations

from collections.abc import Hashable

from shardfx.ir.graph import Graph, Node, Value, op_name

from .table import OwnOp


def structure(node: Node) -> object:
    """A key that is equal for nodes of one op, shapes and other arguments."""

    def key(arg: object) -> object:
        if isinstance(arg, Value):
            return arg.type
        if isinstance(arg, (list, tuple)):
            return tuple(key(a) for a in arg)
        return arg if isinstance(arg, Hashable) else repr(arg)

    return (
        node.op,
        tuple(key(a) for a in node.args),
        tuple((k, key(a)) for k, a in node.kwargs.items()),
        tuple(v is None for v in node.results),
    )


def node_keys(graph: Graph) -> dict[str, Node]:
    """The ops by a key that stays the same however values are numbered: ``forward layers.0.wo aten.mm 0``."""
    counts: dict[str, int] = {}
    keys = {}
    for node in graph.nodes:
        if not isinstance(node.op, OwnOp):
            key = f"{node.phase.value} {node.where.module or '-'} {op_name(node.op)}"
            number = counts[key] = counts.get(key, -1) + 1
            keys[f"{key} {number}"] = node
    return keys
