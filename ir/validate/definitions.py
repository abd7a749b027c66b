"""Checks of value definitions: unique, before their uses, on their stages, with placements that fit the shapes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NoReturn

from shardfx.ir.graph import Graph, Input, Node, Output, OutputKind, Value, op_name
from shardfx.ir.ops import comm
from shardfx.ir.ops.pools.pool_ops import pool_of
from shardfx.ir.ops.table import OwnOp
from shardfx.ir.schedule.actions import Pipelined
from shardfx.ir.spec import Spec
from shardfx.ir.text.printer import Printer

from .node_checks import Complaint


@dataclass
class Definitions:
    """The values defined so far in a walk over a graph.

    ``fitting`` are the pairs of placement and shape that were found to fit (by the placement's id).
    """

    graph: Graph
    wrong: Complaint
    placed: bool
    defined: set[Value] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    fitting: set[tuple[int, tuple[int, ...]]] = field(default_factory=set)
    away: dict[Value, str] = field(default_factory=dict)
    """The memory pool of values outside the device's memory."""
    stored: dict[str, str] = field(default_factory=dict)
    """The pool of each input."""

    def input(self, inp: Input) -> None:
        """Define an input's value, and check that its name is unique."""
        if inp.name in self.names:
            self.wrong.fail("two inputs have one name", inp, "a name of its own", inp.name)
        if inp.value in self.defined:
            self.wrong.fail("two inputs share one value", inp, "a value of its own", inp.value)
        if inp.value.node is not None:
            maker = Printer(self.graph).node(inp.value.node)
            self.wrong.fail("an input is the result of a node", inp, "an input without a node", maker)
        self.names.add(inp.name)
        self.stored[inp.name] = pool = inp.pool.partition(":")[0]
        if pool:
            self.away[inp.value] = pool
        self._define(inp.value, inp)

    def node(self, node: Node, operands: list[Value]) -> None:
        """Check that a node's operands are defined, and define its results."""
        for value in operands:
            if value not in self.defined:
                self._undefined(value, node)
        self._pools(node, operands)
        for index, result in enumerate(node.results):
            if result is not None:
                self._result(node, index, result)

    def output(self, output: Output) -> None:
        """Check that an output's value is defined."""
        if output.value not in self.defined:
            self._undefined(output.value, output)
        lies, belongs = self.away.get(output.value, ""), self.stored.get(output.name, "")
        if lies != (belongs if output.kind.is_given_away else ""):
            what = f"{self.wrong.name(output.value)} leaves in another pool of memory than it belongs to"
            self.wrong.fail(what, output, belongs or "the device's memory", lies or "the device's memory")

    def _pools(self, node: Node, operands: list[Value]) -> None:
        """Check memory pools: offloaded values are fetched before use; a node's operands and results share one pool."""
        own = node.op if isinstance(node.op, OwnOp) else None
        carries = own is not None and (bool(own.pool) or own.fetches)
        there = own.fetches if own is not None and carries else all(value in self.away for value in operands)
        for value in operands:
            if (value in self.away) != there:
                what = f"{op_name(node.op)} takes {self.wrong.name(value)}, which lies in another pool of memory"
                expected = "memory.to_device(...) of it" if value in self.away else "an offloaded value"
                self.wrong.fail(what, node, expected, self.away.get(value, "the device's memory"))
        pool = pool_of(node, self.away)
        if pool:
            self.away.update(dict.fromkeys(node.outs, pool))

    def _result(self, node: Node, index: int, result: Value) -> None:
        if result.node is not node or result.index != index:
            other = "" if result.node is node else "another "
            maker = "no node" if result.node is None else other + op_name(result.node.op)
            what = f"{self.wrong.name(result)} does not point back to its node"
            self.wrong.fail(what, node, f"result {index} of this node", f"result {result.index} of {maker}")
        if result in self.defined:
            name = self.wrong.name(result)
            self.wrong.fail(f"{name} is defined twice", node, "one node, once in the graph", result)
        self._define(result, node)

    def _define(self, value: Value, place: Node | Input) -> None:
        self.defined.add(value)
        if value.spec is not None:
            key = id(value.spec), value.type.shape
            if key not in self.fitting:
                self._fits(value.spec, value.type.shape, value, place)
                self.fitting.add(key)
        elif self.placed:
            self.wrong.fail(f"{self.wrong.name(value)} has no placement", place, "one for every value", "none")
        if value.hint is not None:
            self._fits(value.hint, value.type.shape, value, place)

    def _undefined(self, value: Value, place: Node | Output) -> NoReturn:
        later = any(value in node.outs for node in self.graph.nodes)
        made = "which a later node defines" if later else "which nothing in the graph defines"
        name = self.wrong.name(value)
        what = f"{name} is used {'before it is' if later else 'but never'} defined"
        self.wrong.fail(what, place, "a value that an input or an earlier node defines", f"{name}, {made}")

    def _fits(self, spec: Spec, shape: tuple[int, ...], value: Value, place: Node | Input) -> None:
        """Check that a placement has the tensor's dims, and only axes of the mesh."""
        if len(spec.dims) != len(shape):
            what = f"the placement of {self.wrong.name(value)} has another number of dims"
            self.wrong.fail(what, place, f"{len(shape)} dims, for shape {shape}", f"{len(spec.dims)} dims, {spec}")
        known = self.graph.mesh.names
        unknown = next((axis for axis in (*spec.axes, *spec.partial_axes) if axis not in known), None)
        if unknown is not None:
            what = f"the placement of {self.wrong.name(value)} names an unknown mesh axis"
            self.wrong.fail(what, place, f"one of {', '.join(known)}", unknown)
        for dim, sharding in enumerate(spec.dims):
            if sharding.parts:
                product = math.prod(part.size for part in sharding.parts)
                if product != shape[dim] or sharding.axes != tuple(
                    axis for part in sharding.parts for axis in part.axes
                ):
                    what = f"the placement of {self.wrong.name(value)} does not fit dim {dim}"
                    expected = f"parts whose product is {shape[dim]}, sharded over {{{','.join(sharding.axes)}}}"
                    self.wrong.fail(what, place, expected, sharding.text(shape[dim]))


def check_outputs(graph: Graph, wrong: Complaint) -> None:
    """Check outputs: a gradient is placed as its parameter is stored, none is partial."""
    for output, spec in graph.output_specs().items():
        if output.value.spec != spec:
            _wrong_output(output, spec, wrong)


def _wrong_output(output: Output, spec: Spec, wrong: Complaint) -> None:
    made = output.value.spec
    how = " as a partial sum" if made is not None and made.partial else ""
    what = f"{output.kind.value} {output.name!r} leaves the program otherwise than it must{how}"
    expected, got = spec.text(output.value.shape), made.text(output.value.shape) if made is not None else "no placement"
    wrong.fail(what, output, expected, got)


EVERYWHERE = (OutputKind.LOSS, OutputKind.RESULT, OutputKind.GUARD, OutputKind.OVERFLOW)
"""Kinds of outputs that every rank gets."""


def check_stages(graph: Graph, wrong: Complaint) -> None:
    """Check stages: a node's operands are made or sent where it runs; outputs are where they belong."""
    if graph.pipeline is not None:
        _Stages(graph, graph.pipeline, wrong).check()


@dataclass
class _Stages:
    graph: Graph
    pipeline: Pipelined
    wrong: Complaint
    places: dict[Value, frozenset[int]] = field(default_factory=dict)
    """The coordinates on the stage axis at which values are available."""

    def check(self) -> None:
        for inp in self.graph.inputs:
            self.places[inp.value] = self._places_of(inp, inp.at)
        for node in self.graph.nodes:
            places = self._places_of(node, node.at)
            if node.op is comm.send:
                self._sent(node, places)
            else:
                for value in node.operands:
                    self._is_at(value, places, node)
            self.places.update(dict.fromkeys(node.outs, places))
        at = {inp.name: self.places[inp.value] for inp in self.graph.inputs}
        for output in self.graph.outputs:
            everywhere = output.kind in EVERYWHERE or output.name not in at
            self._is_at(output.value, frozenset(self.pipeline.places(())) if everywhere else at[output.name], output)

    def _places_of(self, subject: Node | Input, at: tuple[int, ...]) -> frozenset[int]:
        stages = self.pipeline.schedule.stages
        if unknown := [stage for stage in at if stage not in stages]:
            self.wrong.fail("there is no such stage", subject, f"stages of 0 .. {stages[-1]}", f"stage {unknown[0]}")
        return frozenset(self.pipeline.places(at))

    def _sent(self, node: Node, places: frozenset[int]) -> None:
        (value,), kwargs = node.operands, node.kwargs
        if list(kwargs["axes"]) != [self.pipeline.axis] or set(kwargs["places"]) != places:
            expected = f"places {sorted(places)} of axis {self.pipeline.axis!r}, as its stages are"
            got = f"places {list(kwargs['places'])} of {', '.join(kwargs['axes'])}"
            self.wrong.fail("a value is sent elsewhere than it is to be", node, expected, got)
        self._is_at(value, frozenset([kwargs["origin"]]), node)

    def _is_at(self, value: Value, places: frozenset[int], user: Node | Output) -> None:
        if not places <= self.places[value]:
            axis = self.pipeline.axis
            what = f"{self.wrong.name(value)} is used where it is not"
            expected = f"a value that is at {axis} = {_some(places)}, or a comm.send of it"
            self.wrong.fail(what, user, expected, f"it is at {axis} = {_some(self.places[value])}")


def _some(places: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(places))) or "none"
