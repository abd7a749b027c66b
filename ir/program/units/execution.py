"""The calls of a program as often as they are done, in the order in which that is, each with its turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from shardfx.ir.program.looped.within_turns import part_in_turns

from .lifetimes import name_of
from .unit_order import UnitOrder, order_of

Turns = tuple[tuple[str, int], ...]
"""Of the axes around, outermost first: which turn it is."""


def executed(nodes: Sequence[fx.Node], turns: Turns = ()) -> Iterator[tuple[fx.Node, Turns]]:
    """Each call of some nodes, among which is where turns and units begin and end."""
    at = 0
    while at < len(nodes):
        node = nodes[at]
        if part_in_turns(node) != "opens":
            yield node, turns
            at += 1
            continue
        end = end_of(nodes, at)
        inside, axis = nodes[at + 1 : end], str(node.args[0])
        if order := order_of(node):
            units = _units(inside, node)
            for word in UnitOrder.of(order.split()).words:
                yield from executed(units[word.unit], (*turns, (axis, word.turn)))
        else:
            count: Any = node.args[1]
            for turn in range(count):
                yield from executed(inside, (*turns, (axis, turn)))
        at = end + 1


def end_of(nodes: Sequence[fx.Node], begin: int) -> int:
    """The place of the end of the turns that begin at a place."""
    depth = 0
    for at in range(begin, len(nodes)):
        part = part_in_turns(nodes[at])
        depth += (part == "opens") - (part == "closes")
        if depth == 0:
            return at
    raise AssertionError("turns begin and do not end")


def _units(nodes: Sequence[fx.Node], begin: fx.Node) -> dict[str, list[fx.Node]]:
    """The nodes of each unit of turns."""
    found: dict[str, list[fx.Node]] = {"": []}
    name = ""
    for node in nodes:
        if part_in_turns(node) == "unit" and node.args[0] is begin:
            name = name_of(node)
            found[name] = []
        else:
            found[name].append(node)
    return found
