"""Where everything goes: the lanes side by side, and what belongs together at the same height.

Forward flows down. Backward is laid out like any lane and then turned over, so that it flows up, and each block's
backward is moved to stand beside its forward: lines of values that are kept for backward stay short.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from shardfx.ir.graph import Phase
from shardfx.visualize.scene.boxes import Box, Edge, Picture

from .dot import Point
from .geometry import Arrangement, Crossing, LanePlan, Rect, Size, Spot
from .nested import LaneLayout

LANE_GAP = 90.0
LANE_PAD = 24.0
LANE_HEADER = 52.0


def plan(picture: Picture, measure: Callable[[Box], Size]) -> Arrangement:
    """Places for all boxes and lines of a picture."""
    lanes = [LaneLayout(lane, measure).plan() for lane in picture.lanes]
    for lane in lanes:
        if lane.phase is Phase.BACKWARD:
            turn_over(lane)
    if len(lanes) > 1:
        align(lanes[0], lanes[1])
    inside = max((spot.rect.bottom for lane in lanes for spot in lane.top), default=0.0)
    x = 0.0
    for lane in lanes:
        width = max(lane.rect.w, 180.0)
        move(lane, x + LANE_PAD + (width - lane.rect.w) / 2, lambda y: LANE_HEADER)
        lane.rect = Rect(x, 0, width + 2 * LANE_PAD, inside + LANE_HEADER + LANE_PAD)
        x += lane.rect.w + LANE_GAP
    height = max((lane.rect.h for lane in lanes), default=0.0)
    return Arrangement(lanes, _crossings(picture, lanes), max(0.0, x - LANE_GAP), height)


def turn_over(lane: LanePlan) -> None:
    """Let a lane flow up."""
    height = lane.rect.h

    def turned(rect: Rect) -> Rect:
        return Rect(rect.x, height - rect.bottom, rect.w, rect.h)

    for spot in lane.spots:
        spot.rect, spot.body = turned(spot.rect), turned(spot.body)
    for wire in lane.wires:
        wire.points = [(x, height - y) for x, y in wire.points]


def move(lane: LanePlan, dx: float, down: Callable[[float], float]) -> None:
    """Move all of a lane to the right, and down by what ``down`` says for a height."""

    def moved(rect: Rect, by: float) -> Rect:
        return Rect(rect.x + dx, rect.y + by, rect.w, rect.h)

    for spot in lane.spots:
        by = down(spot.rect.y)
        spot.rect, spot.body = moved(spot.rect, by), moved(spot.body, by)
    for wire in lane.wires:
        wire.points = [(x + dx, y + down(y)) for x, y in wire.points]


def align(left: LanePlan, right: LanePlan) -> None:
    """Insert room between boxes so that what has the same name in both lanes stands at the same height."""
    pairs = []
    mine, others = _once(left), _once(right)
    for spot in mine:
        mate = max((other for other in others if _related(spot, other)), key=lambda other: other.rect.h, default=None)
        if mate and spot is max((s for s in mine if _related(s, mate)), key=lambda s: s.rect.h):
            pairs.append((spot, mate))
    pairs.sort(key=lambda pair: pair[0].rect.middle)
    cuts: tuple[list[Point], list[Point]] = ([], [])
    reached = (-1.0, -1.0)
    for a, b in pairs:
        ends = [_free_height(left, a.rect.y), _free_height(right, b.rect.y)]
        if ends[0] <= reached[0] or ends[1] <= reached[1]:
            continue  # the two lanes have an order of their own here
        reached = (a.rect.y, b.rect.y)
        heights = [_down(cuts[i], spot.rect.y) + spot.rect.middle for i, spot in enumerate((a, b))]
        lower = 0 if heights[0] < heights[1] else 1
        cuts[lower].append((ends[lower] - 2, abs(heights[0] - heights[1])))
    for lane, own in zip((left, right), cuts, strict=True):
        move(lane, 0, lambda y, own=own: _down(own, y))  # type: ignore[misc]


def _once(lane: LanePlan) -> list[Spot]:
    """What stands for modules of which the lane has no second piece."""
    pieces = Counter(spot.box.members for spot in lane.top)
    return [spot for spot in lane.top if spot.box.members and pieces[spot.box.members] == 1]


def _related(a: Spot, b: Spot) -> bool:
    return not set(a.box.members).isdisjoint(b.box.members)


def _down(cuts: list[Point], y: float) -> float:
    return sum(room for at, room in cuts if y >= at)


def _free_height(lane: LanePlan, y: float) -> float:
    """The nearest height above ``y`` at which no box stands."""
    while True:
        above = [spot.rect.y for spot in lane.top if spot.rect.y < y < spot.rect.bottom]
        if not above:
            return y
        y = min(above)


def _crossings(picture: Picture, lanes: list[LanePlan]) -> list[Crossing]:
    top = {inner: spot for lane in lanes for spot in lane.top for inner in spot.box.walk()}
    bundles: dict[tuple[Spot, Spot], list[Edge]] = {}
    for edge in picture.crossing:
        bundles.setdefault((top[edge.source], top[edge.target]), []).append(edge)
    return [Crossing(source, target, edges) for (source, target), edges in bundles.items()]
