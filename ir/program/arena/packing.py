"""Places in one memory for blocks that are there at different times.

>>> blocks = [Block(128, 0, 4), Block(64, 1, 2), Block(64, 3, 5)]
>>> pack(blocks)                                 # the last two are never there together
Packing(places=(0, 128, 128), nbytes=192)
>>> at_once(blocks)                              # no packing needs less
192
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

ALIGNMENT = 64
"""Each block begins at a multiple of so many bytes: a processor's cache line."""


class Block(NamedTuple):
    """Bytes that are needed from one call to another, both with it."""

    nbytes: int
    born: int
    last: int

    @property
    def room(self) -> int:
        """The bytes up to where the next one may begin."""
        return -(-self.nbytes // ALIGNMENT) * ALIGNMENT


TRIES, WORK = 100, 2_000_000
"""So often an order is changed, and so many pairs of blocks are looked at for it."""


@dataclass(frozen=True)
class Packing:
    """The first byte of each block, and of how many bytes the memory is."""

    places: tuple[int, ...]
    nbytes: int


ORDERS: tuple[Callable[[Block], Any], ...] = (
    lambda block: (-block.room, block.born),
    lambda block: (-block.room * (block.last - block.born + 1), block.born),
    lambda block: (block.born, -block.room),
    lambda block: (block.born - block.last, -block.room),
)
"""In which blocks are placed, one after the other: the best of them is taken."""


def at_once(blocks: Sequence[Block]) -> int:
    """The most bytes that are there at once: the lower bound of any packing."""
    steps = [0] * (max((block.last for block in blocks), default=0) + 2)
    for block in blocks:
        steps[block.born] += block.room
        steps[block.last + 1] -= block.room
    return max(accumulate(steps), default=0)


def pack(blocks: Sequence[Block]) -> Packing:
    """Place blocks so that none that are there at once overlap: each, in one of a few orders, in the smallest gap that
    holds it between those that are there already. Where that takes more than :func:`at_once`, what came to lie highest
    is placed first in the next try; the best one is taken."""
    bound = at_once(blocks)
    tries = [sorted(range(len(blocks)), key=lambda i, by=by: by(blocks[i])) for by in ORDERS]  # type: ignore[misc]
    order, best = min(((each, _placed(blocks, each)) for each in tries), key=lambda found: found[1].nbytes)
    made = best
    for _ in range(min(TRIES, WORK // len(blocks) ** 2)):
        if best.nbytes == bound:
            break
        top = max(order, key=lambda i: made.places[i] + blocks[i].room)
        order = [top, *(i for i in order if i != top)]
        made = _placed(blocks, order)
        best = min(best, made, key=lambda packing: packing.nbytes)
    return best


def _placed(blocks: Sequence[Block], order: Sequence[int]) -> Packing:
    places, there, top = [0] * len(blocks), list[tuple[int, Block]](), 0
    for number in order:
        block = blocks[number]
        beside = sorted((at, at + b.room) for at, b in there if b.born <= block.last and block.born <= b.last)
        end, gaps = 0, list[tuple[int, int]]()
        for begin, behind in beside:
            if begin - end >= block.room:
                gaps.append((begin - end, end))
            end = max(end, behind)
        places[number] = min(gaps)[1] if gaps else end
        there.append((places[number], block))
        top = max(top, places[number] + block.room)
    return Packing(tuple(places), top)
