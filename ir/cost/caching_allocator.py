"""A simulation of torch's CUDA caching allocator: the memory reserved for a sequence of allocations and frees.

>>> allocator = CachingAllocator()
>>> block = allocator.allocate(3 << 20)             # of 1 to 10 MB: a part of a segment of 20 MB
>>> allocator.free(block)
>>> allocator.allocate(12 << 20), allocator.reserved >> 20          # lies in the same segment
(0, 20)

The rules are those of torch 2.11 to 2.15 in their default settings (``c10/cuda/CUDACachingAllocator.cpp``,
``c10/core/AllocatorConfig.h``):

- sizes are rounded up to 512 bytes;
- a request takes the smallest free block that is large enough, at the lowest address among equals, of the pool of its
  stream and class: *small* up to 1 MB, *large* above;
- where there is none a segment is reserved: 2 MB for a small request, 20 MB for one below 10 MB, else the size rounded
  up to 2 MB;
- what remains of a block is split off, of a small one from 512 bytes on, of a large one above 1 MB;
- a freed block merges with free neighbours of its segment; segments are never returned.

Not simulated: expandable segments, an upper limit for splitting, garbage collection, the retry that returns cached
segments when memory runs out.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

UNIT = 512
"""The granularity of block sizes."""
SMALL, SMALL_SEGMENT = 1 << 20, 2 << 20
"""The largest small request, and the size of its segments."""
MEDIUM, MEDIUM_SEGMENT = 10 << 20, 20 << 20
"""The size below which large requests share segments, and the size of these."""
ROUND = 2 << 20
"""The granularity of segments for larger requests."""
NOTHING = -1
"""The address of an empty allocation."""


@dataclass(eq=False, slots=True)
class _Block:
    """A block of a segment, linked to its neighbours."""

    address: int
    size: int
    pool: list[tuple[int, int]]
    small: bool
    before: _Block | None = None
    behind: _Block | None = None
    free: bool = False


class CachingAllocator:
    """The allocator's state; ``reserved`` are the bytes of all segments."""

    def __init__(self) -> None:
        self.reserved = 0
        self._blocks: dict[int, _Block] = {}
        self._pools: dict[tuple[int, bool], list[tuple[int, int]]] = {}
        """The free blocks by stream and class, sorted by size and address."""

    def allocate(self, nbytes: int, stream: int = 0) -> int:
        """Allocate a block of at least ``nbytes``; returns its address."""
        if not nbytes:
            return NOTHING
        size = -(-nbytes // UNIT) * UNIT
        small = size <= SMALL
        pool = self._pools.setdefault((stream, small), [])
        at = bisect.bisect_left(pool, (size, -1))
        if at < len(pool):
            block = self._blocks[pool.pop(at)[1]]
            block.free = False
        else:
            block = _Block(self.reserved, segment_size(size), pool, small)
            self._blocks[block.address] = block
            self.reserved += block.size
        self._split(block, size)
        return block.address

    def free(self, address: int) -> None:
        """Free a block."""
        if address == NOTHING:
            return
        block = self._blocks[address]
        if block.behind is not None and block.behind.free:
            self._merge(block, block.behind)
        if block.before is not None and block.before.free:
            before = block.before
            self._merge(before, block)
            block = before
        block.free = True
        bisect.insort(block.pool, (block.size, block.address))

    def _split(self, block: _Block, size: int) -> None:
        """Shrink a block to a size, if the remainder is large enough to be split off."""
        left = block.size - size
        if left < UNIT if block.small else left <= SMALL:
            return
        rest = _Block(block.address + size, left, block.pool, block.small, block, block.behind, free=True)
        if rest.behind is not None:
            rest.behind.before = rest
        block.behind, block.size = rest, size
        self._blocks[rest.address] = rest
        bisect.insort(rest.pool, (rest.size, rest.address))

    def _merge(self, first: _Block, second: _Block) -> None:
        """Merge two neighbouring blocks; free ones are taken out of their pool."""
        for block in (first, second):
            if block.free:
                del block.pool[bisect.bisect_left(block.pool, (block.size, block.address))]
                block.free = False
        first.size += second.size
        first.behind = second.behind
        if second.behind is not None:
            second.behind.before = first
        del self._blocks[second.address]


def segment_size(size: int) -> int:
    """The size of the segment that is reserved for a request of a rounded size."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return MEDIUM_SEGMENT if size < MEDIUM else -(-size // ROUND) * ROUND
