"""What of a graph in stages one rank does, and in which order: its row of the schedule, as units of its turns.

    pipeline pp, mb
    row "F0.0 F0.1 B0.0 B0.1"            the rank at pp=0: the nodes of stage 0, forward as F0, backward as B0
    row "F1.0 B1.0 F1.1 B1.1"

What leaves the program from each turn, and comes from a later stage, is received behind all turns, in a unit ``O``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardfx.ir.graph import Graph, Input, Node, Output, Phase, Value
from shardfx.ir.ops import comm
from shardfx.ir.schedule.pipelined import Pipelined

from .in_turns import Loop, nodes_of
from .in_units import in_units

OUT = "O"
"""The unit in which a rank receives what it has no part in, and gives out."""


def of_stages(steps: Sequence[Node | Loop], graph: Graph, coords: Mapping[str, int]) -> list[Node | Loop]:
    """What of all steps the rank at ``coords`` does, in the order of its row."""
    if graph.pipeline is None:
        return list(steps)
    found: list[Node | Loop] = []
    for step in steps:
        if isinstance(step, Node):
            if is_done(step, graph, coords):
                found.append(step)
        elif inside := of_stages(step.steps, graph, coords):
            ends = frozenset(value for value in step.ends if graph.is_here(made_at(value), coords))
            loop = Loop(step.axis, tuple(inside), ends)
            meet = step.axis == graph.pipeline.time and any(node.op is comm.send for node in nodes_of([step]))
            found.append(_Units(graph.pipeline, coords[graph.pipeline.axis]).of(loop) if meet else loop)
    return found


def ends_here(
    graph: Graph, inputs: Sequence[Input], outputs: Sequence[Output], coords: Mapping[str, int]
) -> tuple[list[Input], list[Output]]:
    """Those of some inputs and outputs that the rank at ``coords`` holds, and gives."""
    here = [given for given in inputs if graph.is_here(given.at, coords)]
    return here, [output for output in outputs if graph.is_here(made_at(output.value), coords)]


def is_done(node: Node, graph: Graph, coords: Mapping[str, int]) -> bool:
    """Whether the rank at ``coords`` has a part in a node: of a send also where its value comes from."""
    return graph.is_here(node.at, coords) or (
        node.op is comm.send and any(graph.is_here(made_at(value), coords) for value in node.operands)
    )


def made_at(value: Value) -> tuple[int, ...]:
    """The stages in which a value is made; none: in all."""
    return value.node.at if value.node is not None else ()


@dataclass(frozen=True)
class _Units:
    """The units of the turns of a rank."""

    pipeline: Pipelined
    place: int

    def of(self, loop: Loop) -> Loop:
        """The loop in units, by the rank's row."""
        units = {node: self._unit(node) for node in loop.nodes()}
        there = set(units.values())
        words = [str(action) for action in self.pipeline.schedule.rows[self.place] if action.kind != "U"]
        words = [word for word in words if word.partition(".")[0] in there]
        words += [f"{OUT}.{turn}" for turn in self.pipeline.schedule.turns if OUT in there]
        return in_units(loop, units.__getitem__, words)

    def _unit(self, node: Node) -> str:
        """In which unit a node is done: of several stages of this rank, in the first."""
        if node.op is comm.send and node.kwargs["origin"] != self.place:
            return self._received(node)
        if node.op is comm.send:
            (maker,) = (value.node for value in node.operands)
            assert maker is not None
            return self._named(self._here(maker.at), maker.phase)
        return self._named(self._here(node.at), node.phase)

    def _received(self, node: Node) -> str:
        (value,) = node.operands
        assert value.node is not None
        origin, here = value.node.at[0], self._here(node.at)
        if not node.at:
            return OUT
        if node.phase is Phase.FORWARD:
            later = [stage for stage in here if stage >= origin]
            return self._named(later, Phase.FORWARD) if later else self._named(here, Phase.BACKWARD)
        earlier = [stage for stage in here if stage <= origin]
        return self._named(earlier, Phase.BACKWARD) if earlier else OUT

    def _here(self, at: Iterable[int]) -> list[int]:
        homes = self.pipeline.homes
        return [stage for stage in (at or range(len(homes))) if homes[stage] == self.place]

    def _named(self, stages: Sequence[int], phase: Phase) -> str:
        return f"F{min(stages)}" if phase is Phase.FORWARD else f"B{max(stages)}"
