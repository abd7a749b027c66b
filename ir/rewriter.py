"""Graph rewriting (the one way to change a graph), and dead code elimination.

rewriter = Rewriter(graph, context.rules)
double = rewriter.before(node, rewriter.call(aten.mul.Tensor, x, 2, why="as an example"))
rewriter.replace(x, double.outs[0], users=[node])
rewriter.apply()
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from .builder import infer
from .errors import Error
from .graph import Attr, Graph, Node, Output, Phase, Strategy, Value, op_name, substitute
from .mesh import Mesh
from .registry import GRAPH_OPS
from .spec import TensorType


class Strategies(Protocol):
    """The provider of node strategies: a :class:`shardfx.ir.rules.book.RuleBook`."""

    def as_placed(self, node: Node, mesh: Mesh) -> Strategy:
        """The strategy of a node whose operands stay as they are placed, as far as its rule allows."""


class Rewriter:
    """Collects changes of a graph, and then :meth:`apply` s them in one walk.

    :meth:`call` and :meth:`comm` make nodes that are complete, :meth:`make` one of which all is said by hand. What was
    made is in the graph once it was put somewhere: :meth:`before`, :meth:`after` a node, or :meth:`at_end`. ``rules``
    are needed to call ops in a graph that is placed already.
    """

    def __init__(self, graph: Graph, rules: Strategies | None = None) -> None:
        self.graph = graph
        self._rules = rules
        self._before: dict[Node, list[Node]] = {}
        self._after: dict[Node | None, list[Node]] = {}
        self._end: list[Node] = []
        self._erased: set[Node] = set()
        self._global: dict[Value, Value] = {}
        self._local: dict[tuple[Value, Node | Output], dict[int | None, Value]] = {}
        """Of a user's operands, by their places; None: of all."""

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
        """A new node, not yet in the graph; phase, source and stage are those of ``like``."""
        node = Node(op, args, kwargs or {})
        if like is not None:
            node.phase, node.where, node.at = like.phase, like.where, like.at
        if phase is not None:
            node.phase = phase
        result_types = types if isinstance(types, list) else [types]
        node.results = [None if t is None else Value(t, node, i) for i, t in enumerate(result_types)]
        return node

    def call(
        self,
        op: Any,
        *args: Any,
        like: Node | None = None,
        why: str = "",
        attrs: Mapping[str, Attr] | None = None,
        **kwargs: Any,
    ) -> Node:
        """A new node that calls ``op``, with inferred result types, and placed where the graph is.

        Operands stay as they are placed: the op is sharded as they are, as far as its rule allows. ``like`` gives
        phase, source and stage; if it is left out, the node that makes the first operand does.

        Args:
            op: an op such as ``torch.ops.aten.mul.Tensor``.
            args: as the op's schema has them, with Values for tensors.
            attrs: the node's attributes; ``{"approximate": True}`` lets partial sums pass where they round.

        Raises:
            Error: the op does not take these arguments; or communication is explicit, and the op needs an operand
                placed otherwise than it is.
        """
        try:
            types = infer(op, args, kwargs)
        except Exception as error:
            what = f"{op_name(op)} does not take these arguments"
            expected = getattr(op, "_schema", "an op such as torch.ops.aten.mul.Tensor")
            raise Error(what, expected=expected, got=f"{type(error).__name__}: {error}") from error
        node = self.make(op, args, types, kwargs=kwargs)
        _stand_like(node, like)
        node.why, node.attrs = why, dict(attrs or {})
        self.place(node)
        return node

    def comm(self, op: Any, *values: Value, like: Node | None = None, why: str = "", **keywords: Any) -> Node:
        """A new comm node; the placement of its results follows from the op and its keywords.

        Raises:
            Error: there is no such op, the value is not placed, or the op cannot start from where it is.
        """
        row = GRAPH_OPS.get(op if "." in op else f"comm.{op}") if isinstance(op, str) else op
        if row is None:
            raise Error(f"there is no comm op {op!r}", expected=f"one of {', '.join(GRAPH_OPS)}", got=op)
        node = self.make(row, values, [value.type for value in values], kwargs=keywords)
        _stand_like(node, like)
        needs = []
        for value, result in zip(values, node.outs, strict=True):
            if value.spec is None:
                raise Error(f"{row} of a value without placement", where=repr(value), remedy="run behind propagate")
            needs.append(value.spec)
            result.spec = row.place(value.spec, value.shape, self.graph.mesh, **keywords)
        gives = tuple(result.spec for result in node.outs if result.spec is not None)
        node.strategy = Strategy(tuple(needs), gives)
        node.why = why or f"{needs[0]} becomes {gives[0]}"
        return node

    def place(self, node: Node) -> None:
        """In a placed graph: give the node the strategy that follows from its operands' placements."""
        if "SHARDED" not in self.graph.established:
            return
        if self._rules is None:
            what = f"a placed graph cannot have {op_name(node.op)} without a rule"
            raise Error(what, expected="the op rules", got="none", remedy="Rewriter(graph, context.rules)")
        node.strategy = self._rules.as_placed(node, self.graph.mesh)
        for value, spec in zip(node.outs, node.strategy.results, strict=True):
            value.spec = spec
        for value, spec in zip(node.operands, node.strategy.operands, strict=True):
            if value.spec != spec and "COMM_EXPLICIT" in self.graph.established:
                raise Error(
                    f"{op_name(node.op)} needs {value!r} placed otherwise than it is",
                    where=str(node.where),
                    expected=spec.text(value.shape),
                    got=value.spec.text(value.shape) if value.spec is not None else "no placement",
                    remedy="bring it there first, with rewriter.comm(...)",
                )

    def before(self, anchor: Node, node: Node) -> Node:
        """Insert ``node`` just before ``anchor`` (after what was inserted there already)."""
        self._before.setdefault(anchor, []).append(node)
        return node

    def after(self, anchor: Node | None, node: Node) -> Node:
        """Insert ``node`` just after ``anchor``; None stands for the graph's inputs."""
        self._after.setdefault(anchor, []).append(node)
        return node

    def at_end(self, node: Node) -> Node:
        """Insert ``node`` behind all others."""
        self._end.append(node)
        return node

    def erase(self, node: Node) -> None:
        """Remove ``node``; uses of its results must be replaced (:meth:`replace`)."""
        self._erased.add(node)

    def replace(
        self, old: Value, new: Value, users: Iterable[Node | Output] | None = None, at: Iterable[int] | None = None
    ) -> None:
        """Use ``new`` for ``old``: everywhere in the old graph, or in ``users`` only; ``at`` some of their operands.

        A node that is inserted keeps what it was made with (``new`` may be made of ``old``), unless that is erased.
        """
        if users is None:
            self._global[old] = new
        else:
            places = [None] if at is None else list(at)
            for user in users:
                self._local.setdefault((old, user), {}).update(dict.fromkeys(places, new))

    def apply(self) -> bool:
        """Apply the collected changes; returns whether there were any."""
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
            numbers = itertools.count()

            def change(value: Value, node: Node = node, places: Iterator[int] = numbers) -> Value:
                place, told = next(places), self._local.get((value, node), {})
                if place in told or None in told:
                    return final(told[place if place in told else None])
                return final(value) if node in old or value.node in self._erased else value

            node.args = substitute(node.args, change)
            if node.kwargs:
                node.kwargs = {key: substitute(arg, change) for key, arg in node.kwargs.items()}
        for output in self.graph.outputs:
            output.value = final(next(iter(self._local.get((output.value, output), {}).values()), output.value))
        self.graph.nodes = nodes
        return True


def _stand_like(node: Node, like: Node | None) -> None:
    """Copy phase, source and stage from ``like``, or from the first operand's maker."""
    like = like or next((value.node for value in node.operands if value.node is not None), None)
    if like is not None:
        node.phase, node.where, node.at = like.phase, like.where, like.at


def dead_code(graph: Graph) -> bool:
    """Dead code elimination: drop nodes without used results. All our ops are pure, so none is kept for an effect."""
    needed = {output.value for output in graph.outputs}
    kept = []
    for node in reversed(graph.nodes):
        if any(value in needed for value in node.outs):
            needed.update(node.operands)
            kept.append(node)
    changed = len(kept) != len(graph.nodes)
    graph.nodes = kept[::-1]
    return changed
