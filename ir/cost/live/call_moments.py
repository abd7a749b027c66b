"""When the calls of a program are done: one behind the other, and those of units as the order of their turns says.

    calls       0   F0: 1, 2   B0: 3   4            of order F0.0 F0.1 B0.0 B0.1
    moments     0   1 2  1 2  3  3  4

What a unit makes is there from its moment to that of the last use in the same turn. So as many turns are held at once
as the order keeps under way. What all turns collect into is made at the moment at which the first of them does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import fx

from shardfx.ir.program.units.lifetimes import name_of
from shardfx.ir.program.units.unit_order import UnitOrder, order_of

from .turn_sizes import size_in

if TYPE_CHECKING:
    from .storages import Storage

Place = tuple[tuple[fx.Node, str], ...]
"""The units that a call stands in, outermost first: the turns, and the unit's name."""


@dataclass
class Standpoint:
    """In which turns and units one is, while a program is walked."""

    turns: list[int] = field(default_factory=list)
    """Of the loops that are open: how many turns each has."""
    place: Place = ()
    places: list[Place] = field(default_factory=list)
    """Of each call so far."""

    def begin(self, node: fx.Node, count: Any) -> None:
        """Turns begin."""
        self.turns.append(count)
        if order_of(node):
            self.place = (*self.place, (node, ""))

    def unit(self, node: fx.Node) -> None:
        """A unit of them begins."""
        self.place = (*self.place[:-1], (self.place[-1][0], name_of(node)))

    def end(self, begin: Any) -> dict[Place, int]:
        """They are over; gives the last call of each of their units."""
        self.turns.pop()
        if not self.place or self.place[-1][0] is not begin:
            return {}
        self.place = self.place[:-1]
        depth = len(self.place)
        return {at: i for i, at in enumerate(self.places) if len(at) > depth and at[depth][0] is begin}


class Moments:
    """The moments of a program's calls.

    Args:
        places: where each call stands.
        made_for: calls that are done once, before another one (:class:`shardfx.ir.program.units.lifetimes.Lifetimes`).
    """

    def __init__(self, places: Sequence[Place], made_for: Mapping[int, int] = MappingProxyType({})) -> None:
        self.places, self._made_for = places, made_for
        self._first: dict[int, list[int]] = {}
        """What is still to be done before a call, once."""
        for call, other in made_for.items():
            self._first.setdefault(other, []).append(call)
        self.calls: list[int] = []
        """The call of each moment."""
        self._turn: list[tuple[int, ...]] = []
        """Of each moment the turns of the units that its call stands in."""
        self._go(range(len(places)), 0, ())
        self._last: dict[tuple[int, tuple[int, ...]], int] = {}
        self._at: dict[int, list[int]] = {}
        for moment, (call, turn) in enumerate(zip(self.calls, self._turn, strict=True)):
            self._at.setdefault(call, []).append(moment)
            for depth in range(len(turn) + 1):
                self._last[call, turn[:depth]] = moment

    def _go(self, calls: Iterable[int], depth: int, turn: tuple[int, ...]) -> None:
        """Lay out calls that stand in so many units around."""
        units: dict[str, list[int]] = {}
        begin: fx.Node | None = None
        for call in calls:
            place = self.places[call]
            inner = place[depth][0] if len(place) > depth else None
            if begin is not None and inner is not begin:
                self._units(begin, units, depth, turn)
                units = {}
            begin = inner
            if inner is None and call not in self._made_for:
                for each in self._first.pop(call, ()):
                    self._add(each, ())
                self._add(call, turn)
            elif inner is not None:
                units.setdefault(place[depth][1], []).append(call)
        if begin is not None:
            self._units(begin, units, depth, turn)

    def _add(self, call: int, turn: tuple[int, ...]) -> None:
        self.calls.append(call)
        self._turn.append(turn)

    def _units(self, begin: fx.Node, units: dict[str, list[int]], depth: int, turn: tuple[int, ...]) -> None:
        for word in UnitOrder.of(order_of(begin).split()).words:
            self._go(units.get(word.unit, ()), depth + 1, (*turn, word.turn))

    def of(self, storages: Iterable[Storage]) -> list[Storage]:
        """Storages, each as often as it is made, with the moments in which it is made and used last."""
        return [each for storage in storages for each in self._each(storage)]

    def _each(self, storage: Storage) -> Iterable[Storage]:
        uses = [(use, self._shared(storage.born, use)) for use in (storage.last, *storage.uses)]
        for moment in self._at[storage.born]:
            turn = self._turn[moment]
            last = max(moment, *(self._last[use, turn[:depth]] for use, depth in uses))
            nbytes = self._size(storage, turn)
            yield storage.at(moment, last, nbytes)

    def _size(self, storage: Storage, turn: Sequence[int]) -> int:
        if not storage.sizes:
            return storage.nbytes
        begins = (begin for begin, _ in self.places[storage.born])
        return size_in(dict(zip(begins, turn, strict=False)), storage.nbytes, storage.sizes)

    def _shared(self, call: int, other: int) -> int:
        """How many turns two calls are both in."""
        pairs = zip(self.places[call], self.places[other], strict=False)
        return next(
            (at for at, (a, b) in enumerate(pairs) if a[0] is not b[0]),
            min(len(self.places[call]), len(self.places[other])),
        )
