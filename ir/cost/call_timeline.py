"""The order in which calls run, and the live intervals of storages in it.

    calls       0   F0: 1, 2   B0: 3   4            of order F0.0 F0.1 B0.0 B0.1
    moments     0   1 2  1 2  3  3  4

A storage of a schedule action is live from its moment to that of the last use in the same iteration, so as many
iterations are live at once as the order keeps in flight. Accumulators are made at the moment at which the first
iteration needs them. Live intervals are columns, for hundreds of iterations make hundreds of thousands:

    which   0   1   1        storage 1 is made in two iterations
    born    0   1   5        at these moments
    last    9   4   8        and used last at these
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import fx

from shardfx.ir.ops.loop import loop_ops
from shardfx.ir.program.loops.loop_regions import UnitOrder, name_of, order_of

if TYPE_CHECKING:
    from .footprint import Block, Storage


Numbers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Stays:
    """Storages, and by column, for each time that one is made: which, when first and last, and its bytes."""

    storages: tuple[Storage, ...]
    which: Numbers
    born: Numbers
    last: Numbers
    nbytes: Numbers

    @staticmethod
    def once(storages: tuple[Storage, ...]) -> Stays:
        """Storages that are made once, at the calls that they say."""
        columns = [[each.born, each.last, each.nbytes] for each in storages]
        return Stays(storages, np.arange(len(storages)), *np.array(columns, dtype=np.int64).reshape(-1, 3).T)

    def where(self, chosen: Any) -> Stays:
        """Those of some lines, by a mask or by their numbers."""
        return Stays(self.storages, *(each[chosen] for each in (self.which, self.born, self.last, self.nbytes)))

    def of(self, chosen: Sequence[bool]) -> Stays:
        """Those of some storages: one word for each."""
        return self.where(np.array(chosen, dtype=bool)[self.which])

    def by_birth(self) -> Stays:
        """In the order in which they are made."""
        return self.where(np.argsort(self.born, kind="stable"))

    def ahead(self, count: int) -> Stays:
        """With memory for so many messages there before they are asked for, in the order in which they are made."""
        found = self.by_birth()
        (messages,) = np.nonzero(np.array([each.message for each in self.storages], dtype=bool)[found.which])
        born = found.born.copy()
        born[messages] = np.concatenate([np.zeros(count, dtype=np.int64), found.born[messages]])[: len(messages)]
        return replace(found, born=born)

    def in_use(self, moments: int) -> Numbers:
        """The bytes that are there at each of so many moments."""
        steps = np.zeros(moments + 1, dtype=np.int64)
        np.add.at(steps, self.born, self.nbytes)
        np.subtract.at(steps, self.last + 1, self.nbytes)
        return np.cumsum(steps[:-1])

    def at(self, moment: int) -> list[Storage]:
        """The storages that are there at a moment, as they are then."""
        there = self.where((self.born <= moment) & (moment <= self.last))
        lines = zip(there.which, there.born.tolist(), there.last.tolist(), there.nbytes.tolist(), strict=True)
        return [self.storages[which].at(born, last, nbytes) for which, born, last, nbytes in lines]

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """When each is made and used last, and its bytes."""
        return zip(self.born.tolist(), self.last.tolist(), self.nbytes.tolist(), strict=True)


Place = tuple[tuple[fx.Node, str], ...]
"""The units that a call stands in, outermost first: the iterations, and the unit's name."""


@dataclass
class Standpoint:
    """In which iterations and units one is, while a program is walked."""

    iterations: list[int] = field(default_factory=list)
    """Of the loops that are open: how many iterations each has."""
    place: Place = ()
    places: list[Place] = field(default_factory=list)
    """Of each call so far."""

    def begin(self, node: fx.Node, count: Any) -> None:
        """Iterations begin."""
        self.iterations.append(count)
        if order_of(node):
            self.place = (*self.place, (node, ""))

    def unit(self, node: fx.Node) -> None:
        """A unit of them begins."""
        self.place = (*self.place[:-1], (self.place[-1][0], name_of(node)))

    def end(self, begin: Any) -> dict[Place, int]:
        """They are over; gives the last call of each of their units."""
        self.iterations.pop()
        if not self.place or self.place[-1][0] is not begin:
            return {}
        self.place = self.place[:-1]
        depth = len(self.place)
        return {at: i for i, at in enumerate(self.places) if len(at) > depth and at[depth][0] is begin}


