"""What is drawn: boxes inside boxes, and the edges between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from shardfx.ir.graph import Graph, Node, Phase, Value
from shardfx.ir.ops.traits import is_view

TIMES = "\N{MULTIPLICATION SIGN}"


class Kind(Enum):
    """What a box stands for."""

    OP = "op"
    VIEW = "view"
    """An op that only changes how a tensor is looked at."""
    COMM = "comm"
    MEMORY = "memory"
    CLOSED = "closed"
    """A module, or a slice of the program, whose ops are not drawn one by one."""
    INPUT = "input"
    OUTPUT = "output"
    OPEN = "open"
    """A module that is drawn with what is inside."""


@dataclass(eq=False)
class BoxLine:
    """A line in a box: a parameter that goes in, a gradient that comes out, communication in a closed module."""

    role: str
    """``in``, ``out`` or ``comm``."""
    text: str
    value: Value | None = None
    axes: tuple[str, ...] = ()


@dataclass(eq=False)
class Box:
    """An op, a module or an input, as it is drawn."""

    kind: Kind
    phase: Phase
    nodes: list[Node] = field(default_factory=list)
    """The nodes that are drawn as this box, in program order."""
    path: str = ""
    """The module that the box stands for, or lies in."""
    members: tuple[str, ...] = ()
    """The paths of all modules that it stands for: more than one if it is folded."""
    title: str = ""
    label: str = ""
    """What stands before the title: the module, where a module of one op is drawn as that op."""
    note: str = ""
    children: list[Box] = field(default_factory=list)
    count: int = 1
    """How many equal blocks the box stands for."""
    turns: tuple[str, ...] = ()
    """The axes of time of which all that is in it is done once for each turn; not those of a box around it."""
    loops: bool = False
    """The result of one of these blocks is the input of the next."""
    inside: list[Node] = field(default_factory=list)
    """All nodes that a closed module stands for, with the copies of folded blocks in it."""
    lines: list[BoxLine] = field(default_factory=list)
    tags: list[Value] = field(default_factory=list)
    """The values that leave the box."""

    @property
    def main(self) -> Node:
        """The op that a box is named after: others in it are views."""
        return next((node for node in reversed(self.nodes) if not is_view(node)), self.nodes[-1])

    def leaves(self) -> Iterator[Box]:
        """The boxes in it, itself maybe, that are no open module."""
        if self.kind is not Kind.OPEN:
            yield self
        for child in self.children:
            yield from child.leaves()

    def walk(self) -> Iterator[Box]:
        """Itself and all boxes in it, outer ones first."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(eq=False)
class Edge:
    """Values that go from one box to another. Both ends are leaves."""

    source: Box
    target: Box
    values: list[Value]


@dataclass(eq=False)
class Lane:
    """All that is drawn of one phase."""

    phase: Phase
    boxes: list[Box]
    edges: list[Edge] = field(default_factory=list)


@dataclass(eq=False)
class Picture:
    """All that is drawn of a graph."""

    graph: Graph
    lanes: list[Lane]
    crossing: list[Edge]
    """Edges between lanes: values that are kept for backward, the seed of the gradients."""
    copies: Counter[Node]
    """For how many nodes of the graph a drawn node stands."""

    @property
    def size(self) -> int:
        """How many boxes there are."""
        return sum(1 for _ in self.boxes())

    def boxes(self) -> Iterator[Box]:
        """All boxes of all lanes, outer ones first."""
        for lane in self.lanes:
            for box in lane.boxes:
                yield from box.walk()
