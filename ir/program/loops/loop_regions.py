"""Loops and schedule actions of a program: their regions, the order of actions, execution order, lifetimes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import Any, NamedTuple

from torch import fx

from shardfx.ir.ops.local_ops import row_of, sent_by
from shardfx.ir.ops.loop import loop_ops

DELIMITERS = ("opens", "unit", "closes")
"""Where iterations and their actions begin and end."""


def loop_role(node: fx.Node) -> str:
    """The role of a call in loops: ``opens``, ``closes``, ``unit``, ``number`` or ``collects``; empty for any other
    call."""
    row = row_of(node.target) if node.op == "call_function" else None
    return row.loop if row is not None else ""


def is_induction_variable(node: fx.Node) -> bool:
    """Whether a call computes an induction variable."""
    row = row_of(node.target) if node.op == "call_function" else None
    return row is not None and row.is_number


def regions(nodes: Iterable[fx.Node]) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """For each node the loops and actions around it, outermost first, by their first calls."""
    found: dict[fx.Node, tuple[fx.Node, ...]] = {}
    open_: tuple[fx.Node, ...] = ()
    for node in nodes:
        part = loop_role(node)
        if part in ("unit", "closes") and open_ and loop_role(open_[-1]) == "unit":
            open_ = open_[:-1]
        if part == "closes":
            open_ = open_[:-1]
        found[node] = open_
        if part in ("opens", "unit"):
            open_ = (*open_, node)
    return found


def close_loop(graph: fx.Graph, begin: fx.Node) -> None:
    """End the last loop of a graph; both ends declare the values from outside that it uses, and its accumulators."""
    nodes = list(graph.nodes)
    inside = nodes[nodes.index(begin) :]
    own = set(inside)
    around = dict.fromkeys(used for node in inside for used in node.all_input_nodes if used not in own)
    into = dict.fromkeys(node.args[0] for node in inside if loop_role(node) == "collects")
    begin.args = (*begin.args[:2], [*around], *begin.args[3:])
    kept, collected = [each for each in around if each not in into], [each for each in around if each in into]
    graph.call_function(loop_ops.end, (begin, kept, collected))


def sibling_actions(made: Sequence[fx.Node], used: Sequence[fx.Node]) -> int | None:
    """The depth of the loop in which a value is made and used by two different actions; None if there is none."""
    for place, (there, here) in enumerate(zip(made, used, strict=False)):
        if there is not here:
            return place if loop_role(there) == loop_role(here) == "unit" else None
    return None


class ActionStep(NamedTuple):
    """An action of one iteration, ``F0.3``."""

    unit: str
    iteration: int

    def __str__(self) -> str:
        return f"{self.unit}.{self.iteration}"


@dataclass(frozen=True)
class ActionOrder:
    """The order of the schedule actions."""

    words: tuple[ActionStep, ...]

    @staticmethod
    def of(words: Iterable[str]) -> ActionOrder:
        """The order that some words say; a ValueError names the first invalid one."""
        found = []
        for word in words:
            if not (match := re.fullmatch(r"([A-Za-z_]\w*)\.(\d+)", word)):
                raise ValueError(f"{word!r} is no unit of an iteration, as F0.1 is")
            found.append(ActionStep(match[1], int(match[2])))
        return ActionOrder(tuple(found))

    @cached_property
    def units(self) -> tuple[str, ...]:
        """The distinct actions, in the order in which they first run."""
        return tuple(dict.fromkeys(word.unit for word in self.words))

    @cached_property
    def _place(self) -> dict[ActionStep, int]:
        return {word: place for place, word in enumerate(self.words)}

    @cached_property
    def _violations(self) -> dict[tuple[str, str], int | None]:
        return {}

    def incomplete(self, iterations: int) -> str:
        """An action that does not run exactly once in each of so many iterations; empty if there is none."""
        there = Counter(self.words)
        for unit in self.units:
            for iteration in range(iterations):
                if (times := there.pop(ActionStep(unit, iteration), 0)) != 1:
                    return f"{ActionStep(unit, iteration)} is done {'twice' if times == 2 else f'{times} times'}"
        return f"{next(iter(there))} is of none of {iterations} iterations" if there else ""

    def first_violation(self, first: str, second: str) -> int | None:
        """The first iteration in which the action that is to be first does not run before the other, if there is
        one."""
        pair, place = (first, second), self._place
        if pair not in self._violations:  # it is asked of each value that one hands on to the other
            never = len(place)
            done = (
                (word, place.get(ActionStep(first, word.iteration), never))
                for word in self.words
                if word.unit == second
            )
            self._violations[pair] = next((word.iteration for word, at in done if at > place[word]), None)
        return self._violations[pair]

    @cached_property
    def in_flight(self) -> int:
        """The maximum number of iterations in flight."""
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
        """The last of several actions to run in an iteration."""
        return max(units, key=lambda unit: self._place[ActionStep(unit, iteration)])

    def __str__(self) -> str:
        return " ".join(map(str, self.words))


def action_order(begin: fx.Node) -> str:
    """The order of the schedule actions that begin here; empty where they have none."""
    return str(begin.args[3]) if len(begin.args) > 3 else ""


Iterations = tuple[tuple[str, int], ...]
"""Of the axes around, outermost first: the iteration."""


def execution_order(nodes: Sequence[fx.Node]) -> Iterator[tuple[fx.Node, Iterations]]:
    """The execution order of some nodes, without those that begin and end iterations and actions."""
    return ((node, iterations) for run, iterations in execution_runs(nodes) for node in run)


def execution_runs(
    nodes: Sequence[fx.Node], iterations: Iterations = (), ordered: bool = False
) -> Iterator[tuple[Sequence[fx.Node], Iterations]]:
    """Runs of nodes in execution order; if ``ordered``, only loops with schedule actions are expanded."""

    def expands(node: fx.Node) -> bool:
        return loop_role(node) == "opens" and (not ordered or bool(action_order(node)))

    at = next((at for at, node in enumerate(nodes) if expands(node)), len(nodes))
    yield nodes[:at], iterations
    if at == len(nodes):
        return
    begin, end = nodes[at], loop_end(nodes, at)
    axis, count = begin.args[:2]
    words = ActionOrder.of(action_order(begin).split()).words
    bodies = action_nodes(nodes[at + 1 : end], begin) if words else {"": nodes[at + 1 : end]}
    nested = {name for name, body in bodies.items() if any(map(expands, body))}
    for unit, iteration in words or zip(repeat(""), range(count)):  # type: ignore[arg-type]
        around = (*iterations, (str(axis), iteration))
        if unit in nested:
            yield from execution_runs(bodies[unit], around, ordered)
        else:
            yield bodies[unit], around
    yield from execution_runs(nodes[end + 1 :], iterations, ordered)


def loop_end(nodes: Sequence[fx.Node], begin: int) -> int:
    """The position of the end of the loop that begins at a position."""
    depth = 0
    for at in range(begin, len(nodes)):
        part = loop_role(nodes[at])
        depth += (part == "opens") - (part == "closes")
        if depth == 0:
            return at
    raise AssertionError("iterations begin and do not end")


def action_nodes(nodes: Sequence[fx.Node], begin: fx.Node) -> dict[str, list[fx.Node]]:
    """The nodes of each schedule action of a loop, by name; without one, those before the first."""
    found: dict[str, list[fx.Node]] = {"": []}
    name = ""
    for node in nodes:
        if loop_role(node) == "unit" and node.args[0] is begin:
            name = action_name(node)
            found[name] = []
        else:
            found[name].append(node)
    return found


class Lifetimes:
    """Lifetimes of a program's values: what each call frees, and what actions use of others of the same iteration."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self.inside = regions(nodes)
        self.takes: dict[fx.Node, list[fx.Node]] = {}
        """By action: the values of its iteration that other actions made."""
        self._takers: dict[fx.Node, dict[fx.Node, None]] = {}
        self._let_go: dict[tuple[fx.Node, tuple[str, ...], str], list[int]] = {}
        last: dict[tuple[fx.Node, fx.Node | None], fx.Node] = {}
        for node in nodes:
            if node.op == "call_function" and not node.users and loop_role(node) != "unit":
                last[node, None] = node
            for used in (*node.all_input_nodes, *sent_by(node)):
                at = sibling_actions(self.inside[used], self.inside[node])
                unit = None if at is None else self.inside[node][at]
                if unit is not None:
                    last.setdefault((used, None), used)
                    if unit not in self._takers.setdefault(used, {}):
                        self._takers[used][unit] = None
                        self.takes.setdefault(unit, []).append(used)
                last[used, unit] = node
        self.dying: dict[fx.Node, list[fx.Node]] = {}
        """Behind which call a value is let go; one that is kept for other actions, by the action."""
        for (used, _), user in last.items():
            self.dying.setdefault(user, []).append(used)

        first = {node: self._first_need(node) for node in nodes}
        self.made_for = {node: user for node, user in first.items() if user is not None}
        """Of memory that loops in schedule actions collect into: the call that collects, before which it is made
        once."""

    def _first_need(self, memory: fx.Node) -> fx.Node | None:
        """The call that collects into memory, if nothing but an action of an outermost loop needs it."""
        row = row_of(memory.target) if memory.op == "call_function" else None
        if row is None or not row.filled or self.inside[memory]:
            return None
        needs = [user for user in memory.users if loop_role(user) not in ("opens", "closes")]
        if len(needs) != 1 or loop_role(needs[0]) != "collects":
            return None
        around = self.inside[needs[0]]
        return needs[0] if len(around) == 2 and loop_role(around[1]) == "unit" else None

    def kept(self, value: fx.Node) -> fx.Node | None:
        """The iterations in which a value is stored for other actions; None where it is not."""
        unit = next(iter(self._takers.get(value, ())), None)
        return None if unit is None else loop_of(unit)

    def let_go(self, value: fx.Node, unit: fx.Node) -> list[int]:
        """The iterations in which an action is the last user of a value."""
        names = tuple(action_name(each) for each in self._takers[value])
        key = loop_of(unit), names, action_name(unit)
        if key not in self._let_go:
            order, count = ActionOrder.of(action_order(key[0]).split()), key[0].args[1]
            iterations: Any = range(count)  # type: ignore[arg-type]
            self._let_go[key] = [iteration for iteration in iterations if order.last(names, iteration) == key[2]]
        return self._let_go[key]


def loop_of(unit: fx.Node) -> fx.Node:
    """The loop of an action."""
    begin: fx.Node = unit.args[0]  # type: ignore[assignment]
    return begin


def action_name(unit: fx.Node) -> str:
    """The name of an action in the order."""
    return str(unit.args[1])
