"""Where the turns of a program begin and end, and what stands in them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from shardfx.ir.ops.local_ops import row_of


def part_in_turns(node: fx.Node) -> str:
    """``opens``, ``closes``, ``number`` or ``collects``; empty for what is done as anywhere."""
    row = row_of(node.target) if node.op == "call_function" else None
    return row.turns if row is not None else ""


def gives_number(node: fx.Node) -> bool:
    """Whether a call gives a number of a turn."""
    row = row_of(node.target) if node.op == "call_function" else None
    return row is not None and row.is_number


def regions(nodes: Iterable[fx.Node]) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """For each node the loops that it stands in, outermost first, by their first calls; these stand in front."""
    found: dict[fx.Node, tuple[fx.Node, ...]] = {}
    open_: tuple[fx.Node, ...] = ()
    for node in nodes:
        part = part_in_turns(node)
        if part == "closes":
            open_ = open_[:-1]
        found[node] = open_
        if part == "opens":
            open_ = (*open_, node)
    return found
