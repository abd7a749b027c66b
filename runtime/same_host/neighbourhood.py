"""Collectives among CPU ranks of one machine: each sees what the others hold, and does its part of the work.

    all_reduce of a bucket      each rank is READY, adds up its n-th of all buckets, writes that into all of them: DONE
    what is smaller, gathers    each rank lays a copy where the others see it: READY; adds up, or takes, all of them

Among two processes of one machine this takes a fifth of the processor time of gloo, which sends through sockets
(``python -m benchmarks.collectives``). Sums are taken in the order of the ranks, so that they are the same on all. A
collective is done by those that wait for it, when they do, and with it those of its group that were started before: in
which order ranks wait does not matter, if they start in the same one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate, count
from typing import Any

import torch

from .links import Link, Word
from .shared_memory import Segment, segment_of, shared_bytes

Tensor = torch.Tensor
FOLDS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}
EACH = 1 << 20
"""An all-reduce of so many bytes is shared out: each rank adds up a part."""
FEW = 3
"""So few ranks are done sooner where each adds up all of what must be laid out for others and taken back."""
BLOCK = 1 << 18
"""So many bytes are added at a time, which stay in a processor's cache."""


class Started:
    """A collective under way; ``before`` it and with it, those of its group that are not done yet."""

    def __init__(self, number: int, finish: Callable[[int], Tensor], before: deque[Started]) -> None:
        self._number, self._finish, self._before = number, finish, before
        self._result: Tensor | None = None
        before.append(self)

    def wait(self) -> Tensor:
        """Do this rank's part, also of what was started before; gives the result."""
        while self._result is None:
            first = self._before.popleft()
            first._result = first._finish(first._number)
        return self._result


class Saying:
    """Numbers that the members of a group tell one another, under way."""

    def __init__(self, near: Neighbours, number: int, mine: tuple[int, ...]) -> None:
        self._near, self._number, self._mine = near, number, mine

    def comes(self, seconds: float) -> bool:
        """Whether all have said theirs within so many seconds."""
        until = time.monotonic() + seconds
        return all(link.comes(Word.SAYS, self._number, until - time.monotonic()) for link in self._near.links)

    def wait(self) -> list[tuple[int, ...]]:
        """What each of them says, in their order."""
        said = [link.said(self._number) for link in self._near.links]
        return [*said[: self._near.place], self._mine, *said[self._near.place :]]


class Place:
    """Shared memory for a copy of what this rank puts into the collective of a ``number``; free again when this rank
    and all others have seen what lies there."""

    def __init__(self, nbytes: int) -> None:
        self.memory = shared_bytes(nbytes)
        self.number = -1
        self.free = self.seen_here = True


