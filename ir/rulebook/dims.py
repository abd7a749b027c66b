"""What rules that are functions of the node have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardfx.ir.graph import Node
from shardfx.ir.rules.sharding_rule import Dim

FIRST = (frozenset({0}),)
"""The first operand may be a partial sum."""


def names(shape: Sequence[int], prefix: str = "d") -> tuple[list[Dim], dict[str, int]]:
    """A factor for every dim, and their sizes."""
    return [(f"{prefix}{i}",) for i in range(len(shape))], {f"{prefix}{i}": s for i, s in enumerate(shape)}


def argument(node: Node, *called: str) -> Any:
    """The value of the argument that the op's schema calls so; its default if it is not given, None if there is
    none."""
    for i, each in enumerate(node.op._schema.arguments):
        if each.name in called:
            return node.args[i] if i < len(node.args) else node.kwargs.get(each.name, each.default_value)
    return None
