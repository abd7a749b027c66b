"""The verifier: is this graph a program, and do its placements fit together?

It runs after every pass, so it is one walk, and it writes text only for the node that is wrong::

    the graph is wrong after pass 'fuse-comm': %3 is used before it is defined
      where:    %4 = aten.relu(%3) : f32[64{dp}, 512]    @ layers.0.act  model.py:42
      expected: a value that an input or an earlier node defines
      got:      %3, which a later node defines
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from shardfx.ir.ops.table import OwnOp
from shardfx.ir.text.printer import Printer

from .errors import Error
from .graph import Graph, Input, Node, Output, Value, op_name
from .spec import Spec

COMM_EXPLICIT = "COMM_EXPLICIT"
"""Once this is established, every operand has the placement that its node needs."""


def validate_graph(graph: Graph, after: str | None = None) -> None:
    """Raise for the first thing that is wrong with ``graph``; ``after`` names the pass that has just run.

    Raises:
        Error: a value is used before it is defined, two nodes share a result, a placement does not fit its tensor or
            its mesh, a node gets (once communication is explicit) or gives another placement than its strategy says,
            or a comm op does not lead from its operand's placement to its result's.

    Example::

        verify_graph(graph, after="propagate")
    """
    _Walk(graph, after).run()


@dataclass
class _Walk:
    """One walk over a graph. ``fitting`` are the pairs of spec and shape that were found to fit (by their ids)."""

    graph: Graph
    after: str | None
    defined: set[Value] = field(default_factory=set)
    fitting: set[tuple[int, tuple[int, ...]]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.known = frozenset(self.graph.mesh.names)

    def run(self) -> None:
        names: set[str] = set()
        for given in self.graph.inputs:
            self._input(given, names)
        explicit = COMM_EXPLICIT in self.graph.established
        for node in self.graph.nodes:
            operands = node.operands
            for value in operands:
                if value not in self.defined:
                    self._undefined(value, node)
            for index, result in enumerate(node.results):
                if result is not None:
                    self._result(node, index, result)
            if node.strategy is not None:
                self._strategy(node, operands, explicit)
            if isinstance(node.op, OwnOp):
                self._comm(node, node.op, operands)
        for output in self.graph.outputs:
            if output.value not in self.defined:
                self._undefined(output.value, output)

    def _input(self, given: Input, names: set[str]) -> None:
        if given.name in names:
            self._fail("two inputs have one name", given, expected="a name of its own", got=given.name)
        if given.value in self.defined:
            self._fail("two inputs share one value", given, expected="a value of its own", got=given.value)
        if given.value.node is not None:
            maker = Printer(self.graph).node(given.value.node)
            self._fail("an input is the result of a node", given, expected="an input without a node", got=maker)
        names.add(given.name)
        self._define(given.value, given)

    def _result(self, node: Node, index: int, result: Value) -> None:
        if result.node is not node or result.index != index:
            other = "" if result.node is node else "another "
            maker = "no node" if result.node is None else other + op_name(result.node.op)
            self._fail(
                f"{self._name(result)} does not point back to its node",
                node,
                expected=f"result {index} of this node",
                got=f"result {result.index} of {maker}",
            )
        if result in self.defined:
            self._fail(
                f"{self._name(result)} is defined twice", node, expected="one node, once in the graph", got=result
            )
        self._define(result, node)

    def _define(self, value: Value, place: Node | Input) -> None:
        self.defined.add(value)
        if value.spec is not None:
            key = id(value.spec), value.type.shape
            if key not in self.fitting:
                self._placement(value.spec, value.type.shape, value, place)
                self.fitting.add(key)

    def _undefined(self, value: Value, place: Node | Output) -> NoReturn:
        later = any(value in node.outs for node in self.graph.nodes)
        made = "which a later node defines" if later else "which nothing in the graph defines"
        self._fail(
            f"{self._name(value)} is used {'before it is' if later else 'but never'} defined",
            place,
            expected="a value that an input or an earlier node defines",
            got=f"{self._name(value)}, {made}",
        )

    def _placement(self, spec: Spec, shape: tuple[int, ...], value: Value, place: Node | Input) -> None:
        """The spec has the tensor's dims, and its axes are the mesh's."""
        if len(spec.dims) != len(shape):
            self._fail(
                f"the placement of {self._name(value)} has another number of dims",
                place,
                expected=f"{len(shape)} dims, for shape {shape}",
                got=f"{len(spec.dims)} dims, {spec}",
            )
        for dim, cut in enumerate(spec.dims):
            for axis in cut.axes:
                if axis not in self.known:
                    self._unknown_axis(axis, value, place)
            if cut.parts:
                product = math.prod(part.size for part in cut.parts)
                if product != shape[dim] or cut.axes != tuple(axis for part in cut.parts for axis in part.axes):
                    self._fail(
                        f"the placement of {self._name(value)} does not fit dim {dim}",
                        place,
                        expected=f"parts whose product is {shape[dim]}, cut over {{{','.join(cut.axes)}}}",
                        got=cut.text(shape[dim]),
                    )
        for axis, _ in spec.partial:
            if axis not in self.known:
                self._unknown_axis(axis, value, place)

    def _unknown_axis(self, axis: str, value: Value, place: Node | Input) -> NoReturn:
        self._fail(
            f"the placement of {self._name(value)} names an unknown mesh axis",
            place,
            expected=f"one of {', '.join(self.graph.mesh.names)}",
            got=axis,
        )

    def _strategy(self, node: Node, operands: Sequence[Value], explicit: bool) -> None:
        strategy = node.strategy
        assert strategy is not None
        results = node.outs
        if len(strategy.operands) != len(operands) or len(strategy.results) != len(results):
            self._fail(
                "a strategy does not fit its node",
                node,
                expected=f"placements of {len(operands)} operands and {len(results)} results",
                got=f"placements of {len(strategy.operands)} operands and {len(strategy.results)} results",
            )
        for value, spec in zip(results, strategy.results, strict=True):
            if value.spec is not None and value.spec is not spec and value.spec != spec:
                self._fail(
                    f"{self._name(value)} is placed otherwise than its node's strategy gives it",
                    node,
                    expected=spec,
                    got=value.spec,
                )
        if explicit:
            for value, spec in zip(operands, strategy.operands, strict=True):
                if value.spec is not spec and value.spec != spec:
                    self._fail(
                        f"operand {self._name(value)} is placed otherwise than the node needs it",
                        node,
                        expected=spec,
                        got=value.spec or "no placement",
                    )

    def _comm(self, node: Node, op: OwnOp, operands: Sequence[Value]) -> None:
        """The op leads from the placement of operand k to that of result k."""
        mesh, axes = self.graph.mesh, tuple(node.kwargs.get("axes", ()))
        if not axes or len(set(axes)) != len(axes) or any(axis not in self.known for axis in axes):
            known = ", ".join(mesh.names)
            got = ", ".join(map(str, axes)) or "none"
            self._fail(f"the axes of {op} are not this mesh's", node, expected=f"axes=[...] of {known}", got=got)
        results = node.outs
        if len(results) != len(operands):
            got = f"{len(operands)} operands, {len(results)} results"
            self._fail(f"{op} does not have a result for each operand", node, expected="as many", got=got)
        for value, result in zip(operands, results, strict=True):
            if value.type != result.type:
                self._fail(f"{op} changes the type of {self._name(value)}", node, expected=value.type, got=result.type)
            if value.spec is None or result.spec is None:
                continue
            try:
                made = op.place(value.spec, value.shape, mesh, **node.kwargs)
            except (Error, TypeError) as error:
                needs, found = (error.expected, error.got) if isinstance(error, Error) else (None, error)
                self._fail(f"{op} cannot start from {self._name(value)}", node, expected=needs, got=found)
            if made != result.spec:
                text = result.spec.text(result.shape)
                self._fail(
                    f"{op} does not lead to {self._name(result)}", node, expected=made.text(value.shape), got=text
                )

    def _name(self, value: Value) -> str:
        return Printer(self.graph).use(value)

    def _fail(
        self, what: str, place: Node | Input | Output, *, expected: object = None, got: object = None
    ) -> NoReturn:
        printer = Printer(self.graph)
        if isinstance(place, Node):
            where = printer.node(place)
        elif isinstance(place, Input):
            where = printer.input(place)
        else:
            where = f"output {place.kind.value} {place.name}"
        raise Error(
            f"the graph is wrong{f' after pass {self.after!r}' if self.after else ''}: {what}",
            where=where,
            expected=expected,
            got=got,
            remedy=f"pass {self.after!r} left it so: mend it there" if self.after else None,
        )
