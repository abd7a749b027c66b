"""Memory of a replayed program: its storages, their live intervals and categories, and the peak."""

from __future__ import annotations

import bisect
import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, groupby
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import fx

from shardfx.ir.graph import Node, Phase
from shardfx.ir.program.loops.loop_regions import UnitOrder, order_of, regions
from shardfx.ir.program.store_layout import choose

from .amounts import Cost, total
from .caching_allocator import CachingAllocator
from .call_timeline import Moments, Numbers, Place, Since, Stays
from .fake_calls import Layout

if TYPE_CHECKING:
    from .call_timeline import Stays


@dataclass(frozen=True)
class Transport:
    """How collectives and messages are carried.

    Args:
        exchanged: reduce-scatters of so many bytes run as an exchange and a sum: all that a rank gets is there from the
            start to the wait, and the result is made there.
        ahead: memory for so many messages from other stages is there before they are asked for: from the call that
            asks for one so many before it, or from the first call on.
    """

    exchanged: float = inf
    ahead: int = 0

    def early(self, stays: Stays) -> Stays:
        """Storages, with those of messages made as early as they are."""
        return stays.ahead(self.ahead) if self.ahead else stays


PLAIN = Transport()
"""Nothing is there but what programs say."""


STEPS = 3
"""After so many steps what is kept is what the step needs."""


@dataclass(frozen=True, slots=True)
class Storage:
    """A block of memory: its bytes, the calls in which it is made and used last, what it is for, who made it.

    ``category`` is "gradients", "results", "new buffers", "new parameters", "new states" (they stay to the end),
    "gathered" (stored parameters made whole), "cast" (parameters in another dtype), "fetched" (from another pool),
    "activations" (made by the forward pass, used last by the backward), "communication" or "temporaries".
    ``node`` is the planned node that the call was lowered from. ``kept``: what ``memory.empty`` gives, which engines
    keep and reuse, in this step or the next (:mod:`shardfx.ir.program.store_layout`). ``pool`` is the memory that it
    lies in, where that is not the device's memory. ``uses`` are the calls that use it last in each unit of
    iterations, and ``sizes`` its bytes from some turns on. ``message``: another stage's result is received there.
    """

    nbytes: int
    born: int
    last: int
    category: str
    node: Node | None
    kept: bool = False
    pool: str = ""
    uses: tuple[int, ...] = ()
    sizes: Mapping[Since, int] = field(default_factory=dict)
    message: bool = False

    def at(self, born: int, last: int, nbytes: int) -> Storage:
        """The same as it is there once, between two moments: ``replace``, of which there are many."""
        rest = self.category, self.node, self.kept, self.pool, self.uses, self.sizes, self.message
        return Storage(nbytes, born, last, *rest)


@dataclass(frozen=True)
class Held:
    """Something that is held at a moment: what it is for, its bytes, and the node that made it."""

    category: str
    nbytes: int
    node: Node | None


@dataclass(frozen=True)
class Peak:
    """The moment at which most is held, beside the inputs: ``held``, the largest first.

    Memory that is kept and holds nothing then is of the category "kept".
    """

    nbytes: int = 0
    node: Node | None = None
    held: tuple[Held, ...] = ()

    def of(self, category: str) -> int:
        """The bytes of one category."""
        return sum(held.nbytes for held in self.held if held.category == category)


class Change(NamedTuple):
    """Memory that is made at a moment (bytes above 0), or dropped; and its number."""

    moment: int
    number: int
    nbytes: int


@dataclass
class LendingPool:
    """The sizes of memory that an engine keeps, by number: what it does in a step, without the memory."""

    kept: dict[int, int] = field(default_factory=dict)
    _number: Iterator[int] = field(default_factory=count)

    def step(self, asked: Stays) -> list[Change]:
        """What is made and dropped in a step that asks for these storages; behind the last call what none asked for."""
        sizes, free = dict(self.kept), sorted(self.kept)
        lent, used, changes = list[tuple[int, int]](), set[int](), list[Change]()
        for born, last, nbytes in asked.by_birth():
            while lent and lent[0][0] < born:
                bisect.insort(free, heapq.heappop(lent)[1])
            choice = choose(nbytes, [sizes[key] for key in free])
            take, drop = (None if place is None else free[place] for place in choice)
            if drop is not None:
                changes.append(Change(born, drop, -sizes.pop(drop)))
                free.remove(drop)
            if take is None:
                take = next(self._number)
                sizes[take] = nbytes
                changes.append(Change(born, take, nbytes))
            else:
                free.remove(take)
            heapq.heappush(lent, (last, take))
            used.add(take)
        self.kept = {key: size for key, size in sizes.items() if key in used}
        return changes


