"""What a layout says: a place for every box, and the points of every line."""

from __future__ import annotations

from dataclasses import dataclass

from shardfx.ir.graph import Phase, Value
from shardfx.visualize.scene.boxes import Box, Edge

from .dot import Point


@dataclass(frozen=True)
class Rect:
    """A rectangle in pixels; y grows downwards, (x, y) is its upper left corner."""

    x: float
    y: float
    w: float
    h: float

    @property
    def bottom(self) -> float:
        """The y of its lower side."""
        return self.y + self.h

    @property
    def right(self) -> float:
        """The x of its right side."""
        return self.x + self.w

    @property
    def middle(self) -> float:
        """The y half-way down."""
        return self.y + self.h / 2

    def down(self, distance: float) -> Rect:
        """The same rectangle, lower by a distance."""
        return Rect(self.x, self.y + distance, self.w, self.h)


@dataclass(frozen=True)
class Size:
    """What a leaf needs: its body, and behind it (seen along the flow) the tags of the values that leave it."""

    width: float
    body: float
    tags: float = 0.0


@dataclass(eq=False)
class Spot:
    """Where a box is drawn: ``rect`` in all, ``body`` without its tags or the cards behind it."""

    box: Box
    rect: Rect
    body: Rect


@dataclass(eq=False)
class Wire:
    """A line along which values go; with an arrow where it ends at a leaf."""

    points: list[Point]
    targets: list[Box]
    values: list[Value]
    arrow: bool


@dataclass(eq=False)
class LanePlan:
    """One lane: all its boxes, outer ones first, and which of them stand in no other."""

    phase: Phase
    rect: Rect
    spots: list[Spot]
    top: list[Spot]
    wires: list[Wire]


@dataclass(eq=False)
class Crossing:
    """Values that go from what stands in one lane to what stands in another."""

    source: Spot
    target: Spot
    edges: list[Edge]


@dataclass(eq=False)
class Arrangement:
    """Where everything is drawn: lanes side by side, what crosses between them, and the size of all, in pixels."""

    lanes: list[LanePlan]
    crossings: list[Crossing]
    width: float
    height: float
