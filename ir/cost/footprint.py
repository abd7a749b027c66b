"""Memory of a replayed program: its storages, their live intervals and categories, and the peak.

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

import bisect
import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count, groupby, pairwise, takewhile
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import fx

from shardfx.ir.graph import Node, Phase
from shardfx.ir.ops.loop import loop_ops
from shardfx.ir.program.loops.loop_regions import ActionOrder, action_order, execution_runs, loop_of, regions
from shardfx.ir.program.store_layout import choose_buffer

from .amounts import Cost, total
from .fake_calls import TensorLayout

BUFFERS = "communication buffers"
STEPS = 3
"""The number of steps after which the kept buffers are in a steady state."""
Numbers = NDArray[np.int64]
Scope = tuple[fx.Node, ...]
"""The schedule actions around a call, by their first calls, outermost first."""
Since = tuple[fx.Node, int]
"""The call that opens a loop, and the first iteration whose sizes differ from those before."""
At = Mapping[fx.Node, int]
"""Iterations by the calls that open their loops."""
FIRST: At = MappingProxyType({})


@dataclass(eq=False, slots=True)
class Storage:
    """A storage: its bytes, its first and last call, its category, and the node that allocates it.

    ``category`` is "gradients", "results", "new buffers", "new parameters", "new states" (live to the end), "gathered
    parameters", "cast parameters" (in another dtype), "fetched" (from another memory), "activations" (made by the
    forward pass, used last by the backward), "communication buffers" or "temporaries". ``node`` is the planned
    node that the call was lowered from, ``used_in`` the phase of the last use. ``kept``: a ``memory.empty`` buffer,
    which engines keep and reuse, in this step or the next. ``pool`` is its memory, if not the
    device's. ``uses`` are the last calls that use it in each schedule action, ``sizes`` its bytes from some
    iterations on. ``message``: a receive buffer for another stage's result.
    """

    nbytes: int
    born: int
    last: int
    node: Node | None
    category: str = ""
    used_in: Phase | None = None
    kept: bool = False
    pool: str = ""
    uses: dict[Scope, int] = field(default_factory=dict)
    sizes: dict[Since, int] = field(default_factory=dict)
    message: bool = False

    def use(self, at: int, scope: Scope) -> None:
        """Record a use by a call."""
        self.last = at
        if scope:
            self.uses[scope] = at


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a storage; ``offset`` is the number of elements before its first one."""

    layout: TensorLayout
    storage: Storage
    offset: int = 0


@dataclass(frozen=True)
class Peak:
    """The peak of live memory, inputs apart: its ``items``, the largest first."""

    nbytes: int = 0
    node: Node | None = None
    items: tuple[Storage, ...] = field(default=(), compare=False)

    def of(self, category: str) -> int:
        """The bytes of one category."""
        return sum(item.nbytes for item in self.items if item.category == category)


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
    return {call: [*made] for call, made in groupby(storages, lambda storage: storage.born)}


@dataclass
class BufferReusePool:
    """A simulation of the buffers that an engine keeps: their sizes, by number."""

    kept: dict[int, int] = field(default_factory=dict)
    _number: Iterator[int] = field(default_factory=count)

    def step(self, asked: LiveIntervals) -> list[tuple[int, int]]:
        """The moments of a step with these buffer requests, each with the bytes that are allocated there (or released);
        unused buffers are dropped at its end."""
        sizes, free = dict(self.kept), sorted(self.kept)
        borrowed, used, changes = list[tuple[int, int]](), set[int](), list[tuple[int, int]]()
        for born, last, nbytes in asked.by_birth():
            while borrowed and borrowed[0][0] < born:
                bisect.insort(free, heapq.heappop(borrowed)[1])
            choice = choose_buffer(nbytes, [sizes[key] for key in free])
            take, drop = (None if place is None else free[place] for place in choice)
            if drop is not None:
                changes.append((born, -sizes.pop(drop)))
                free.remove(drop)
            if take is None:
                take = next(self._number)
                sizes[take] = nbytes
                changes.append((born, nbytes))
            else:
                free.remove(take)
            heapq.heappush(borrowed, (last, take))
            used.add(take)
        self.kept = {key: size for key, size in sizes.items() if key in used}
        return changes