@dataclass(frozen=True)
class Footprint:
    """What a program holds and costs, call by call.

    Call ``i`` is ``calls[i]``, a node of the program's fx graph. Inputs are not counted: they belong to the caller.
    ``inside[i]`` are the bytes that the call holds while it runs beyond what it gives out. ``moments`` say when calls
    are done of iterations that are done in units: then what is said of a call is said of the moment at which most is
        held.
    """

    calls: tuple[fx.Node, ...]
    storages: tuple[Storage, ...]
    costs: tuple[Cost, ...]
    inside: tuple[int, ...]
    moments: Moments | None = None
    transport: Transport = PLAIN

    @cached_property
    def live(self) -> tuple[int, ...]:
        """The bytes that are there when each call is done, and nothing that it used last has gone yet."""
        return self._at_calls(self._live)

    @cached_property
    def beside(self) -> tuple[int, ...]:
        """The bytes in other pools of memory when each call is done."""
        return tuple(self._most(self._in(bool(each.pool) for each in self.storages)))

    @cached_property
    def idle(self) -> tuple[int, ...]:
        """The bytes that are kept and hold nothing at each call, once steps were run: of memory that is not lent, and
        of memory that is lent to one who needs less."""
        return self._at_calls(self._idle)

    @cached_property
    def by_category(self) -> Mapping[str, tuple[int, ...]]:
        """The bytes that hold something when each call is done, by what they are for."""
        here = [each.category if not each.pool else None for each in self.storages]
        names = dict.fromkeys(name for name in here if name is not None)
        return {name: self._at_calls(self._in(each == name for each in here)) for name in names}

    def there(self, call: int) -> list[Storage]:
        """The storages that are there when a call is done; of units of iterations, those of each iteration."""
        return [each for each in self._made.at(int(self._fullest[call])) if not each.pool]

    # ---- by moment --------------------------------------------------------------------------------------------------

    @cached_property
    def _made(self) -> Stays:
        """The storages by the moments in which they are made and used last."""
        made = Stays.once(self.storages) if self.moments is None else self.moments.of(self.storages)
        return self.transport.early(made)

    def _in(self, chosen: Iterable[bool]) -> Numbers:
        """The bytes that some of the storages hold, by moment: a word for each."""
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
        kept, pool, before = self._kept, LendingPool(), None
        held = np.zeros(len(self._calls), dtype=np.int64)
        for _ in range(STEPS):
            if pool.kept == before:  # as it is in every step from now on
                break
            before = pool.kept
            held[:] = 0
            for moment, _, nbytes in pool.step(kept):
                held[moment] += nbytes
            held = np.cumsum(held) + sum(before.values())
        return held - kept.in_use(len(self._calls))

    @cached_property
    def _kept(self) -> Stays:
        """What is lent of memory that is kept between steps."""
        return self._made.of([each.kept for each in self.storages])

    def reserved(self, given: Iterable[int] = ()) -> int:
        """The bytes that torch's caching allocator reserves on CUDA for such steps (:mod:`.caching_allocator`).

        What a step gives away is freed before the next one. Kernels' own workspaces are not in it.

        Args:
            given: the bytes of each tensor that is there all the time.
        """
        allocator, pool = CachingAllocator(), LendingPool()
        for nbytes in given:
            allocator.allocate(nbytes)
        made = self._made.of([not (each.kept or each.pool) for each in self.storages])
        lines, lent = [*made], dict[int, int]()
        births, deaths = np.argsort(made.born, kind="stable").tolist(), np.argsort(made.last, kind="stable").tolist()
        for _ in range(STEPS):
            before, there = allocator.reserved, dict[int, int]()
            changes, begins, ends = deque(pool.step(self._kept)), deque(births), deque(deaths)
            for moment, call in enumerate(self._calls.tolist()):
                while changes and changes[0].moment == moment:
                    _, number, nbytes = changes.popleft()
                    if nbytes > 0:
                        lent[number] = allocator.allocate(nbytes)
                    elif number in lent:
                        allocator.free(lent.pop(number))
                while begins and lines[begins[0]][0] == moment:
                    line = begins.popleft()
                    there[line] = allocator.allocate(lines[line][2])
                allocator.free(allocator.allocate(self.inside[call]))
                while ends and lines[ends[0]][1] == moment:
                    allocator.free(there.pop(ends.popleft()))
            for number in lent.keys() - pool.kept.keys():
                allocator.free(lent.pop(number))
            if allocator.reserved == before:
                break
        return allocator.reserved

    @cached_property
    def _fullest(self) -> Numbers:
        """By call: the moment at which most is held, of those in which it is done."""
        if self.moments is None:
            return self._calls
        order = np.lexsort((-self._live, self._calls))  # of moments with as much, the first
        return order[np.searchsorted(self._calls[order], np.arange(len(self.calls)))]

    def _at_calls(self, held: Numbers) -> tuple[int, ...]:
        """What is held at each call, at its fullest moment."""
        return tuple(held[self._fullest].tolist())

    def _most(self, held: Numbers) -> list[int]:
        found = np.zeros(len(self.calls), dtype=np.int64)
        np.maximum.at(found, self._calls, held)
        return list(found.tolist())

    @cached_property
    def cost(self) -> Cost:
        """What the whole program computes, touches and sends."""
        return total(self.costs)

    @cached_property
    def peak(self) -> Peak:
        """The call during which most is held: what it uses, and what it makes, is there at once."""
        if not self.calls:
            return Peak()
        top = max(range(len(self.calls)), key=lambda i: self.live[i] + self.inside[i])
        made_by = self.calls[top].meta.get("shardfx")
        there = [Held(each.category, each.nbytes, each.node) for each in self.there(top) if each.nbytes]
        if self.idle[top]:
            there.append(Held("kept", self.idle[top], None))
        if self.inside[top]:
            there.append(Held("temporaries", self.inside[top], made_by))
        there.sort(key=lambda held: -held.nbytes)
        return Peak(self.live[top] + self.inside[top], made_by, tuple(there))

    def at(self, call: str) -> int:
        """The bytes that are there when a call of this name is done."""
        return self.live[self._places[call]]

    @cached_property
    def _places(self) -> dict[str, int]:
        return {node.name: i for i, node in enumerate(self.calls)}


