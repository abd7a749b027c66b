"""Damage to loops and schedule actions of one rank's program."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from shardfx.ir.ops.loop import loop_ops
from shardfx.ir.registry import PROGRAM_OPS

Damage = Callable[[fx.Graph], object]


def calls(graph: fx.Graph, name: str) -> list[fx.Node]:
    """The calls of a row of programs, in order."""
    return [node for node in graph.nodes if node.target is PROGRAM_OPS[name].function]


def reordered(change: Callable[[list[str]], list[str]]) -> Damage:
    """Schedule actions in another order."""

    def damage(graph: fx.Graph) -> None:
        begin = next(node for node in calls(graph, "loop.begin") if len(node.args) > 3)
        begin.update_arg(3, " ".join(change(str(begin.args[3]).split())))

    return damage


def an_iteration_less(graph: fx.Graph) -> None:
    begin = calls(graph, "loop.begin")[-1]
    begin.args = (begin.args[0], begin.args[1] - 1, begin.args[2])  # type: ignore[operator]


def added_twice(graph: fx.Graph) -> None:
    node = calls(graph, "loop.add")[-1]
    with graph.inserting_after(node):
        again = graph.call_function(loop_ops.add, (node, node.args[1]))
    again.meta = dict(node.meta)
    node.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)


def stale(graph: fx.Graph) -> None:
    calls(graph, "memory.filled")[-1].update_arg(1, 1.0)
