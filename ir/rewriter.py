"""The one way to change a graph, and what drops dead nodes.

rewriter = Rewriter(graph)
rewriter.before(node, Rewriter.make(aten.neg.default, (x,), x.type, like=node))
rewriter.apply()
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .graph import Graph, Node, Output, Phase, Value, substitute
from .spec import TensorType


class Rewriter:
    """The one way to change a graph: collect the changes, then :meth:`apply` them in one walk.

    Example::

        rewriter = Rewriter(graph)
        double = rewriter.before(node, Rewriter.make(aten.mul.Tensor, (x, 2), x.type, like=node))
        rewriter.replace(x, double.outs[0], users=[node])
        rewriter.apply()
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._before: dict[Node, list[Node]] = {}
        self._after: dict[Node | None, list[Node]] = {}
        self._end: list[Node] = []
        self._erased: set[Node] = set()
        self._global: dict[Value, Value] = {}
        self._local: dict[tuple[Value, Node | Output], Value] = {}

    @staticmethod
    def make(
        op: Any,
        args: tuple[Any, ...],
        types: TensorType | list[TensorType | None],
        *,
        like: Node | None = None,
        kwargs: dict[str, Any] | None = None,
        phase: Phase | None = None,
    ) -> Node:
        """A node that is not in the graph yet; phase, source and stage are those of ``like``."""
        node = Node(op, args, kwargs or {})
        if like is not None:
            node.phase, node.where, node.stage = like.phase, like.where, like.stage
        if phase is not None:
            node.phase = phase
        given = types if isinstance(types, list) else [types]
        node.results = [None if t is None else Value(t, node, i) for i, t in enumerate(given)]
        return node

    def before(self, anchor: Node, node: Node) -> Node:
        """Insert ``node`` just before ``anchor`` (after what was inserted there already)."""
        self._before.setdefault(anchor, []).append(node)
        return node

    def after(self, anchor: Node | None, node: Node) -> Node:
        """Insert ``node`` just after ``anchor``; None stands for the graph's inputs."""
        self._after.setdefault(anchor, []).append(node)
        return node

    def at_end(self, node: Node) -> Node:
        self._end.append(node)
        return node

    def erase(self, node: Node) -> None:
        self._erased.add(node)

    def replace(self, old: Value, new: Value, users: Iterable[Node | Output] | None = None) -> None:
        """Use ``new`` for ``old``: everywhere in the old graph, or in ``users`` only.

        A node that is inserted keeps what it was made with (``new`` may be made of ``old``), unless that is erased.
        """
        if users is None:
            self._global[old] = new
        else:
            for user in users:
                self._local[old, user] = new

    def apply(self) -> bool:
        """Make the changes; says whether there were any."""
        changed = bool(self._before or self._after or self._end or self._erased or self._global or self._local)
        if not changed:
            return False

        def final(value: Value) -> Value:
            while value in self._global:
                value = self._global[value]
            return value

        nodes: list[Node] = []

        def add(node: Node) -> None:
            for extra in self._before.get(node, ()):
                add(extra)
            if node not in self._erased:
                nodes.append(node)
            for extra in self._after.get(node, ()):
                add(extra)

        for extra in self._after.get(None, ()):
            add(extra)
        for node in self.graph.nodes:
            add(node)
        for extra in self._end:
            add(extra)
        old = set(self.graph.nodes)
        for node in nodes:

            def change(value: Value, node: Node = node) -> Value:
                if (value, node) in self._local:
                    return final(self._local[value, node])
                return final(value) if node in old or value.node in self._erased else value

            node.args = substitute(node.args, change)
            if node.kwargs:
                node.kwargs = {key: substitute(arg, change) for key, arg in node.kwargs.items()}
        for output in self.graph.outputs:
            output.value = final(self._local.get((output.value, output), output.value))
        self.graph.nodes = nodes
        return True


def dead_code(graph: Graph) -> bool:
    """Drop nodes whose results nothing uses. All our ops are pure, so that none is kept for an effect."""
    needed = {output.value for output in graph.outputs}
    kept = []
    for node in reversed(graph.nodes):
        if any(value in needed for value in node.outs):
            needed.update(node.operands)
            kept.append(node)
    changed = len(kept) != len(graph.nodes)
    graph.nodes = kept[::-1]
    return changed
