"""A program whose calls all stand in another program of the same rank: what is known of them there, is known here.

    known:    mm = mm(x, w)   sum = all_reduce(mm)   done = wait(sum)   loss = f(done)   grad = g(done)
    another:  mm = mm(x, w)   sum = all_reduce(mm)   done = wait(sum)   loss = f(done)

Nothing of that is assumed: each call is looked up by its target, its constants and the calls that its operands are, and
its collectives and messages must come in the order of the other program, so that ranks which met there in that order
meet here.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from torch import fx

from shardfx.ir.ops.pack import IDENTITY
from shardfx.runtime.verify.data_movement import COLLECTIVES, MESSAGES

from .interpreter import Rank


class ReusableFacts:
    """The calls of a program that was interpreted to its end."""

    def __init__(self, known: Rank) -> None:
        self.known = known
        self._inputs, self._calls = {}, dict[Hashable, fx.Node]()
        given, same = iter(known.inputs), dict[fx.Node, fx.Node]()
        for node in known.module.graph.nodes:
            same[node] = node
            if node.op == "placeholder":
                self._inputs[next(given).value] = node
            elif node.op == "call_function":
                same[node] = self._calls.setdefault(_call(node, same), node)
        self._asked = {node: place for place, node in enumerate(filter(_speaks, known.module.graph.nodes))}

    def read(self, rank: Rank) -> bool:
        """Whether all that a program of the same rank does is done here; then ``rank`` is as if it had been run."""
        if rank.rank != self.known.rank or rank.changed:
            return False
        given, same, last = iter(rank.inputs), dict[fx.Node, fx.Node](), -1
        for node in rank.module.graph.nodes:
            if node.op == "output":
                rank.result = node
                break
            found = self._inputs.get(each.value) if node.op == "placeholder" and (each := next(given, None)) else None
            if node.op == "call_function" and all(operand in same for operand in node.all_input_nodes):
                found = self._calls.get(_call(node, same))
            if found is None:
                return False
            same[node], rank.items[node] = found, self.known.items[found]
            if node.target in COLLECTIVES:
                rank.asked.append(node)
            if _speaks(node):
                if self._asked[found] <= last:
                    return False
                last = self._asked[found]
            if node.target in IDENTITY:
                source: Any = node.args[0]
                rank.root[node] = rank.root.get(source, source)
        return rank.result is not None


def _speaks(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in COLLECTIVES | MESSAGES


def _call(node: fx.Node, same: Mapping[fx.Node, fx.Node]) -> Hashable:
    return node.target, _key(node.args, same), _key(node.kwargs, same)


def _key(arg: Any, same: Mapping[fx.Node, fx.Node]) -> Hashable:
    """Equal for equal arguments only: operands by what they are, constants with their types."""
    if isinstance(arg, fx.Node):
        return same[arg]
    if isinstance(arg, (list, tuple)):
        return tuple([_key(each, same) for each in arg])
    if isinstance(arg, dict):
        return tuple([(name, _key(each, same)) for name, each in arg.items()])
    return type(arg), arg if isinstance(arg, Hashable) else repr(arg)
