"""Turns as modules: what a ``GraphModule`` of a program shows, and runs.

turns = time.turns('mb', 4, [w, x, total])
    ...                                      ->   turns = time.repeat(self.each_mb_0, 'mb', 4, w, x, total)
    sum = time.add(total, grad)                  sum = turns[0]
done = time.done(turns, [w, x], [total])

Turns in units are a :mod:`shardfx.ir.program.units.driver`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import fx

from shardfx.ir.ops.time import turns
from shardfx.ir.program.units.driver import of_turn, write_driver
from shardfx.ir.program.units.execution import end_of
from shardfx.ir.program.units.unit_order import order_of

from .within_turns import part_in_turns

Units = dict[str, fx.Graph]


def nested(graph: fx.Graph, units: Units | None = None) -> tuple[fx.Graph, Units]:
    """The graph with each of its outermost loops as one call, and the graphs of these calls by the attribute's name,
    in which loops inside are loops still."""
    made, env = fx.Graph(), dict[fx.Node, fx.Node]()
    found: Units = {} if units is None else units
    nodes = list(graph.nodes)
    at = 0
    while at < len(nodes):
        node = nodes[at]
        if part_in_turns(node) != "opens":
            env[node] = made.node_copy(node, env.__getitem__)
            at += 1
            continue
        end = end_of(nodes, at)
        if order_of(node):
            write_driver(nodes[at : end + 1], made, env, found)
            at = end + 1
            continue
        name = f"each_{node.args[0]}_{len(found)}"
        found[name], left = _unit(nodes[at : end + 1])
        around: Sequence[fx.Node] = node.args[2]
        unit = made.get_attr(name)
        given = (unit, *node.args[:2], *(env[each] for each in around))
        call = made.create_node("call_function", turns.repeat, given, name=node.name)
        for number, each in enumerate(left):
            env[each] = made.create_node("call_function", operator.getitem, (call, number), name=each.name)
            env[each].meta = dict(each.meta)
        at = end + 1
    return made, found


def _unit(nodes: Sequence[fx.Node]) -> tuple[fx.Graph, list[fx.Node]]:
    """What is done in a turn, and what of it is used behind: its results."""
    begin, inside = nodes[0], set(nodes)
    graph, around = fx.Graph(), begin.args[2]
    env = of_turn(graph, begin, around)  # type: ignore[arg-type]
    for node in nodes[1:-1]:
        env[node] = graph.node_copy(node, env.__getitem__)
    left = [node for node in nodes if any(user not in inside for user in node.users)]
    graph.output(tuple(env[node] for node in left))
    return graph, left
