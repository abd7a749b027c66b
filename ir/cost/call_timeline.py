"""The execution order of calls in schedule actions, and the live intervals of storages in it.

    calls       0   F0: 1, 2   B0: 3   4            of order F0.0 F0.1 B0.0 B0.1
    moments     0   1 2  1 2  3  3  4

A storage of a schedule action is live from its allocation to its last use in the same iteration, so as many
iterations are live at once as the order keeps in flight. Accumulators are created right before their first
use. Live intervals are columns, as hundreds of iterations make hundreds of thousands:

    which   0   1   1        storage 1 is allocated in two iterations
    born    0   1   5        at these moments
    last    9   4   8        and last used at these
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import fx

from shardfx.ir.ops.loop import loop_ops
from shardfx.ir.program.loops.loop_regions import action_order, execution_runs, loop_of

if TYPE_CHECKING:
    from .footprint import Storage


Numbers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class LiveIntervals:
    """Live intervals of storages, in columns, one per allocation: storage, first and last moment, bytes."""

    storages: tuple[Storage, ...]
    which: Numbers
    born: Numbers
    last: Numbers
    nbytes: Numbers

    @staticmethod
    def once(storages: tuple[Storage, ...]) -> LiveIntervals:
        """Live intervals of storages that are allocated once, by their own calls."""
        columns = [[each.born, each.last, each.nbytes] for each in storages]
        return LiveIntervals(storages, np.arange(len(storages)), *np.array(columns, dtype=np.int64).reshape(-1, 3).T)

    def where(self, chosen: Any) -> LiveIntervals:
        """The rows chosen by a mask or by indices."""
        return LiveIntervals(self.storages, *(each[chosen] for each in (self.which, self.born, self.last, self.nbytes)))

    def of(self, chosen: Sequence[bool]) -> LiveIntervals:
        """The live intervals of chosen storages, by a mask of storages."""
        return self.where(np.array(chosen, dtype=bool)[self.which])

    def by_birth(self) -> LiveIntervals:
        """The live intervals sorted by allocation."""
        return self.where(np.argsort(self.born, kind="stable"))

    def ahead(self, count: int) -> LiveIntervals:
        """The live intervals with receive buffers allocated ``count`` messages ahead."""
        found = self.by_birth()
        (messages,) = np.nonzero(np.array([each.message for each in self.storages], dtype=bool)[found.which])
        born = found.born.copy()
        born[messages] = np.concatenate([np.zeros(count, dtype=np.int64), found.born[messages]])[: len(messages)]
        return replace(found, born=born)

    def in_use(self, moments: int) -> Numbers:
        """The live bytes at each of ``moments``."""
        steps = np.zeros(moments + 1, dtype=np.int64)
        np.add.at(steps, self.born, self.nbytes)
        np.subtract.at(steps, self.last + 1, self.nbytes)
        return np.cumsum(steps[:-1])

    def at(self, moment: int) -> list[Storage]:
        """The storages that are live at a moment, with their intervals and bytes."""
        there = self.where((self.born <= moment) & (moment <= self.last))
        lines = zip(there.which, there.born.tolist(), there.last.tolist(), there.nbytes.tolist(), strict=True)
        return [replace(self.storages[i], born=born, last=last, nbytes=nbytes) for i, born, last, nbytes in lines]

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """First moment, last moment and bytes of each."""
        return zip(self.born.tolist(), self.last.tolist(), self.nbytes.tolist(), strict=True)


Scope = tuple[fx.Node, ...]
"""The schedule actions around a call, by their first calls, outermost first."""


class CallTimeline:
    """The moments of a program's calls, which have these ``scopes``; those ``made_for`` another one run once, before it
    (:class:`.Lifetimes`)."""

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        places: Mapping[fx.Node, int],
        scopes: Sequence[Scope],
        made_for: Mapping[int, int],
    ) -> None:
        self.scopes = scopes
        self.calls: list[int] = []
        """The call of each moment."""
        runs: dict[fx.Node, list[int]] = {}
        counts, iterations = list[int](), list[list[int]]()
        depth = max(map(len, scopes), default=0)
        for run, around in execution_runs(nodes, ordered=True):
            if run and run[0] not in runs:  # as is in each of perhaps hundreds of iterations
                runs[run[0]] = [places[node] for node in run if node in places and places[node] not in made_for]
            there = runs[run[0]] if run else []
            self.calls += there
            counts.append(len(there))
            iterations.append([number for _, number in around] + [0] * (depth - len(around)))
        self._iteration = np.repeat(np.array(iterations, dtype=np.int64).reshape(len(counts), depth), counts, axis=0)
        """The iterations of the actions around the call of each moment."""
        for call, user in made_for.items():
            at = self.calls.index(user)
            self.calls.insert(at, call)
            self._iteration = np.insert(self._iteration, at, 0, axis=0)
        calls = np.array(self.calls, dtype=np.int64)
        order = np.argsort(calls, kind="stable")
        starts = np.searchsorted(calls[order], np.arange(len(scopes) + 1))
        self._at = [order[a:b] for a, b in pairwise(starts)]
        """The moments of each call."""
        self._within = [np.zeros(len(calls), dtype=np.int64)]
        """By depth: for each moment a number that identifies the iterations of so many actions around."""
        for iteration in self._iteration.T:
            self._within.append(self._within[-1] * (iteration.max() + 1) + iteration)
        self._by_iterations: dict[tuple[int, int], tuple[Numbers, Numbers]] = {}

    def of(self, storages: Iterable[Storage]) -> LiveIntervals:
        """The live intervals of storages, one for each time that one is allocated."""
        storages = tuple(storages)
        born = [self._at[storage.born] for storage in storages]
        last = [self._let_go(storage, at) for storage, at in zip(storages, born, strict=True)]
        sizes = [self._sizes(storage, at) for storage, at in zip(storages, born, strict=True)]
        which = np.repeat(np.arange(len(storages)), [len(at) for at in born])
        none = [np.zeros(0, dtype=np.int64)]
        return LiveIntervals(storages, which, *(np.concatenate([*none, *each]) for each in (born, last, sizes)))

    def _let_go(self, storage: Storage, moments: Numbers) -> Numbers:
        """The last uses of a storage that is allocated at some moments."""
        last = moments
        for use in (storage.last, *storage.uses.values()):
            depth = self._shared(storage.born, use)
            if (use, depth) not in self._by_iterations:
                at = self._at[use]
                at = at[np.argsort(self._within[depth][at], kind="stable")]
                self._by_iterations[use, depth] = at, self._within[depth][at]
            at, iterations = self._by_iterations[use, depth]
            found = np.searchsorted(iterations, self._within[depth][moments], "right") - 1
            assert (iterations[found] == self._within[depth][moments]).all(), "an action does not run in each iteration"
            last = np.maximum(last, at[found])
        return last

    def _sizes(self, storage: Storage, moments: Numbers) -> Numbers:
        """The bytes of a storage at each of its allocations: sizes may change from an iteration on."""
        found = np.full(len(moments), storage.nbytes, dtype=np.int64)
        depths = {loop_of(action): depth for depth, action in enumerate(self.scopes[storage.born])}
        for (begin, since), nbytes in storage.sizes.items():
            if begin in depths:
                found[self._iteration[moments, depths[begin]] >= since] = nbytes
        return found

    def _shared(self, call: int, other: int) -> int:
        """The number of loops around both calls."""
        pairs = zip(self.scopes[call], self.scopes[other], strict=False)
        return sum(1 for _ in takewhile(lambda pair: loop_of(pair[0]) is loop_of(pair[1]), pairs))


Since = tuple[fx.Node, int]
"""The call that opens a loop, and the first iteration whose sizes differ from those before."""
At = Mapping[fx.Node, int]
"""Iterations by the calls that open their loops."""
FIRST: At = MappingProxyType({})


def set_iteration_sizes(
    nodes: Iterable[fx.Node], first: Sequence[Storage], storages: Callable[[At], Sequence[Storage]]
) -> None:
    """Set the sizes of storages of schedule actions per iteration: those of the ``first``, and of others by
    ``storages``."""
    pairs: list[tuple[Any, Any]] = [
        (node.args[0], node.args[1]) for node in nodes if node.target is loop_ops.piecewise_index
    ]
    sizes = [(begin, runs) for begin, runs in pairs if action_order(begin) and not any(grows for *_, grows in runs)]
    since = dict.fromkeys((begin, iteration) for begin, runs in sizes for iteration, _, _ in runs if iteration)
    for each in sorted(since, key=lambda each: each[1]):
        others = _by_call(storages(dict([each])))
        for call, mine in _by_call(first).items():
            if len(others.get(call, ())) == len(mine):
                for storage, other in zip(mine, others[call], strict=True):
                    if storage.sizes or storage.nbytes != other.nbytes:
                        storage.sizes[each] = other.nbytes


def _by_call(storages: Iterable[Storage]) -> dict[int, list[Storage]]:
    found: dict[int, list[Storage]] = {}
    for storage in storages:
        found.setdefault(storage.born, []).append(storage)
    return found