class Neighbours:
    """A group of ranks on one machine.

    Args:
        links: to the others, in the order of the group.
        place: of this rank in it.
    """

    def __init__(self, links: Sequence[Link], place: int) -> None:
        self.links, self.place, self.count = links, place, len(links) + 1
        self._numbers = count()
        self._places: list[Place] = []
        self._under_way: deque[Started] = deque()

    @property
    def memory(self) -> list[Tensor]:
        """What is seen of the others, and kept for what is sent: no program's."""
        return [*(each for link in self.links for each in link.memory.values()), *(p.memory for p in self._places)]

    def close(self) -> None:
        """Leave the group."""
        for link in self.links:
            link.close()

    @staticmethod
    def reduces(x: Tensor, op: str) -> bool:
        """Whether this kind of reduction is done here."""
        numbers = x.dtype.is_floating_point or (op != "avg" and x.dtype not in (torch.bool, torch.complex32))
        return op in FOLDS and numbers and not (x.is_complex() and op in ("max", "min"))

    # ---- starting --------------------------------------------------------------------------------------------

    def all_reduce_(self, x: Tensor, op: str) -> Started:
        """Reduce over ``x``, which is dense, and which nobody uses until it is waited for."""
        number = next(self._numbers)
        where = segment_of(x)
        if x.nbytes < EACH or (where is None and self.count <= FEW):
            mine = self._lay(number, x)

            def finish(number: int) -> Tensor:
                self._fold([each.view(x.shape) for each in self._seen(number, mine)], op, x)
                self._done(number)
                return x

            return Started(number, finish, self._under_way)
        mine = self._lay(number, x) if where is None else x.view(-1)
        if where is not None:
            self._ready(number, where)

        def finish_shared(number: int) -> Tensor:
            parts = [self._part(each) for each in self._seen(number, mine)]
            self._fold(parts, op, parts[0], spread=True)
            self._done(number, together=True)
            return x if where is not None else x.copy_(mine.view(x.shape))

        return Started(number, finish_shared, self._under_way)

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Started:
        """All ranks' ``x`` joined along the first dim, in ``out`` if that is given."""
        number = next(self._numbers)
        to = torch.empty([self.count * x.shape[0], *x.shape[1:]], dtype=x.dtype) if out is None else out
        mine = self._lay(number, x)

        def finish(number: int) -> Tensor:
            for part, each in zip(to.view(self.count, x.numel()), self._seen(number, mine), strict=True):
                part.copy_(each)
            self._done(number)
            return to

        return Started(number, finish, self._under_way)

    def reduce_scatter(self, x: Tensor, op: str, out: Tensor | None = None) -> Started:
        """This rank's piece, along the first dim, of what is reduced, in ``out`` if that is given."""
        number = next(self._numbers)
        piece = torch.empty([x.shape[0] // self.count, *x.shape[1:]], dtype=x.dtype) if out is None else out
        where = segment_of(x) if x.is_contiguous() and x.nbytes >= EACH else None
        mine = self._lay(number, x) if where is None else x.view(-1)
        if where is not None:
            self._ready(number, where)

        def finish(number: int) -> Tensor:
            parts = [each.view(self.count, piece.numel())[self.place] for each in self._seen(number, mine)]
            self._fold(parts, op, piece)
            self._done(number, together=where is not None)
            return piece

        return Started(number, finish, self._under_way)

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int], out: Tensor | None = None) -> Started:
        """The rows of ``x`` that are for this rank, of all ranks.

        Args:
            x: rows for each rank of the group, in their order.
            sent: how many, for each.
            received: how many come from each.
            out: where they are joined, if that is given.
        """
        number, row = next(self._numbers), x.shape[1:].numel()
        to = torch.empty([sum(received), *x.shape[1:]], dtype=x.dtype) if out is None else out
        mine = self._lay(number, x, [rows * row * x.element_size() for rows in accumulate(sent, initial=0)])

        def finish(number: int) -> Tensor:
            own = mine.split([rows * row for rows in sent])[self.place]
            found = self._heard(number, own)
            for part, each in zip(to.view(-1).split([rows * row for rows in received]), found, strict=True):
                part.copy_(each[: part.nbytes].view(part.dtype) if each is not own else own)
            self._done(number)
            return to

        return Started(number, finish, self._under_way)

    def say(self, mine: Sequence[int]) -> Saying:
        """Tell all others :data:`.links.SAID` numbers, 0 .. 2**64 - 1."""
        number = next(self._numbers)
        for link in self.links:
            link.say(number, mine)
        return Saying(self, number, tuple(mine))

    # ---- what they are made of -------------------------------------------------------------------------------

    def _lay(self, number: int, x: Tensor, parts: Sequence[int] | None = None) -> Tensor:
        """Lay a copy of ``x`` where the others see it; gives it, flat. ``parts``: from which byte on, each."""
        place = self._place_of(x.nbytes)
        place.number, place.free, place.seen_here = number, False, False
        copy = place.memory[: x.nbytes].view(x.dtype)
        copy.view(x.shape).copy_(x)
        where = segment_of(place.memory)
        assert where is not None
        self._ready(number, where, parts)
        return copy

    def _place_of(self, nbytes: int) -> Place:
        """A free place that is large enough."""
        for place in self._places:
            seen = place.seen_here and not place.free
            if seen and all(link.has_heard(Word.DONE, place.number) for link in self.links):
                self._hear_done(place.number)
        free = [place for place in self._places if place.free]
        fits = [place for place in free if place.memory.numel() >= nbytes]
        if fits:
            return min(fits, key=lambda place: place.memory.numel())
        if free:
            self._places.remove(free[0])
        self._places.append(Place(max(nbytes, 1)))
        return self._places[-1]

    def _ready(self, number: int, where: tuple[Segment, int], parts: Sequence[int] | None = None) -> None:
        segment, offset = where
        for at, link in enumerate(self.links):
            part = 0 if parts is None else parts[at + (at >= self.place)]
            link.tell(Word.READY, number, (segment, offset + part))

    def _seen(self, number: int, mine: Tensor) -> list[Tensor]:
        """What each rank of the group put in, flat, once it is there."""
        found = self._heard(number, mine)
        return [each if each is mine else each[: mine.nbytes].view(mine.dtype) for each in found]

    def _heard(self, number: int, mine: Tensor) -> list[Tensor]:
        """The memory that each of the others named, once it did; ``mine`` in its place."""
        found = [link.hear(Word.READY, number) for link in self.links]
        return [*found[: self.place], mine, *found[self.place :]]

    def _done(self, number: int, together: bool = False) -> None:
        """Say that this rank has seen, and done, what it had to; ``together``: go on when all have."""
        for link in self.links:
            link.tell(Word.DONE, number)
        for place in self._places:
            place.seen_here = place.seen_here or place.number == number
        if together:
            self._hear_done(number)

    def _hear_done(self, number: int) -> None:
        for link in self.links:
            link.hear(Word.DONE, number)
        for place in self._places:
            place.free = place.free or place.number == number

    def _part(self, x: Tensor) -> Tensor:
        """The part of a flat tensor that is this rank's to reduce."""
        per = -(-x.numel() // self.count)
        return x[self.place * per : (self.place + 1) * per]

    def _fold(self, parts: Sequence[Tensor], op: str, out: Tensor, spread: bool = False) -> None:
        """Reduce tensors of one shape, in their order; ``out`` may be the first. ``spread``: into all of them."""
        fold = FOLDS[op]
        size = BLOCK // out.element_size()
        flat: list[Any] = [each.view(-1).split(size) for each in (out, *parts)]
        for to, first, second, *rest in zip(*flat, strict=True):
            fold(first, second, out=to)
            for each in rest:
                fold(to, each, out=to)
            if op == "avg":
                to.div_(self.count)
            for each in (second, *rest) if spread else ():
                each.copy_(to)


met: dict[str, Neighbours] = {}
"""The groups whose ranks are all on this machine, by name."""
apart: set[str] = set()
"""Those whose ranks are not."""
heard: list[Callable[[str, str, Tensor, Sequence[int] | None], None]] = []
"""Who wants to know of each collective that starts here: its kind, its group, what this rank puts in, and how many rows
of it are for whom where that is said."""