class Moments:
    """The moments of a program's calls.

    Args:
        places: where each call stands.
        made_for: calls that are done once, before another one (:class:`Lifetimes`).
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
        """Of moments one behind the other: how many, and the iterations of the units that their calls stand in."""
        self._depth = max(map(len, places), default=0)
        self._go(range(len(places)), 0, ())
        calls = np.array(self.calls, dtype=np.int64)
        order = np.argsort(calls, kind="stable")
        starts = np.searchsorted(calls[order], np.arange(len(places) + 1))
        self._at = [order[a:b] for a, b in pairwise(starts)]
        """Of each call its moments."""
        self._iteration = np.array(
            [(*iteration, *[0] * (self._depth - len(iteration))) for _, iteration in self._runs], dtype=np.int64
        )
        self._iteration = np.repeat(
            self._iteration.reshape(len(self._runs), self._depth), [count for count, _ in self._runs], axis=0
        )
        """Of each moment the iterations of the units that its call stands in."""
        self._within = [np.zeros(len(calls), dtype=np.int64)]
        """By how many units around: of each moment a number for the iterations of these."""
        for iteration in self._iteration.T:
            self._within.append(self._within[-1] * (iteration.max() + 1) + iteration)
        self._by_iterations: dict[tuple[int, int], tuple[Numbers, Numbers]] = {}

    def _go(self, calls: Iterable[int], depth: int, iteration: tuple[int, ...]) -> None:
        """Lay out calls that stand in so many units around."""
        units: dict[str, list[int]] = {}
        begin: fx.Node | None = None
        for call in calls:
            place = self.places[call]
            inner = place[depth][0] if len(place) > depth else None
            if begin is not None and inner is not begin:
                self._units(begin, units, depth, iteration)
                units = {}
            begin = inner
            if inner is None and call not in self._made_for:
                for each in self._first.pop(call, ()):
                    self._add([each], ())
                self._add([call], iteration)
            elif inner is not None:
                units.setdefault(place[depth][1], []).append(call)
        if begin is not None:
            self._units(begin, units, depth, iteration)

    def _add(self, calls: Sequence[int], iteration: tuple[int, ...]) -> None:
        self.calls += calls
        self._runs.append((len(calls), iteration))

    def _units(self, begin: fx.Node, units: dict[str, list[int]], depth: int, iteration: tuple[int, ...]) -> None:
        plain = {name for name, calls in units.items() if all(len(self.places[call]) == depth + 1 for call in calls)}
        for word in UnitOrder.of(order_of(begin).split()).words:
            calls, iterations = units.get(word.unit, []), (*iteration, word.iteration)
            if word.unit in plain and self._first.keys().isdisjoint(calls):
                self._add(calls, iterations)  # as nearly always, and there may be hundreds of iterations
            else:
                self._go(calls, depth + 1, iterations)

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
            if (use, depth) not in self._by_iterations:
                at = self._at[use]
                at = at[np.argsort(self._within[depth][at], kind="stable")]
                self._by_iterations[use, depth] = at, self._within[depth][at]
            at, iterations = self._by_iterations[use, depth]
            found = np.searchsorted(iterations, self._within[depth][moments], "right") - 1
            assert (iterations[found] == self._within[depth][moments]).all(), "a unit is not done in each iteration"
            last = np.maximum(last, at[found])
        return last

    def _sizes(self, storage: Storage, moments: Numbers) -> Numbers:
        """The bytes of a storage that is made at some moments: in some iterations other ones than in those before."""
        found = np.full(len(moments), storage.nbytes, dtype=np.int64)
        depths = {begin: depth for depth, (begin, _) in enumerate(self.places[storage.born])}
        for (begin, since), nbytes in storage.sizes.items():
            if begin in depths:
                found[self._iteration[moments, depths[begin]] >= since] = nbytes
        return found

    def _shared(self, call: int, other: int) -> int:
        """How many iterations two calls are both in."""
        pairs = zip(self.places[call], self.places[other], strict=False)
        return next(
            (at for at, (a, b) in enumerate(pairs) if a[0] is not b[0]),
            min(len(self.places[call]), len(self.places[other])),
        )


Since = tuple[fx.Node, int]
"""The begin of iterations, and the first of those that are not like the ones before."""
At = Mapping[fx.Node, int]
"""By the begin of iterations, which of them."""
FIRST: At = MappingProxyType({})


def sizes_of_iterations(
    nodes: Iterable[fx.Node], first: Sequence[Block], blocks: Callable[[At], Sequence[Block]]
) -> None:
    """Say of blocks that are made in units how large they are in which iterations.

    Args:
        first: those of the first iteration.
        blocks: the same as they are in another iteration.
    """
    pairs: list[tuple[Any, Any]] = [
        (node.args[0], node.args[1]) for node in nodes if node.target is loop_ops.piecewise_index
    ]
    sizes = [(begin, runs) for begin, runs in pairs if order_of(begin) and not any(grows for *_, grows in runs)]
    since = dict.fromkeys((begin, iteration) for begin, runs in sizes for iteration, _, _ in runs if iteration)
    for each in sorted(since, key=lambda each: each[1]):
        others = _by_call(blocks(dict([each])))
        for call, mine in _by_call(first).items():
            if len(others.get(call, ())) == len(mine):
                for block, other in zip(mine, others[call], strict=True):
                    if block.sizes or block.nbytes != other.nbytes:
                        block.sizes[each] = other.nbytes


def _by_call(blocks: Iterable[Block]) -> dict[int, list[Block]]:
    found: dict[int, list[Block]] = {}
    for block in blocks:
        found.setdefault(block.born, []).append(block)
    return found
