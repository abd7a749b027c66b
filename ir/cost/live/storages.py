"""The memory of a program that was replayed: which storages there are, how long, what for, and how much at once."""

from __future__ import annotations

import heapq
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from shardfx.ir.cost.amounts import Cost, total
from shardfx.ir.graph import Node
from shardfx.ir.program.lending import choose

from .call_moments import Moments
from .transport import PLAIN, Transport
from .turn_sizes import Since

STEPS = 3
"""After so many steps what is kept is what the step needs."""


@dataclass(frozen=True, slots=True)
class Storage:
    """A block of memory: its bytes, the calls in which it is made and used last, what it is for, who made it.

    ``category`` is "gradients", "results", "new buffers", "new parameters", "new states" (they stay to the end),
    "gathered" (stored parameters made whole), "cast" (parameters in another dtype), "fetched" (from another pool),
    "activations" (made by the forward pass, used last by the backward), "communication" or "temporaries".
    ``node`` is the planned node that the call was lowered from. ``kept``: what ``memory.empty`` gives, which engines
    keep and lend again when nobody holds it, in this step or the next (:mod:`shardfx.ir.program.lending`). ``pool`` is
    what it lies in, where that is not the device's memory. ``uses`` are the calls that use it last in each unit of
    turns, and ``sizes`` its bytes from some turns on. ``message``: another stage's result is received there.
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
        """The same as it is there once, between two moments: ``replace``, of which there are millions."""
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


@dataclass
class LendingPool:
    """The sizes of memory that an engine keeps: what it does in a step, without the memory."""

    kept: list[int] = field(default_factory=list)

    def step(self, asked: Sequence[Storage], calls: int) -> list[int]:
        """The bytes that are kept when each call is done, in a step that asks for these storages."""
        asked = sorted(asked, key=lambda storage: storage.born)
        sizes, lent, used = dict(enumerate(self.kept)), list[tuple[int, int]](), set[int]()
        held, number, there = list[int](), len(self.kept), sum(self.kept)
        for each in asked:
            held += [there] * (each.born - len(held))
            while lent and lent[0][0] < each.born:
                heapq.heappop(lent)
            taken = {key for _, key in lent}
            free = [key for key in sizes if key not in taken]
            choice = choose(each.nbytes, [sizes[key] for key in free])
            if choice.drop is not None:
                there -= sizes.pop(free[choice.drop])
            key = number if choice.take is None else free[choice.take]
            if choice.take is None:
                sizes[key], number, there = each.nbytes, number + 1, there + each.nbytes
            heapq.heappush(lent, (each.last, key))
            used.add(key)
        held += [there] * (calls - len(held))
        self.kept = [size for key, size in sizes.items() if key in used]
        return held


@dataclass(frozen=True)
class Footprint:
    """What a program holds and costs, call by call.

    Call ``i`` is ``calls[i]``, a node of the program's fx graph. Inputs are not counted: they belong to the caller.
    ``inside[i]`` are the bytes that the call holds while it runs beyond what it gives out. ``moments`` say when calls
    are done of turns that are done in units: then what is said of a call is said of the moment at which most is held.
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
        return tuple(self._most(self._in_use(s for s in self._made if s.pool)))

    @cached_property
    def idle(self) -> tuple[int, ...]:
        """The bytes that are kept and hold nothing at each call, once steps were run: of memory that is not lent, and
        of memory that is lent to one who needs less."""
        return self._at_calls(self._idle)

    @cached_property
    def by_category(self) -> Mapping[str, tuple[int, ...]]:
        """The bytes that hold something when each call is done, by what they are for."""
        found: dict[str, list[Storage]] = {}
        for storage in (each for each in self._made if not each.pool):
            found.setdefault(storage.category, []).append(storage)
        return {category: self._at_calls(self._in_use(storages)) for category, storages in found.items()}

    def there(self, call: int) -> list[Storage]:
        """The storages that are there when a call is done; of units of turns, those of each turn."""
        moment = self._fullest[call]
        return [each for each in self._made if each.born <= moment <= each.last and not each.pool]

    # ---- by moment --------------------------------------------------------------------------------------------------

    @cached_property
    def _made(self) -> Sequence[Storage]:
        """The storages by the moments in which they are made and used last."""
        made = self.storages if self.moments is None else self.moments.of(self.storages)
        return self.transport.early(made) if self.transport.ahead else made

    @property
    def _count(self) -> int:
        return len(self.calls) if self.moments is None else len(self.moments.calls)

    @cached_property
    def _live(self) -> list[int]:
        return [*map(operator.add, self._in_use(s for s in self._made if not s.pool), self._idle)]

    @cached_property
    def _idle(self) -> list[int]:
        kept = [storage for storage in self._made if storage.kept]
        held = [0] * self._count
        pool = LendingPool()
        for _ in range(STEPS):
            held = pool.step(kept, self._count)
        return [*map(operator.sub, held, self._in_use(kept))]

    def _in_use(self, storages: Iterable[Storage]) -> list[int]:
        """The bytes of those that hold something."""
        steps = [0] * (self._count + 1)
        for storage in storages:
            steps[storage.born] += storage.nbytes
            steps[storage.last + 1] -= storage.nbytes
        return list(itertools.accumulate(steps[:-1]))

    @cached_property
    def _fullest(self) -> Sequence[int]:
        """By call: the moment at which most is held, of those in which it is done."""
        if self.moments is None:
            return range(len(self.calls))
        found = [-1] * len(self.calls)
        for moment, call in enumerate(self.moments.calls):
            if found[call] < 0 or self._live[moment] > self._live[found[call]]:
                found[call] = moment
        return found

    def _at_calls(self, held: Sequence[int]) -> tuple[int, ...]:
        """What is held at each call, at its fullest moment."""
        return tuple([held[moment] for moment in self._fullest])

    def _most(self, held: Sequence[int]) -> list[int]:
        found = [0] * len(self.calls)
        for call, nbytes in zip(range(len(held)) if self.moments is None else self.moments.calls, held, strict=True):
            found[call] = max(found[call], nbytes)
        return found

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
