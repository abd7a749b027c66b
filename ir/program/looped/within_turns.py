"""Where the turns of a program begin and end, and what stands in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import fx

from shardfx.ir.ops.local_ops import row_of

FRAMES = ("opens", "unit", "closes")
"""Where turns and their units begin and end."""


def part_in_turns(node: fx.Node) -> str:
    """``opens``, ``closes``, ``unit``, ``number`` or ``collects``; empty for what is done as anywhere."""
    row = row_of(node.target) if node.op == "call_function" else None
    return row.turns if row is not None else ""


def gives_number(node: fx.Node) -> bool:
    """Whether a call gives a number of a turn."""
    row = row_of(node.target) if node.op == "call_function" else None
    return row is not None and row.is_number


def regions(nodes: Iterable[fx.Node]) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """For each node the loops and units that it stands in, outermost first, by their first calls; these stand in
    front."""
    found: dict[fx.Node, tuple[fx.Node, ...]] = {}
    open_: tuple[fx.Node, ...] = ()
    for node in nodes:
        part = part_in_turns(node)
        if part in ("unit", "closes") and open_ and part_in_turns(open_[-1]) == "unit":
            open_ = open_[:-1]
        if part == "closes":
            open_ = open_[:-1]
        found[node] = open_
        if part in ("opens", "unit"):
            open_ = (*open_, node)
    return found


def sibling(made: Sequence[fx.Node], used: Sequence[fx.Node]) -> int | None:
    """Of where a value was made and where it is used: the place of the two units of the same turns in which that is;
    None: it is not in two such."""
    for place, (there, here) in enumerate(zip(made, used, strict=False)):
        if there is not here:
            return place if part_in_turns(there) == part_in_turns(here) == "unit" else None
    return None