@dataclass(frozen=True)
class Footprint:
    """Memory and costs of a program, call by call. Inputs are not counted, as they belong to the caller.

    ``inside`` are the temporary bytes of a call beyond its results. ``moments`` is the execution order of schedule
    actions: figures of a call are then those of its moment with most live memory.
    ``ahead``: the buffer of a message from another stage is allocated at the call that receives the one so many before,
    or at the first call.
    """

    calls: tuple[fx.Node, ...]
    storages: tuple[Storage, ...]
    costs: tuple[Cost, ...]
    inside: tuple[int, ...]
    moments: CallTimeline | None = None
    ahead: int = 0

    @cached_property
    def live(self) -> tuple[int, ...]:
        """The live bytes at each call, including its last uses."""
        return self._at_calls(self._live)

    @cached_property
    def beside(self) -> tuple[int, ...]:
        """The live bytes in other memory pools at each call."""
        found = np.zeros(len(self.calls), dtype=np.int64)
        np.maximum.at(found, self._calls, self._in(bool(each.pool) for each in self.storages))
        return tuple(found.tolist())

    @cached_property
    def idle(self) -> tuple[int, ...]:
        """The bytes of kept buffers that are unused at each call in a steady state, slack of reused ones included."""
        return self._at_calls(self._idle)

    @cached_property
    def by_category(self) -> Mapping[str, tuple[int, ...]]:
        """The live bytes at each call by category."""
        here = [each.category if not each.pool else None for each in self.storages]
        names = dict.fromkeys(name for name in here if name is not None)
        return {name: self._at_calls(self._in(each == name for each in here)) for name in names}

    @cached_property
    def held(self) -> tuple[int, ...]:
        """The live bytes at each call, its own temporary ones included."""
        return tuple(map(sum, zip(self.live, self.inside, strict=True)))

    @cached_property
    def top(self) -> int:
        """The call with the most live memory, its operands and results included."""
        return max(range(len(self.calls)), key=self.held.__getitem__, default=0)

    def there(self, call: int) -> list[Storage]:
        """What is live at a call: its storages (in schedule actions, those of each iteration); kept buffers that are
        idle; and last its temporaries."""
        made = [each for each in self._made.at(int(self._fullest[call])) if not each.pool]
        idle = Storage(self.idle[call], call, call, None, BUFFERS)
        return [*made, idle, Storage(self.inside[call], call, call, self._planned(call), "temporaries")]

    def _planned(self, call: int) -> Node | None:
        made: Node | None = self.calls[call].meta.get("shardfx")
        return made

    # ---- by moment --------------------------------------------------------------------------------------------------

    @cached_property
    def _made(self) -> LiveIntervals:
        """The live intervals of the storages, by moments."""
        made = LiveIntervals.once(self.storages) if self.moments is None else self.moments.of(self.storages)
        return made.ahead(self.ahead) if self.ahead else made

    def _in(self, chosen: Iterable[bool]) -> Numbers:
        """The bytes of the chosen storages, by moment; a flag for each."""
        return self._made.of([*chosen]).in_use(len(self._calls))

    @cached_property
    def _calls(self) -> Numbers:
        """The call of each moment."""
        return np.array(range(len(self.calls)) if self.moments is None else self.moments.calls, dtype=np.int64)

    @cached_property
    def _live(self) -> Numbers:
        return self._in(not each.pool for each in self.storages) + self._idle

    @cached_property
    def _idle(self) -> Numbers:
        kept, pool, before = self._kept, BufferReusePool(), None
        live = np.zeros(len(self._calls), dtype=np.int64)
        for _ in range(STEPS):
            if pool.kept == before:  # as it is in every step from now on
                break
            before = pool.kept
            live[:] = 0
            for moment, nbytes in pool.step(kept):
                live[moment] += nbytes
            live = np.cumsum(live) + sum(before.values())
        return live - kept.in_use(len(self._calls))

    @cached_property
    def _kept(self) -> LiveIntervals:
        """The live intervals of buffers that are kept between steps."""
        return self._made.of([each.kept for each in self.storages])

    @cached_property
    def _fullest(self) -> Numbers:
        """The moment of each call at which most is live."""
        if self.moments is None:
            return self._calls
        order = np.lexsort((-self._live, self._calls))  # of moments with as much, the first
        return order[np.searchsorted(self._calls[order], np.arange(len(self.calls)))]

    def _at_calls(self, live: Numbers) -> tuple[int, ...]:
        """The live bytes at each call, at its fullest moment."""
        return tuple(live[self._fullest].tolist())

    @cached_property
    def cost(self) -> Cost:
        """The total cost of the program."""
        return total(self.costs)

    @cached_property
    def peak(self) -> Peak:
        """The peak: what is live at :attr:`top`."""
        if not self.calls:
            return Peak()
        there = sorted((each for each in self.there(self.top) if each.nbytes), key=lambda each: -each.nbytes)
        return Peak(self.held[self.top], self._planned(self.top), tuple(there))


@dataclass(frozen=True)
class LoopMemory:
    """The peak of a loop: bytes allocated by the iteration (or by all that are ``in_flight``, in a loop with schedule
    actions), and bytes that were live before. Neither includes inputs, which belong to the caller.
    """

    axis: str
    count: int
    own: int
    before: int
    in_flight: int = 1


def loop_memory(footprint: Footprint) -> tuple[LoopMemory, ...]:
    """The peaks of outermost loops: for each axis the loop with the highest, in program order."""
    found: dict[str, LoopMemory] = {}
    around = regions(footprint.calls[0].graph.nodes) if footprint.calls else {}
    for loop, places in groupby(range(len(footprint.calls)), lambda place: around[footprint.calls[place]][:1]):
        if loop:
            made = _peak_of_loop(footprint, loop[0], list(places))
            other = found.get(made.axis)
            if other is None or made.own + made.before > other.own + other.before:
                found[made.axis] = made
    return tuple(found.values())


def _peak_of_loop(footprint: Footprint, loop: fx.Node, places: Sequence[int]) -> LoopMemory:
    top = max(places, key=footprint.held.__getitem__)
    before = footprint.idle[top] + sum(
        each.nbytes for each in footprint.storages if each.born < places[0] and each.last >= top and not each.pool
    )
    axis, trips = loop.args[:2]
    assert isinstance(axis, str) and isinstance(trips, int)
    in_flight = ActionOrder.of(action_order(loop).split()).in_flight or 1
    return LoopMemory(axis, trips, footprint.held[top] - before, before, in_flight)
