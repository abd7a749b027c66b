"""Validation of a graph: well-formed, nodes match their ops, placements fit together.

It runs after every pass, so it is one walk; nodes alike are looked into once, and text is written only for the node
that is wrong::

    the graph is wrong after pass 'bucket-comm': %3 is used before it is defined
      where:    %4 = aten.relu(%3) : f32[64{dp}, 512]    @ layers.0.act  model.py:42
      expected: a value that an input or an earlier node defines
      got:      %3, which a later node defines
"""

from __future__ import annotations

from collections.abc import Hashable

from shardfx.ir.graph import Graph, Node, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.alike import alike, key_of
from shardfx.ir.ops.table import OwnOp
from shardfx.ir.rules.book import RuleBook

from .definitions import Definitions, check_outputs, check_stages
from .node_checks import Complaint, check_comm, check_shardings, check_types, check_values

SHARDED = "SHARDED"
"""The invariant that every value has a placement and every node a strategy."""
COMM_EXPLICIT = "COMM_EXPLICIT"
"""The invariant that operands are placed as their node needs them: all redistribution is in ``comm`` nodes."""


def validate_graph(graph: Graph, after: str | None = None, rules: RuleBook | None = None) -> None:
    """Raise for the first thing that is wrong with ``graph``; ``after`` names the pass that has just run.

    With ``rules`` the shardings and placements of nodes are checked against the rules of their ops.

    Raises:
        Error: a value is used before it is defined, two nodes share a result, a result is not what its op gives, a
            placement does not fit its tensor or its mesh; once ``SHARDED`` is established, a node has no strategy, or
            one that its op's rule does not allow; a node gets (once ``COMM_EXPLICIT`` is) or gives another placement
            than its strategy says; a comm op has other keywords than it takes, or does not lead from its operand's
            placement to its result's; an output leaves otherwise than it must, partial for example.
    """
    Validator(rules).check(graph, after)


class Validator:
    """Validates graphs incrementally: nodes that were valid before are cached."""

    def __init__(self, rules: RuleBook | None = None) -> None:
        self._rules = rules
        self._right: dict[tuple[Mesh, bool, bool], set[Hashable]] = {}
        self._seen: dict[tuple[Mesh, bool, bool], dict[Hashable, list[object]]] = {}
        """A cheaper cache of the same nodes, keyed by the identity of their types, placements and strategies. It keeps
        these objects alive, so that no other can get their ids."""
        self._typed: set[Hashable] = set()

    def check(self, graph: Graph, after: str | None = None) -> None:
        """Raise for the first thing that is wrong with ``graph``: see :func:`validate_graph`."""
        wrong = Complaint(graph, after)
        placed, explicit = SHARDED in graph.established, COMM_EXPLICIT in graph.established
        state = graph.mesh, placed, explicit
        right, seen = self._right.setdefault(state, set()), self._seen.setdefault(state, {})
        definitions = Definitions(graph, wrong, placed)
        for inp in graph.inputs:
            definitions.input(inp)
        for node in graph.nodes:
            operands = node.operands
            definitions.node(node, operands)
            identity = key_of(node, _objects), id(node.strategy), tuple(node.attrs.items()) if node.attrs else ()
            if identity not in seen:
                key = alike(node, placed=True), tuple(node.attrs.items())
                if key not in right:
                    self._node(node, operands, graph, wrong)
                    right.add(key)
                seen[identity] = [node.strategy, *((value.type, value.spec) for value in (*operands, *node.outs))]
        for output in graph.outputs:
            definitions.output(output)
        if explicit:
            check_outputs(graph, wrong)
            check_stages(graph, wrong)

    def _node(self, node: Node, operands: list[Value], graph: Graph, wrong: Complaint) -> None:
        placed, explicit = SHARDED in graph.established, COMM_EXPLICIT in graph.established
        key = alike(node)
        if key not in self._typed:
            check_types(node, wrong)
            self._typed.add(key)
        made = node.strategy
        if made is not None:
            check_values(node, operands, made, explicit, wrong)
        elif placed:
            expected = "a strategy: how it is sharded, what it needs and gives"
            wrong.fail("a node has no strategy", node, expected, "none")
        if isinstance(node.op, OwnOp):
            check_comm(node, node.op, operands, graph.mesh, wrong)
        elif made is not None and placed and self._rules is not None:
            check_shardings(node, made, self._rules, graph.mesh, wrong)


def _objects(value: Value) -> Hashable:
    """A key of a value by the identity of its type and its placement."""
    return id(value.type), id(value.spec)
