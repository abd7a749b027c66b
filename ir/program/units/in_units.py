"""The steps of turns in units, so that a rank may do a part of one turn, then a part of another.

mb: %1, %2, %3, %4      ->      mb:  F0: %1, %2      order F0.0 F0.1 B0.0 F0.2 B0.1 B0.2
                                     B0: %3, %4
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from shardfx.ir.graph import Node, Value
from shardfx.ir.program.looped.in_turns import Loop, nodes_of

from .unit_order import UnitOrder


def in_units(loop: Loop, unit_of: Callable[[Node], str], order: Sequence[str]) -> Loop:
    """A loop whose steps are done unit by unit; within a unit they keep their order.

    Args:
        unit_of: names the unit of a node. Turns inside lie in one unit whole: in that of their nodes which is done
            last.
        order: words ``F0.1``; each unit once for each turn.

    Raises:
        AssertionError: a step needs what a later unit of the same turn makes; a unit does not stand in the order.
    """
    words = UnitOrder.of(order)
    place = {unit: at for at, unit in enumerate(words.units)}
    units: dict[str, list[Node | Loop]] = {unit: [] for unit in words.units}
    made: dict[Value, str] = {}
    for step in loop.steps:
        names = dict.fromkeys(map(unit_of, nodes_of([step])))
        assert names.keys() <= place.keys(), f"no unit {', '.join(sorted(names.keys() - place.keys()))} in the order"
        unit = max(names, key=place.__getitem__)
        units[unit].append(step)
        made |= {value: unit for node in nodes_of([step]) for value in node.outs}
    for unit, steps in units.items():
        for node in nodes_of(steps):
            for value in node.operands:
                maker = made.get(value, unit)
                late = None if maker == unit else words.turned_round(maker, unit)
                assert late is None, (
                    f"{node.name} of {unit} needs {value.name}, which {maker} makes later in turn {late}"
                )
    return replace(
        loop,
        steps=tuple(step for part in units.values() for step in part),
        units=tuple((unit, tuple(part)) for unit, part in units.items()),
        order=str(words),
    )
