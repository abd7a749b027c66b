"""Is every value defined once and before it is used, and does its placement fit its shape and the mesh?"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NoReturn

from shardfx.ir.graph import Graph, Input, Node, Output, Value, op_name
from shardfx.ir.ops.pools.pool_ops import pool_of
from shardfx.ir.ops.table import OwnOp
from shardfx.ir.spec import Spec
from shardfx.ir.text.printer import Printer

from .complaint import Complaint


@dataclass
class Definitions:
    """The values that were defined so far in one walk over a graph.

    ``fitting`` are the pairs of placement and shape that were found to fit (by the placement's id).
    """

    graph: Graph
    wrong: Complaint
    placed: bool
    defined: set[Value] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    fitting: set[tuple[int, tuple[int, ...]]] = field(default_factory=set)
    away: dict[Value, str] = field(default_factory=dict)
    """In which pool values lie that are not in the device's memory."""
    stored: dict[str, str] = field(default_factory=dict)
    """The pool of each input."""

    def input(self, given: Input) -> None:
        """An input defines its value, under a name of its own."""
        if given.name in self.names:
            self.wrong.fail("two inputs have one name", given, expected="a name of its own", got=given.name)
        if given.value in self.defined:
            self.wrong.fail("two inputs share one value", given, expected="a value of its own", got=given.value)
        if given.value.node is not None:
            maker = Printer(self.graph).node(given.value.node)
            self.wrong.fail("an input is the result of a node", given, expected="an input without a node", got=maker)
        self.names.add(given.name)
        self.stored[given.name] = pool = given.pool.partition(":")[0]
        if pool:
            self.away[given.value] = pool
        self._define(given.value, given)

    def node(self, node: Node, operands: list[Value]) -> None:
        """A node uses what is defined, and defines its results."""
        for value in operands:
            if value not in self.defined:
                self._undefined(value, node)
        self._pools(node, operands)
        for index, result in enumerate(node.results):
            if result is not None:
                self._result(node, index, result)

    def output(self, output: Output) -> None:
        """An output is a value that is defined."""
        if output.value not in self.defined:
            self._undefined(output.value, output)
        lies, belongs = self.away.get(output.value, ""), self.stored.get(output.name, "")
        if lies != (belongs if output.kind.is_given_away else ""):
            self.wrong.fail(
                f"{self.wrong.name(output.value)} leaves in another pool of memory than it belongs to",
                output,
                expected=belongs or "the device's memory",
                got=lies or "the device's memory",
            )

    def _pools(self, node: Node, operands: list[Value]) -> None:
        """What lies beside the device is fetched; else all that a node takes lies there, and what it gives, too."""
        own = node.op if isinstance(node.op, OwnOp) else None
        carries = own is not None and (bool(own.pool) or own.fetches)
        there = own.fetches if own is not None and carries else all(value in self.away for value in operands)
        for value in operands:
            if (value in self.away) != there:
                self.wrong.fail(
                    f"{op_name(node.op)} takes {self.wrong.name(value)}, which lies in another pool of memory",
                    node,
                    expected="memory.to_device(...) of it" if value in self.away else "what was put away",
                    got=self.away.get(value, "the device's memory"),
                )
        pool = pool_of(node, self.away)
        if pool:
            self.away.update(dict.fromkeys(node.outs, pool))

    def _result(self, node: Node, index: int, result: Value) -> None:
        if result.node is not node or result.index != index:
            other = "" if result.node is node else "another "
            maker = "no node" if result.node is None else other + op_name(result.node.op)
            self.wrong.fail(
                f"{self.wrong.name(result)} does not point back to its node",
                node,
                expected=f"result {index} of this node",
                got=f"result {result.index} of {maker}",
            )
        if result in self.defined:
            name = self.wrong.name(result)
            self.wrong.fail(f"{name} is defined twice", node, expected="one node, once in the graph", got=result)
        self._define(result, node)

    def _define(self, value: Value, place: Node | Input) -> None:
        self.defined.add(value)
        if value.spec is not None:
            key = id(value.spec), value.type.shape
            if key not in self.fitting:
                self._fits(value.spec, value.type.shape, value, place)
                self.fitting.add(key)
        elif self.placed:
            self.wrong.fail(
                f"{self.wrong.name(value)} has no placement", place, expected="one for every value", got="none"
            )
        if value.hint is not None:
            self._fits(value.hint, value.type.shape, value, place)

    def _undefined(self, value: Value, place: Node | Output) -> NoReturn:
        later = any(value in node.outs for node in self.graph.nodes)
        made = "which a later node defines" if later else "which nothing in the graph defines"
        name = self.wrong.name(value)
        self.wrong.fail(
            f"{name} is used {'before it is' if later else 'but never'} defined",
            place,
            expected="a value that an input or an earlier node defines",
            got=f"{name}, {made}",
        )

    def _fits(self, spec: Spec, shape: tuple[int, ...], value: Value, place: Node | Input) -> None:
        """The placement has the tensor's dims, and its axes are the mesh's."""
        if len(spec.dims) != len(shape):
            self.wrong.fail(
                f"the placement of {self.wrong.name(value)} has another number of dims",
                place,
                expected=f"{len(shape)} dims, for shape {shape}",
                got=f"{len(spec.dims)} dims, {spec}",
            )
        known = self.graph.mesh.names
        unknown = next((axis for axis in (*spec.axes, *spec.partial_axes) if axis not in known), None)
        if unknown is not None:
            self.wrong.fail(
                f"the placement of {self.wrong.name(value)} names an unknown mesh axis",
                place,
                expected=f"one of {', '.join(known)}",
                got=unknown,
            )
        for dim, sharding in enumerate(spec.dims):
            if sharding.parts:
                product = math.prod(part.size for part in sharding.parts)
                if product != shape[dim] or sharding.axes != tuple(
                    axis for part in sharding.parts for axis in part.axes
                ):
                    self.wrong.fail(
                        f"the placement of {self.wrong.name(value)} does not fit dim {dim}",
                        place,
                        expected=f"parts whose product is {shape[dim]}, sharded over {{{','.join(sharding.axes)}}}",
                        got=sharding.text(shape[dim]),
                    )
