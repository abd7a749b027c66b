"""Is everything where the stages of a pipeline need it?"""

from __future__ import annotations

from dataclasses import dataclass, field

from shardfx.ir.graph import Graph, Input, Node, Output, OutputKind, Value
from shardfx.ir.ops import comm
from shardfx.ir.schedule.actions import Pipelined

from .complaint import Complaint

EVERYWHERE = (OutputKind.LOSS, OutputKind.RESULT, OutputKind.GUARD)
"""What every rank gets."""


def check_stages(graph: Graph, wrong: Complaint) -> None:
    """What a node takes is held where it is done: made there, or sent; outputs are where they belong."""
    if graph.pipeline is not None:
        _Stages(graph, graph.pipeline, wrong).check()


@dataclass
class _Stages:
    graph: Graph
    pipeline: Pipelined
    wrong: Complaint
    held: dict[Value, frozenset[int]] = field(default_factory=dict)
    """The coordinates along the axis of stages at which values are."""

    def check(self) -> None:
        for given in self.graph.inputs:
            self.held[given.value] = self._places(given, given.at)
        for node in self.graph.nodes:
            places = self._places(node, node.at)
            if node.op is comm.send:
                self._sent(node, places)
            else:
                for value in node.operands:
                    self._is_at(value, places, node)
            self.held.update(dict.fromkeys(node.outs, places))
        at = {given.name: self.held[given.value] for given in self.graph.inputs}
        for output in self.graph.outputs:
            everywhere = output.kind in EVERYWHERE or output.name not in at
            self._is_at(output.value, frozenset(self.pipeline.places(())) if everywhere else at[output.name], output)

    def _places(self, subject: Node | Input, at: tuple[int, ...]) -> frozenset[int]:
        stages = self.pipeline.schedule.stages
        if unknown := [stage for stage in at if stage not in stages]:
            self.wrong.fail(
                "there is no such stage", subject, expected=f"stages of 0 .. {stages[-1]}", got=f"stage {unknown[0]}"
            )
        return frozenset(self.pipeline.places(at))

    def _sent(self, node: Node, places: frozenset[int]) -> None:
        (value,), kwargs = node.operands, node.kwargs
        if list(kwargs["axes"]) != [self.pipeline.axis] or set(kwargs["places"]) != places:
            expected = f"places {sorted(places)} of axis {self.pipeline.axis!r}, as its stages are"
            got = f"places {list(kwargs['places'])} of {', '.join(kwargs['axes'])}"
            self.wrong.fail("a value is sent elsewhere than it is to be", node, expected=expected, got=got)
        self._is_at(value, frozenset([kwargs["origin"]]), node)

    def _is_at(self, value: Value, places: frozenset[int], user: Node | Output) -> None:
        if not places <= self.held[value]:
            axis = self.pipeline.axis
            self.wrong.fail(
                f"{self.wrong.name(value)} is used where it is not",
                user,
                expected=f"a value that is held at {axis} = {_some(places)}, or a comm.send of it",
                got=f"it is held at {axis} = {_some(self.held[value])}",
            )


def _some(places: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(places))) or "none"
