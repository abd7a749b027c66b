"""Memory of a replayed program: its storages, their live intervals and categories, and the peak."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, groupby

import numpy as np
from torch import fx

from shardfx.ir.graph import Node, Phase
from shardfx.ir.program.loops.loop_regions import ActionOrder, action_order, regions
from shardfx.ir.program.store_layout import choose_buffer

from .amounts import Cost, total
from .call_timeline import CallTimeline, LiveIntervals, Numbers, Scope, Since
from .fake_calls import TensorLayout

STEPS = 3
"""The number of steps after which the kept buffers are in a steady state."""


@dataclass(eq=False, slots=True)
class Storage:
    """A storage: its bytes, its first and last call, its category, and the node that allocates it.

    ``category`` is "gradients", "results", "new buffers", "new parameters", "new states" (live to the end), "gathered"
    (all-gathered parameters), "cast" (parameters in another dtype), "fetched" (from another memory), "activations"
    (made by the forward pass, used last by the backward), "communication" or "temporaries". ``node`` is the planned
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
        idle, of the category "kept"; and last its temporaries."""
        made = [each for each in self._made.at(int(self._fullest[call])) if not each.pool]
        idle = Storage(self.idle[call], call, call, None, "kept")
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
