"""Structural equality of nodes: one key for rules, types, costs, blocks and plans.

>>> x = Value(TensorType((4, 4), torch.float32))
>>> alike(Rewriter.make(aten.relu.default, (x,), x.type))
(<OpOverload(op='aten.relu', overload='default')>, (TensorType(shape=(4, 4), dtype=torch.float32),), (), (...,))
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from shardfx.ir.graph import Graph, Node, Value, op_name
from shardfx.ir.node import draw_slot

from .table import OwnOp

PLAIN = (int, str, type(None))
"""Types of constants that are equal only if identical; the key of others has the type, as ``1 == 1.0 == True``."""


def alike(node: Node, *, placed: bool = False) -> Hashable:
    """A key that is equal for nodes of one op, with equal constants, and operands and results of equal types.

    With ``placed`` the placements of operands and results and the strategy are equal too. Names, sources, stages and
    whether a value is used twice are not in it.
    """
    return key_of(node, type_and_spec if placed else type_of) + ((node.strategy,) if placed else ())


def key_of(node: Node, key: Callable[[Value], Hashable]) -> tuple[Hashable, ...]:
    """The key of a node with ``key`` for its values, such as their position in a block."""
    args, number = node.args, draw_slot(node)
    if number is not None:  # no two nodes share it
        args = (*args[:number], *args[number + 1 :])
    return (
        node.op,
        tuple([argument_key(arg, key) for arg in args]),
        tuple([(name, argument_key(arg, key)) for name, arg in node.kwargs.items()]) if node.kwargs else (),
        tuple([None if value is None else key(value) for value in node.results]),
    )


def argument_key(arg: Any, key: Callable[[Any], Hashable], kind: type = Value) -> Hashable:
    """The key of an argument: ``key`` of its values, and constants with their types."""
    if isinstance(arg, kind):
        return key(arg)
    if type(arg) in PLAIN:
        return arg  # type: ignore[no-any-return]
    if isinstance(arg, (list, tuple)):
        return tuple([argument_key(each, key, kind) for each in arg])
    if isinstance(arg, (float, complex)):
        return type(arg), repr(arg)  # nan is none other than nan, and 0.0 is not -0.0
    return type(arg), arg if isinstance(arg, Hashable) else repr(arg)


def type_of(value: Value) -> Hashable:
    """The key of a value by its type alone."""
    return value.type


def type_and_spec(value: Value) -> Hashable:
    """The key of a value by its type and placement."""
    return value.type, value.spec


def node_keys(graph: Graph) -> dict[str, Node]:
    """The nodes by keys that do not depend on value numbering: ``forward layers.0.wo aten.mm 0``."""
    counts: dict[str, int] = {}
    keys = {}
    for node in graph.nodes:
        if not isinstance(node.op, OwnOp):
            key = f"{node.phase.value} {node.where.module or '-'} {op_name(node.op)}"
            number = counts[key] = counts.get(key, -1) + 1
            keys[f"{key} {number}"] = node
    return keys
