"""The memory of a program that was replayed: which storages there are, how long, what for, and how much at once."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from shardfx.ir.graph import Node
from shardfx.ir.program.lending import choose

from .amounts import Cost, total

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
    what it lies in, where that is not the device's memory.
    """

    nbytes: int
    born: int
    last: int
    category: str
    node: Node | None
    kept: bool = False
    pool: str = ""


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
        sizes, lent, used = dict(enumerate(self.kept)), dict[int, int](), set[int]()
        held, number, place = [], len(self.kept), 0
        for call in range(calls):
            lent = {key: last for key, last in lent.items() if last >= call}
            while place < len(asked) and asked[place].born == call:
                free = [key for key in sizes if key not in lent]
                choice = choose(asked[place].nbytes, [sizes[key] for key in free])
                if choice.drop is not None:
                    del sizes[free[choice.drop]]
                key = number if choice.take is None else free[choice.take]
                if choice.take is None:
                    sizes[key], number = asked[place].nbytes, number + 1
                lent[key] = asked[place].last
                used.add(key)
                place += 1
            held.append(sum(sizes.values()))
        self.kept = [size for key, size in sizes.items() if key in used]
        return held


@dataclass(frozen=True)
class Footprint:
    """What a program holds and costs, call by call.

    Call ``i`` is ``calls[i]``, a node of the program's fx graph. Inputs are not counted: they belong to the caller.
    ``inside[i]`` are the bytes that the call holds while it runs beyond what it gives out.
    """

    calls: tuple[fx.Node, ...]
    storages: tuple[Storage, ...]
    costs: tuple[Cost, ...]
    inside: tuple[int, ...]

    @cached_property
    def live(self) -> tuple[int, ...]:
        """The bytes that are there when each call is done, and nothing that it used last has gone yet."""
        return tuple(map(operator.add, self._in_use(s for s in self.storages if not s.pool), self.idle))

    @cached_property
    def beside(self) -> tuple[int, ...]:
        """The bytes in other pools of memory when each call is done."""
        return tuple(self._in_use(s for s in self.storages if s.pool))

    @cached_property
    def idle(self) -> tuple[int, ...]:
        """The bytes that are kept and hold nothing at each call, once steps were run: of memory that is not lent, and
        of memory that is lent to one who needs less."""
        kept = [storage for storage in self.storages if storage.kept]
        held = [0] * len(self.calls)
        pool = LendingPool()
        for _ in range(STEPS):
            held = pool.step(kept, len(self.calls))
        return tuple(map(operator.sub, held, self._in_use(kept)))

    def _in_use(self, storages: Iterable[Storage]) -> list[int]:
        """The bytes of those that hold something, by call."""
        steps = [0] * (len(self.calls) + 1)
        for storage in storages:
            steps[storage.born] += storage.nbytes
            steps[storage.last + 1] -= storage.nbytes
        return list(itertools.accumulate(steps[:-1]))

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
        there = [
            Held(s.category, s.nbytes, s.node)
            for s in self.storages
            if s.born <= top <= s.last and s.nbytes and not s.pool
        ]
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
