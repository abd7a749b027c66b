"""What a turn holds at its peak, and what stays beside it from turn to turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import fx

from shardfx.ir.program.looped.within_turns import regions
from shardfx.ir.program.units.unit_order import UnitOrder, order_of

from .storages import Footprint


@dataclass(frozen=True)
class TurnMemory:
    """The call of some turns during which most is held: bytes that the turn made (or all that are ``under_way``, where
    turns have units), and bytes that were there before.

    Inputs, which belong to the caller, are in neither.
    """

    axis: str
    count: int
    own: int
    stays: int
    under_way: int = 1


def turn_memory(footprint: Footprint) -> tuple[TurnMemory, ...]:
    """Of the outermost turns of each axis those that hold most, in the order of the program."""
    found: dict[str, TurnMemory] = {}
    for made in _of_each(footprint):
        other = found.get(made.axis)
        if other is None or made.own + made.stays > other.own + other.stays:
            found[made.axis] = made
    return tuple(found.values())


def _of_each(footprint: Footprint) -> Iterator[TurnMemory]:
    if not footprint.calls:
        return
    around = regions(footprint.calls[0].graph.nodes)
    for loop, places in groupby(range(len(footprint.calls)), lambda place: around[footprint.calls[place]][:1]):
        if loop:
            yield _during(footprint, loop[0], list(places))


def _during(footprint: Footprint, loop: fx.Node, places: Sequence[int]) -> TurnMemory:
    live, inside = footprint.live, footprint.inside
    top = max(places, key=lambda place: live[place] + inside[place])
    kept = footprint.idle[top] + sum(
        each.nbytes for each in footprint.storages if each.born < places[0] and each.last >= top and not each.pool
    )
    axis, count = loop.args[:2]
    assert isinstance(axis, str) and isinstance(count, int)
    under_way = UnitOrder.of(order_of(loop).split()).under_way or 1
    return TurnMemory(axis, count, live[top] + inside[top] - kept, kept, under_way)
