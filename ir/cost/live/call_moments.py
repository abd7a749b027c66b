"""When the calls of a program are done: one behind the other, and those of units as the order of their turns says.

    calls       0   F0: 1, 2   B0: 3   4            of order F0.0 F0.1 B0.0 B0.1
    moments     0   1 2  1 2  3  3  4

What a unit makes is there from its moment to that of the last use in the same turn. So as many turns are held at once
as the order keeps under way. What all turns collect into is made at the moment at which the first of them does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import fx

from shardfx.ir.program.units.lifetimes import name_of
from shardfx.ir.program.units.unit_order import UnitOrder, order_of

from .stays import Numbers, Stays

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
        self._runs: list[tuple[int, tuple[int, ...]]] = []
        """Of moments one behind the other: how many, and the turns of the units that their calls stand in."""
        self._depth = max(map(len, places), default=0)
        self._go(range(len(places)), 0, ())
        calls = np.array(self.calls, dtype=np.int64)
        order = np.argsort(calls, kind="stable")
        starts = np.searchsorted(calls[order], np.arange(len(places) + 1))
        self._at = [order[a:b] for a, b in pairwise(starts)]
        """Of each call its moments."""
        self._turn = np.array([(*turn, *[0] * (self._depth - len(turn))) for _, turn in self._runs], dtype=np.int64)
        self._turn = np.repeat(
            self._turn.reshape(len(self._runs), self._depth), [count for count, _ in self._runs], axis=0
        )
        """Of each moment the turns of the units that its call stands in."""
        self._within = [np.zeros(len(calls), dtype=np.int64)]
        """By how many units around: of each moment a number for the turns of these."""
        for turn in self._turn.T:
            self._within.append(self._within[-1] * (turn.max() + 1) + turn)
        self._by_turns: dict[tuple[int, int], tuple[Numbers, Numbers]] = {}

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
                    self._add([each], ())
                self._add([call], turn)
            elif inner is not None:
                units.setdefault(place[depth][1], []).append(call)
        if begin is not None:
            self._units(begin, units, depth, turn)

    def _add(self, calls: Sequence[int], turn: tuple[int, ...]) -> None:
        self.calls += calls
        self._runs.append((len(calls), turn))

    def _units(self, begin: fx.Node, units: dict[str, list[int]], depth: int, turn: tuple[int, ...]) -> None:
        plain = {name for name, calls in units.items() if all(len(self.places[call]) == depth + 1 for call in calls)}
        for word in UnitOrder.of(order_of(begin).split()).words:
            calls, turns = units.get(word.unit, []), (*turn, word.turn)
            if word.unit in plain and self._first.keys().isdisjoint(calls):
                self._add(calls, turns)  # as nearly always, and there may be hundreds of turns
            else:
                self._go(calls, depth + 1, turns)

    def of(self, storages: Iterable[Storage]) -> Stays:
        """Storages, each as often as it is made, with the moments in which it is made and used last."""
        storages = tuple(storages)
        born = [self._at[storage.born] for storage in storages]
        last = [self._let_go(storage, at) for storage, at in zip(storages, born, strict=True)]
        sizes = [self._sizes(storage, at) for storage, at in zip(storages, born, strict=True)]
        which = np.repeat(np.arange(len(storages)), [len(at) for at in born])
        none = [np.zeros(0, dtype=np.int64)]
        return Stays(storages, which, *(np.concatenate([*none, *each]) for each in (born, last, sizes)))

    def _let_go(self, storage: Storage, moments: Numbers) -> Numbers:
        """When a storage is used last that is made at some moments."""
        last = moments
        for use in (storage.last, *storage.uses):
            depth = self._shared(storage.born, use)
            if (use, depth) not in self._by_turns:
                at = self._at[use]
                at = at[np.argsort(self._within[depth][at], kind="stable")]
                self._by_turns[use, depth] = at, self._within[depth][at]
            at, turns = self._by_turns[use, depth]
            found = np.searchsorted(turns, self._within[depth][moments], "right") - 1
            assert (turns[found] == self._within[depth][moments]).all(), "a unit is not done in each turn"
            last = np.maximum(last, at[found])
        return last

    def _sizes(self, storage: Storage, moments: Numbers) -> Numbers:
        """The bytes of a storage that is made at some moments: in some turns other ones than in those before."""
        found = np.full(len(moments), storage.nbytes, dtype=np.int64)
        depths = {begin: depth for depth, (begin, _) in enumerate(self.places[storage.born])}
        for (begin, since), nbytes in storage.sizes.items():
            if begin in depths:
                found[self._turn[moments, depths[begin]] >= since] = nbytes
        return found

    def _shared(self, call: int, other: int) -> int:
        """How many turns two calls are both in."""
        pairs = zip(self.places[call], self.places[other], strict=False)
        return next(
            (at for at, (a, b) in enumerate(pairs) if a[0] is not b[0]),
            min(len(self.places[call]), len(self.places[other])),
        )
