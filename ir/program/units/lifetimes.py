"""How long the values of a program are kept: to their last use; and, of a turn done in units, from one to another.

Memory that such turns collect into is made when the first of them does: by then others of their values are gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from shardfx.ir.ops.local_ops import row_of, sent_by
from shardfx.ir.program.looped.within_turns import part_in_turns, regions, sibling

from .unit_order import UnitOrder, order_of


class Lifetimes:
    """Of the calls of a program, what they let go, and what units take of others of the same turn."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self.inside = regions(nodes)
        self.takes: dict[fx.Node, list[fx.Node]] = {}
        """By unit: the values of its turn that other units made."""
        self._takers: dict[fx.Node, dict[fx.Node, None]] = {}
        self._let_go: dict[tuple[fx.Node, tuple[str, ...], str], list[int]] = {}
        last: dict[tuple[fx.Node, fx.Node | None], fx.Node] = {}
        for node in nodes:
            if node.op == "call_function" and not node.users and part_in_turns(node) != "unit":
                last[node, None] = node
            for used in (*node.all_input_nodes, *sent_by(node)):
                unit = self._other_unit(used, node)
                if unit is not None:
                    last.setdefault((used, None), used)
                    if unit not in self._takers.setdefault(used, {}):
                        self._takers[used][unit] = None
                        self.takes.setdefault(unit, []).append(used)
                last[used, unit] = node
        self.dying: dict[fx.Node, list[fx.Node]] = {}
        """Behind which call a value is let go; one that is kept for other units, by the unit."""
        for (used, _), user in last.items():
            self.dying.setdefault(user, []).append(used)

        first = {node: self._first_need(node) for node in nodes}
        self.made_for = {node: user for node, user in first.items() if user is not None}
        """Of memory that turns in units collect into: the call that collects, before which it is made once."""

    def _first_need(self, memory: fx.Node) -> fx.Node | None:
        """The call that collects into memory, if nothing but a unit of turns that are in no others needs it."""
        row = row_of(memory.target) if memory.op == "call_function" else None
        if row is None or not row.filled or self.inside[memory]:
            return None
        needs = [user for user in memory.users if part_in_turns(user) not in ("opens", "closes")]
        if len(needs) != 1 or part_in_turns(needs[0]) != "collects":
            return None
        around = self.inside[needs[0]]
        return needs[0] if len(around) == 2 and part_in_turns(around[1]) == "unit" else None

    def _other_unit(self, value: fx.Node, user: fx.Node) -> fx.Node | None:
        """The unit that uses a value of another one of the same turn."""
        here = self.inside[user]
        at = sibling(self.inside[value], here)
        return None if at is None else here[at]

    def kept(self, value: fx.Node) -> fx.Node | None:
        """The turns in which a value is kept for other units; None where it is not."""
        unit = next(iter(self._takers.get(value, ())), None)
        return None if unit is None else turns_of(unit)

    def let_go(self, value: fx.Node, unit: fx.Node) -> list[int]:
        """The turns in which a unit is the last that takes a value."""
        names = tuple(name_of(each) for each in self._takers[value])
        key = turns_of(unit), names, name_of(unit)
        if key not in self._let_go:
            order, count = UnitOrder.of(order_of(key[0]).split()), key[0].args[1]
            turns: Any = range(count)  # type: ignore[arg-type]
            self._let_go[key] = [turn for turn in turns if order.last(names, turn) == key[2]]
        return self._let_go[key]


def turns_of(unit: fx.Node) -> fx.Node:
    """The turns of which this is a unit."""
    begin: fx.Node = unit.args[0]  # type: ignore[assignment]
    return begin


def name_of(unit: fx.Node) -> str:
    """What a unit is called in the order."""
    return str(unit.args[1])
