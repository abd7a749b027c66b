"""Loops and schedule actions of a program: their regions, the order of actions, execution order, lifetimes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import fx

from shardfx.ir.ops.local_ops import row_of, sent_by

FRAMES = ("opens", "unit", "closes")
"""Where iterations and their units begin and end."""


def part_in_iterations(node: fx.Node) -> str:
    """``opens``, ``closes``, ``unit``, ``number`` or ``collects``; empty for what is done as anywhere."""
    row = row_of(node.target) if node.op == "call_function" else None
    return row.loop if row is not None else ""


def gives_number(node: fx.Node) -> bool:
    """Whether a call gives a number of an iteration."""
    row = row_of(node.target) if node.op == "call_function" else None
    return row is not None and row.is_number


def regions(nodes: Iterable[fx.Node]) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """For each node the loops and units that it stands in, outermost first, by their first calls; these stand in
    front."""
    found: dict[fx.Node, tuple[fx.Node, ...]] = {}
    open_: tuple[fx.Node, ...] = ()
    for node in nodes:
        part = part_in_iterations(node)
        if part in ("unit", "closes") and open_ and part_in_iterations(open_[-1]) == "unit":
            open_ = open_[:-1]
        if part == "closes":
            open_ = open_[:-1]
        found[node] = open_
        if part in ("opens", "unit"):
            open_ = (*open_, node)
    return found


def sibling(made: Sequence[fx.Node], used: Sequence[fx.Node]) -> int | None:
    """Of where a value was made and where it is used: the place of the two units of the same iterations in which that
    is;
    None: it is not in two such."""
    for place, (there, here) in enumerate(zip(made, used, strict=False)):
        if there is not here:
            return place if part_in_iterations(there) == part_in_iterations(here) == "unit" else None
    return None


class Word(NamedTuple):
    """A unit of one iteration, ``F0.3``."""

    unit: str
    iteration: int

    def __str__(self) -> str:
        return f"{self.unit}.{self.iteration}"


@dataclass(frozen=True)
class UnitOrder:
    """The order of the units of iterations."""

    words: tuple[Word, ...]

    @staticmethod
    def of(words: Iterable[str]) -> UnitOrder:
        """The order of some words.

        Raises:
            ValueError: naming the first that is none.
        """
        found = []
        for word in words:
            if not (match := re.fullmatch(r"([A-Za-z_]\w*)\.(\d+)", word)):
                raise ValueError(f"{word!r} is no unit of an iteration, as F0.1 is")
            found.append(Word(match[1], int(match[2])))
        return UnitOrder(tuple(found))

    @cached_property
    def units(self) -> tuple[str, ...]:
        """The units, in the order in which they are first done."""
        return tuple(dict.fromkeys(word.unit for word in self.words))

    @cached_property
    def _place(self) -> dict[Word, int]:
        return {word: place for place, word in enumerate(self.words)}

    @cached_property
    def _turned(self) -> dict[tuple[str, str], int | None]:
        return {}

    def incomplete(self, iterations: int) -> str:
        """Which unit is not done once of each of so many iterations; empty where each is."""
        there = Counter(self.words)
        for unit in self.units:
            for iteration in range(iterations):
                if (times := there.pop(Word(unit, iteration), 0)) != 1:
                    return f"{Word(unit, iteration)} is done {'twice' if times == 2 else f'{times} times'}"
        return f"{next(iter(there))} is of none of {iterations} iterations" if there else ""

    def turned_round(self, first: str, second: str) -> int | None:
        """The first iteration in which the unit that is to be first is not done before the other; None where it always
        is."""
        pair, place = (first, second), self._place
        if pair not in self._turned:  # it is asked of each value that one hands on to the other
            never = len(place)
            done = ((word, place.get(Word(first, word.iteration), never)) for word in self.words if word.unit == second)
            self._turned[pair] = next((word.iteration for word, at in done if at > place[word]), None)
        return self._turned[pair]

    @cached_property
    def under_way(self) -> int:
        """How many iterations have begun and are not over, at most."""
        left = Counter(word.iteration for word in self.words)
        begun, most = set[int](), 0
        for word in self.words:
            begun.add(word.iteration)
            most = max(most, len(begun))
            left[word.iteration] -= 1
            if not left[word.iteration]:
                begun.remove(word.iteration)
        return most

    def last(self, units: Sequence[str], iteration: int) -> str:
        """The unit of several that is done last of an iteration."""
        return max(units, key=lambda unit: self._place[Word(unit, iteration)])

    def __str__(self) -> str:
        return " ".join(map(str, self.words))


def order_of(begin: fx.Node) -> str:
    """The order of the units of iterations that begin here; empty where they have none."""
    return str(begin.args[3]) if len(begin.args) > 3 else ""


Loops = tuple[tuple[str, int], ...]
"""Of the axes around, outermost first: which turn it is."""


def executed(nodes: Sequence[fx.Node], iterations: Loops = ()) -> Iterator[tuple[fx.Node, Loops]]:
    """Each call of some nodes, among which is where iterations and units begin and end."""
    at = 0
    while at < len(nodes):
        node = nodes[at]
        if part_in_iterations(node) != "opens":
            yield node, iterations
            at += 1
            continue
        end = end_of(nodes, at)
        inside, axis = nodes[at + 1 : end], str(node.args[0])
        if order := order_of(node):
            units = _units(inside, node)
            for word in UnitOrder.of(order.split()).words:
                yield from executed(units[word.unit], (*iterations, (axis, word.iteration)))
        else:
            count: Any = node.args[1]
            for iteration in range(count):
                yield from executed(inside, (*iterations, (axis, iteration)))
        at = end + 1


def end_of(nodes: Sequence[fx.Node], begin: int) -> int:
    """The place of the end of the iterations that begin at a place."""
    depth = 0
    for at in range(begin, len(nodes)):
        part = part_in_iterations(nodes[at])
        depth += (part == "opens") - (part == "closes")
        if depth == 0:
            return at
    raise AssertionError("iterations begin and do not end")


def _units(nodes: Sequence[fx.Node], begin: fx.Node) -> dict[str, list[fx.Node]]:
    """The nodes of each unit of iterations."""
    found: dict[str, list[fx.Node]] = {"": []}
    name = ""
    for node in nodes:
        if part_in_iterations(node) == "unit" and node.args[0] is begin:
            name = name_of(node)
            found[name] = []
        else:
            found[name].append(node)
    return found


class Lifetimes:
    """Of the calls of a program, what they let go, and what units take of others of the same iteration."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self.inside = regions(nodes)
        self.takes: dict[fx.Node, list[fx.Node]] = {}
        """By unit: the values of its iteration that other units made."""
        self._takers: dict[fx.Node, dict[fx.Node, None]] = {}
        self._let_go: dict[tuple[fx.Node, tuple[str, ...], str], list[int]] = {}
        last: dict[tuple[fx.Node, fx.Node | None], fx.Node] = {}
        for node in nodes:
            if node.op == "call_function" and not node.users and part_in_iterations(node) != "unit":
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
        """Of memory that iterations in units collect into: the call that collects, before which it is made once."""

    def _first_need(self, memory: fx.Node) -> fx.Node | None:
        """The call that collects into memory, if nothing but a unit of iterations that are in no others needs it."""
        row = row_of(memory.target) if memory.op == "call_function" else None
        if row is None or not row.filled or self.inside[memory]:
            return None
        needs = [user for user in memory.users if part_in_iterations(user) not in ("opens", "closes")]
        if len(needs) != 1 or part_in_iterations(needs[0]) != "collects":
            return None
        around = self.inside[needs[0]]
        return needs[0] if len(around) == 2 and part_in_iterations(around[1]) == "unit" else None

    def _other_unit(self, value: fx.Node, user: fx.Node) -> fx.Node | None:
        """The unit that uses a value of another one of the same iteration."""
        here = self.inside[user]
        at = sibling(self.inside[value], here)
        return None if at is None else here[at]

    def kept(self, value: fx.Node) -> fx.Node | None:
        """The iterations in which a value is kept for other units; None where it is not."""
        unit = next(iter(self._takers.get(value, ())), None)
        return None if unit is None else loop_of(unit)

    def let_go(self, value: fx.Node, unit: fx.Node) -> list[int]:
        """The iterations in which a unit is the last that takes a value."""
        names = tuple(name_of(each) for each in self._takers[value])
        key = loop_of(unit), names, name_of(unit)
        if key not in self._let_go:
            order, count = UnitOrder.of(order_of(key[0]).split()), key[0].args[1]
            iterations: Any = range(count)  # type: ignore[arg-type]
            self._let_go[key] = [iteration for iteration in iterations if order.last(names, iteration) == key[2]]
        return self._let_go[key]


def loop_of(unit: fx.Node) -> fx.Node:
    """The iterations of which this is a unit."""
    begin: fx.Node = unit.args[0]  # type: ignore[assignment]
    return begin


def name_of(unit: fx.Node) -> str:
    """What a unit is called in the order."""
    return str(unit.args[1])
