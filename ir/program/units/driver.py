"""Turns in units as a driver: a graph that calls the module of each unit, in the order of the schedule.

turns = time.turns('mb', 2, [w, x], 'F0.0 F0.1 B0.0 B0.1')
    unit = time.unit(turns, 'F0')                           f0_0 = self.F0(0, x);      relu_mb0 = f0_0[0]
        relu = aten.relu(...)                         ->    f0_1 = self.F0(1, x);      relu_mb1 = f0_1[0]
    unit_1 = time.unit(turns, 'B0')                         b0_0 = self.B0(0, w, relu_mb0)
        ...                                                 b0_1 = self.B0(1, w, relu_mb1)
done = time.done(turns, [w, x], [])

A module that somebody changed is read back from these calls: their order is that of the units, and what goes from one
to another must be alike in all turns.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import fx

from shardfx.ir.errors import Error
from shardfx.ir.ops.time import turns
from shardfx.ir.program.looped.within_turns import gives_number, part_in_turns, regions

from .lifetimes import name_of
from .unit_order import UnitOrder, Word, order_of


@dataclass
class _Unit:
    """A unit of turns: its calls, what it takes, and what others take of it."""

    name: str
    nodes: list[fx.Node]
    takes: list[fx.Node] = field(default_factory=list)
    gives: list[fx.Node] = field(default_factory=list)


def write_driver(
    nodes: Sequence[fx.Node], made: fx.Graph, env: dict[fx.Node, fx.Node], found: dict[str, fx.Graph]
) -> None:
    """Write the calls of turns in units into a graph.

    Args:
        nodes: the turns, from their begin to their end.
        env: what stands for values of before; of what is used behind, it is added.
        found: the graphs of the units, by the attribute's name, are added.
    """
    begin, axis = nodes[0], str(nodes[0].args[0])
    units = _units(nodes)
    inside = {node for unit in units.values() for node in unit.nodes}
    head = [node for node in nodes[1:] if gives_number(node) and node not in inside]
    modules = {}
    for unit in units.values():
        name = unit.name
        while name in found:
            name += "_"
        modules[unit.name], found[name] = name, _unit_graph(begin, axis, unit, head)
    order = UnitOrder.of(order_of(begin).split())
    last = {word.unit: word for word in order.words}
    there: dict[tuple[fx.Node, int], fx.Node] = {}
    for word in order.words:
        unit = units[word.unit]
        given = [there.get((each, word.turn)) or env.get(each) or _not_yet(each, word, units) for each in unit.takes]
        name = f"{word.unit.lower()}_{word.turn}"
        call = made.create_node("call_module", modules[word.unit], (word.turn, *given), name=name)
        for place, each in enumerate(unit.gives):
            handed_on = any(each in other.takes for other in units.values())
            if not handed_on and word != last[word.unit]:
                continue  # the last turn gives what all have collected
            name = f"{each.name}_{axis}{word.turn}" if handed_on else each.name
            got = made.create_node("call_function", operator.getitem, (call, place), name=name)
            got.meta = dict(each.meta)
            there[each, word.turn] = env[each] = got


def _units(nodes: Sequence[fx.Node]) -> dict[str, _Unit]:
    """The units of turns, with what they take and give."""
    inside, found = regions(nodes), dict[str, _Unit]()
    of: dict[fx.Node, _Unit] = {}
    for node in nodes[1:-1]:
        if part_in_turns(node) == "unit" and len(inside[node]) == 1:
            found[name_of(node)] = _Unit(name_of(node), [])
        elif len(inside[node]) > 1:
            unit = of[node] = found[name_of(inside[node][1])]
            unit.nodes.append(node)
    for unit in found.values():
        own = set(unit.nodes)
        used = [each for node in unit.nodes for each in node.all_input_nodes if each not in own]
        for each in used:  # and what numbers of the turn are made of, which stand in each unit that uses them
            used += each.all_input_nodes if each in inside and each not in of and each is not nodes[0] else []
        outer = dict.fromkeys(each for each in used if each is not nodes[0])
        unit.takes = [each for each in outer if each not in inside or each in of]
        unit.gives = [node for node in unit.nodes if any(user not in own for user in node.users)]
    return found


def of_turn(graph: fx.Graph, begin: fx.Node, takes: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """The inputs of a module of turns that begin at a node: the number of the turn, and what it takes, each by its
    name (a number of the turns around is called ``turn``, too)."""
    made, names = {begin: graph.placeholder("turn")}, {"turn"}
    for each in takes:
        name = each.name
        while name in names:
            name += "_"
        names.add(name)
        made[each] = graph.placeholder(name)
    return made


def _unit_graph(begin: fx.Node, axis: str, unit: _Unit, head: Sequence[fx.Node]) -> fx.Graph:
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    env |= of_turn(graph, begin, unit.takes)
    graph.call_function(turns.unit, (env[begin], unit.name, axis))
    needed = {used for node in unit.nodes for used in node.all_input_nodes}
    for node in reversed(head):
        if node in needed:
            needed.update(node.all_input_nodes)
    for node in (*(node for node in head if node in needed), *unit.nodes):
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[node] for node in unit.gives))
    return graph


def _not_yet(value: fx.Node, word: Word, units: Mapping[str, _Unit]) -> NoReturn:
    """Raise for a value that the unit takes before it is made.

    Raises:
        Error: naming both units.
    """
    maker = next((name for name, unit in units.items() if value in unit.nodes), "")
    raise Error(
        f"{word} takes {value.name} before it is made",
        where=f"the order of units, {word}",
        expected=f"{Word(maker, word.turn)} before it" if maker else "what was made before the turns",
        got=value.format_node() or value.name,
        remedy="let the unit that makes it stand earlier in the order",
    )


# ---- a driver read back ---------------------------------------------------------------------------------------------


@dataclass
class Called:
    """A call of a unit's module: of which turn, and what it is given beside the turn's number."""

    node: fx.Node
    module: fx.GraphModule
    word: Word
    given: list[Any]


@dataclass
class Driven:
    """The calls of units of some turns, in their order."""

    axis: str
    calls: list[Called]

    def models(self) -> dict[str, Called]:
        """Of each unit the call that is done first; its calls in other turns must be alike.

        Raises:
            Error: they are not.
        """
        by_node = {call.node: call for call in self.calls}
        first: dict[str, Called] = {}
        for call in self.calls:
            model = first.setdefault(call.word.unit, call)
            here, there = (self._sources(each, by_node) for each in (call, model))
            if here != there:
                at = next(i for i, (a, b) in enumerate(zip(here, there, strict=True)) if a != b)
                raise _wrong(
                    f"{call.word} is given another value than {model.word}",
                    call.node,
                    expected=f"argument {at + 1} as in {model.node.format_node()}",
                    got=str(call.given[at]),
                )
        last = {call.word.unit: call for call in self.calls}
        for call in self.calls:
            for got in call.node.users:
                if call is not last[call.word.unit] and any(user not in by_node for user in got.users):
                    raise _wrong(
                        f"{got.name} of turn {call.word.turn} is used behind the turns",
                        call.node,
                        expected=f"what the last call of {call.word.unit} gives, {last[call.word.unit].node.name}",
                    )
        return first

    def _sources(self, call: Called, by_node: Mapping[fx.Node, Called]) -> list[Any]:
        return [self.source(call, each, by_node) for each in call.given]

    def source(self, call: Called, given: Any, by_node: Mapping[fx.Node, Called] | None = None) -> Any:
        """Where an argument comes from: a unit of the same turn and the place among its results, or itself."""
        by_node = {each.node: each for each in self.calls} if by_node is None else by_node
        maker = given.args[0] if isinstance(given, fx.Node) and given.target is operator.getitem else given
        if not isinstance(maker, fx.Node) or maker not in by_node:
            return given
        made = by_node[maker]
        if made.word.turn != call.word.turn or maker is given:
            raise _wrong(
                f"{call.word} is given what {made.word} makes",
                call.node,
                expected=f"values of turn {call.word.turn}",
                got=given.format_node() or given.name,
            )
        return made.word.unit, given.args[1]

    @property
    def order(self) -> UnitOrder:
        """The order of the calls."""
        return UnitOrder(tuple(call.word for call in self.calls))


def read_drivers(module: fx.GraphModule) -> list[fx.Node | Driven]:
    """The nodes of a module's graph, with the calls of units together; what stands between calls, and does not need
    them, stands before.

    Raises:
        Error: a unit is called without a number of a turn.
    """
    found: list[fx.Node | Driven] = []
    nodes = list(module.graph.nodes)
    taken: set[fx.Node] = set()
    for at, node in enumerate(nodes):
        if node in taken:
            continue
        first = _called(module, node)
        if first is None:
            found.append(node)
            continue
        driven, between, members = _group(module, nodes[at:], first)
        found += [*between, driven]
        taken |= {*between, *members}
    return found


def _group(
    module: fx.GraphModule, nodes: Sequence[fx.Node], first: tuple[str, Called]
) -> tuple[Driven, list[fx.Node], set[fx.Node]]:
    """The calls that belong to the first one, what stands between them, and all that is taken of them."""
    driven, between, members = Driven(first[0], []), list[fx.Node](), set[fx.Node]()
    pending: list[fx.Node] = []
    modules: dict[str, Any] = {}
    for node in nodes:
        found = _called(module, node)
        if found is not None:
            axis, call = found
            if axis != driven.axis or modules.setdefault(call.word.unit, call.module) is not call.module:
                break
            driven.calls.append(call)
            members.add(node)
            between += pending
            pending = []
        elif node.target is operator.getitem and node.args[0] in members:
            members.add(node)
        elif members.isdisjoint(node.all_input_nodes):
            pending.append(node)
        else:
            break
    return driven, between, members


def _called(module: fx.GraphModule, node: fx.Node) -> tuple[str, Called] | None:
    """The unit that a node calls, with the axis of its turns; None for any other node."""
    if node.op != "call_module":
        return None
    called = operator.attrgetter(str(node.target))(module)
    said = _says(called)
    if said is None:
        return None
    inputs = [each for each in called.graph.nodes if each.op == "placeholder"]
    given = [*node.args, *(node.kwargs[str(each.target)] for each in inputs[len(node.args) :])]
    if not given or type(given[0]) is not int or len(given) != len(inputs):
        raise _wrong(f"{said.args[1]} is called without the number of a turn", node, expected="self.F0(0, ...)")
    return str(said.args[2]), Called(node, called, Word(str(said.args[1]), given[0]), given[1:])


def _says(called: Any) -> fx.Node | None:
    """What says in a module that it is a unit."""
    nodes: Iterable[fx.Node] = called.graph.nodes if isinstance(called, fx.GraphModule) else ()
    return next((node for node in nodes if node.target is turns.unit and len(node.args) == 3), None)


def _wrong(what: str, node: fx.Node, expected: str, got: str | None = None) -> Error:
    return Error(what, where=node.format_node() or node.name, expected=expected, got=got)
