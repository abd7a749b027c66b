"""What an op's schema says of the arguments of a node: which of them are tensors, and what a named one is."""

from __future__ import annotations

import functools
from typing import Any

from shardfx.ir.graph import Node, Value


@functools.cache
def _places(op: Any) -> dict[str, tuple[int, Any]]:
    return {each.name: (i, each.default_value) for i, each in enumerate(op._schema.arguments)}


@functools.cache
def _tensors(op: Any) -> tuple[tuple[int, str, bool], ...]:
    """Place and name of the arguments that are tensors, and whether each is a list of them."""
    kinds = ((i, each.name, str(each.type)) for i, each in enumerate(op._schema.arguments))
    return tuple((i, name, "List" in kind) for i, name, kind in kinds if "Tensor" in kind)


@functools.cache
def has_argument(op: Any, name: str) -> bool:
    """Whether the op, or another overload of it, has an argument of that name."""
    packet = getattr(op, "overloadpacket", None)
    overloads = [getattr(packet, each) for each in packet.overloads()] if packet is not None else [op]
    return any(name in _places(each) for each in overloads)


def argument(node: Node, *called: str) -> Any:
    """The value of the argument that the op's schema calls so, by the first of the names that it has; its default if it
    is not given, None if there is none."""
    places = _places(node.op)
    for name in called:
        if name in places:
            i, default = places[name]
            return node.args[i] if i < len(node.args) else node.kwargs.get(name, default)
    return None


def given_tensors(node: Node) -> list[Any]:
    """What is given for each tensor that the schema names, in its order: a value, a number in its stead, or None."""
    slots: list[Any] = []
    for i, name, many in _tensors(node.op):
        value = node.args[i] if i < len(node.args) else node.kwargs.get(name)
        if many:
            slots.extend(value or ())
        else:
            slots.append(value)
    return slots


def tensor_slots(node: Node) -> list[Value | None]:
    """The tensor arguments that the op's schema names, in its order; None for an optional one that is not given."""
    return [each if isinstance(each, Value) else None for each in given_tensors(node)]