@dataclass(eq=False, slots=True)
class Block:
    """A storage; ``uses`` are the last calls that use it in units of iterations, ``sizes`` its bytes from some
    turn on, where these are others."""

    nbytes: int
    born: int
    last: int
    node: Node | None
    category: str = ""
    used_in: Phase | None = None
    kept: bool = False
    pool: str = ""
    uses: dict[Place, int] = field(default_factory=dict)
    sizes: dict[Since, int] = field(default_factory=dict)
    message: bool = False

    def storage(self, category: str) -> Storage:
        """It as it is known in the end."""
        uses = (*self.uses.values(),)
        given = self.nbytes, self.born, self.last, category, self.node, self.kept, self.pool
        return Storage(*given, uses, self.sizes, self.message)

    def use(self, at: int, place: Place) -> None:
        """A call uses it."""
        self.last = at
        if place:
            self.uses[place] = at


@dataclass(frozen=True, slots=True)
class BlockTensor:
    """A tensor in a block; ``offset`` is the number of elements before its first one."""

    layout: Layout
    block: Block
    offset: int = 0


@dataclass(frozen=True)
class IterationMemory:
    """The call of some iterations during which most is held: bytes that the iteration made (or all that are
    ``under_way``, where iterations have units), and bytes that were there before.

    Inputs, which belong to the caller, are in neither.
    """

    axis: str
    count: int
    own: int
    stays: int
    under_way: int = 1


def iteration_memory(footprint: Footprint) -> tuple[IterationMemory, ...]:
    """Of the outermost iterations of each axis those that hold most, in the order of the program."""
    found: dict[str, IterationMemory] = {}
    for made in _of_each(footprint):
        other = found.get(made.axis)
        if other is None or made.own + made.stays > other.own + other.stays:
            found[made.axis] = made
    return tuple(found.values())


def _of_each(footprint: Footprint) -> Iterator[IterationMemory]:
    if not footprint.calls:
        return
    around = regions(footprint.calls[0].graph.nodes)
    for loop, places in groupby(range(len(footprint.calls)), lambda place: around[footprint.calls[place]][:1]):
        if loop:
            yield _during(footprint, loop[0], list(places))


def _during(footprint: Footprint, loop: fx.Node, places: Sequence[int]) -> IterationMemory:
    live, inside = footprint.live, footprint.inside
    top = max(places, key=lambda place: live[place] + inside[place])
    kept = footprint.idle[top] + sum(
        each.nbytes for each in footprint.storages if each.born < places[0] and each.last >= top and not each.pool
    )
    axis, count = loop.args[:2]
    assert isinstance(axis, str) and isinstance(count, int)
    under_way = UnitOrder.of(order_of(loop).split()).under_way or 1
    return IterationMemory(axis, count, live[top] + inside[top] - kept, kept, under_way)
