"""How often what is done: which nodes of a graph a rank does in turns, and how many times in a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shardfx.ir.graph import Graph, Node, Output
from shardfx.ir.mesh import Mesh
from shardfx.ir.program.looped.in_turns import Loop, in_turns, time_axes


@dataclass(frozen=True)
class Turns:
    """What is done in turns: by node the axes of its turns (the last ones, where it is done in several loops), and how
    many times it is done in all. What is not done in turns is not in it."""

    axes: dict[Node, tuple[str, ...]] = field(default_factory=dict)
    times: Counter[Node] = field(default_factory=Counter)

    @staticmethod
    def of(graph: Graph) -> Turns:
        """Of all nodes of a graph."""
        return Turns.among(graph.nodes, graph.outputs, graph.mesh)

    @staticmethod
    def among(nodes: Sequence[Node], outputs: Sequence[Output], mesh: Mesh) -> Turns:
        """Of the nodes that some outputs need."""
        made = Turns()
        if time_axes(mesh):
            for node, around in _walk(in_turns(nodes, outputs, mesh), ()):
                if around:
                    made.axes[node] = around
                    made.times[node] += mesh.extent(around)
        return made


def _walk(steps: Sequence[Node | Loop], around: tuple[str, ...]) -> Iterator[tuple[Node, tuple[str, ...]]]:
    for step in steps:
        if isinstance(step, Loop):
            yield from _walk(step.steps, (*around, step.axis))
        else:
            yield step, around
