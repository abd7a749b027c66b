"""How much of a graph is drawn: the finest detail that has at most so many boxes.

    every op                       a small graph
    ops, with views hidden         a view or transpose is drawn as part of the op that uses it
    modules closed, deepest first  communication stays outside of its module,
                                   or else is a line of the closed module
    slices of the program          for a graph without modules

Small modules without a matrix product (norms, activations) are closed first, where everything does not fit easily.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from shardfx.ir.graph import Graph, Node
from shardfx.ir.ops.traits import base_name

from .boxes import Box, Kind, Lane, Picture
from .build import Detail, SceneBuilder
from .edges import RESULTS, wire
from .flow import flow, hosts
from .fold import ENDS, Module
from .untangle import untangle

ALL_OPS = 48
"""Up to so many boxes every single op is drawn."""
ALL_MODULES = 90
"""Up to so many boxes all modules are drawn open, those without heavy ops (norms, activations) too."""
SLICES = 40
"""The most boxes a lane of a graph without modules is drawn as."""
WRAPPER = 0.6
"""A module at the top that holds such a share of all boxes is not drawn itself: it says nothing."""


def show(graph: Graph, limit: int = 300) -> Picture:
    """The finest picture of ``graph`` that has at most ``limit`` boxes."""
    flown = flow(graph)
    host = hosts(flown)
    deepest = max((_depth(lane.root) for lane in flown.lanes), default=0)
    depths = range(deepest, 0, -1)
    closing = [Detail(depth=depth, comm=comm) for depth in depths for comm in (True, False)]
    for level in [Detail(views=True, quiet=False), Detail(quiet=False), Detail(), *closing]:
        most = min(limit, ALL_OPS if level.views else limit if level.quiet else ALL_MODULES)
        builder = SceneBuilder(flown, level, {} if level.views else host)
        if builder.at_least() <= most:
            picture = assemble(builder)
            if picture.size <= most:
                return picture
    ends = sum(given.kind in ENDS for given in graph.inputs) + sum(end.kind in RESULTS for end in graph.outputs)
    slices = max(1, min(SLICES, (limit - ends) // max(1, len(flown.lanes))))
    return assemble(SceneBuilder(flown, Detail(quiet=False, depth=1, comm=False, slices=slices), host))


def _depth(module: Module) -> int:
    return 1 + max((_depth(child) for child in module.children if isinstance(child, Module)), default=-1)


def assemble(builder: SceneBuilder) -> Picture:
    """The picture of one level of detail."""
    lanes = builder.lanes()
    unwrap(lanes)
    for lane in lanes:
        if builder.level.slices is None:
            lane.boxes = untangle(lane.boxes, builder.flow, builder.order)
        for box in lane.boxes:
            name(box, "")
            mark_turns(box, builder.flow.turns, ())
    return wire(builder.flow, lanes)


def mark_turns(box: Box, turns: Mapping[Node, tuple[str, ...]], around: tuple[str, ...]) -> None:
    """Say of the outermost boxes that are wholly in turns which turns these are."""
    inside = [node for leaf in box.leaves() for node in leaf.nodes]
    shared = [axis for axis in turns.get(inside[0], ()) if all(axis in turns.get(node, ()) for node in inside)]
    box.turns = tuple(axis for axis in shared if axis not in around)
    for child in box.children:
        mark_turns(child, turns, (*around, *box.turns))


def unwrap(lanes: list[Lane]) -> None:
    """Take away the boxes around nearly everything: the model itself, the wrapper around it."""
    while True:
        total = sum(1 for lane in lanes for box in lane.boxes for _ in box.walk())
        inside: Counter[str] = Counter()
        for lane in lanes:
            for box in lane.boxes:
                if is_wrapper(box):
                    inside[box.path] += sum(1 for _ in box.walk())
        wrappers = {path for path, number in inside.items() if number > WRAPPER * total}
        if not wrappers:
            return
        for lane in lanes:
            lane.boxes = [
                box
                for outer in lane.boxes
                for box in (outer.children if outer.kind is Kind.OPEN and outer.path in wrappers else [outer])
            ]


def is_wrapper(box: Box) -> bool:
    """Whether a box may be nothing but a name around other modules."""
    numbered = box.path.rpartition(".")[2].isdigit()
    return box.kind is Kind.OPEN and box.count == 1 and not numbered and any(c.path != box.path for c in box.children)


def name(box: Box, around: str) -> None:
    """Write what a box is: the module seen from the one around it, the op without its namespace."""

    def seen(path: str) -> str:
        return "" if path == around else path[len(around) + 1 :] if around and path.startswith(around + ".") else path

    if box.kind in (Kind.OPEN, Kind.CLOSED):
        ops = len(box.inside)
        box.title, box.label = box.title or seen(box.label or box.path) or f"{ops} op{'s' * (ops > 1)}", ""
    else:
        box.title, box.label = base_name(box.main), seen(box.label)
    for child in box.children:
        name(child, box.path)
