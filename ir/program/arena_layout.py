"""Memory planning for an arena: live intervals of buffers, a greedy packing of them, and the check that none overlap.

    %flat = memory.empty([48], ...)       live from the call that makes it to its last use, or until a collective that
                                          was started on it is done
    return (..., %flat)                   what leaves the program is not in the arena, nor what a loop makes anew, or
                                          schedule actions use, which run in another order than they stand

>>> intervals = [Interval(128, 0, 4), Interval(64, 1, 2), Interval(64, 3, 5)]
>>> pack(intervals)                              # the last two are never live together
Packing(offsets=(0, 128, 128), nbytes=192)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, NoReturn

import torch
from torch import fx

from shardfx.ir.ops import memory_ops

from .aliasing import Sharing
from .loops.loop_regions import part_in_iterations, regions
from .rank_program import RankProgram

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


class Room(NamedTuple):
    """A place in an arena: bytes ``begin`` .. ``end`` - 1."""

    arena: fx.Node
    begin: int
    end: int

    def meets(self, other: Room) -> bool:
        """Whether the two have a byte in common."""
        return self.arena is other.arena and self.begin < other.end and other.begin < self.end


class ArenaUse(NamedTuple):
    """The bytes of a program's arena, the most that lies in it at once (no arena could be smaller), and how many
    places are in it."""

    nbytes: int
    at_once: int
    places: int


def rooms(nodes: Iterable[fx.Node]) -> dict[fx.Node, Room]:
    """The places in arenas, by the calls that give them."""
    found: dict[fx.Node, Room] = {}
    for node in nodes:
        if node.target is memory_ops.slot:
            arguments: Any = node.args
            arena, begin, shape, dtype = arguments
            found[node] = Room(arena, begin, begin + nbytes_of(shape, dtype))
    return found


def nbytes_of(shape: Sequence[int], dtype: torch.dtype) -> int:
    """The bytes of a tensor that lies dense."""
    return torch.Size(shape).numel() * dtype.itemsize


class Tenancy:
    """How long memory of a program is needed."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self._share = Sharing(nodes)
        self._place = {node: place for place, node in enumerate(nodes)}
        inside = self._inside = regions(nodes)
        self._in_units = {node for node in nodes if any(part_in_iterations(each) == "unit" for each in inside[node])}

    def of(self, memory: fx.Node, nbytes: int) -> Block | None:
        """From when to when; None: it leaves the program, is made in iterations, or is used by units of them."""
        if self._inside[memory]:
            return None
        uses = [use for root in self._share.seen_in(memory) for use in self._share.uses(root)]
        if any(use.op == "output" for use in uses) or not self._in_units.isdisjoint((memory, *uses)):
            return None
        return Block(nbytes, self._place[memory], self._share.until(memory))


def use_of_arena(program: RankProgram) -> ArenaUse | None:
    """What a program's arena is and could be; None: it has none."""
    nodes = list(program.graph.nodes)
    found = rooms(nodes)
    if not found:
        return None
    tenancy = Tenancy(nodes)
    blocks = [block for node, room in found.items() if (block := tenancy.of(node, room.end - room.begin)) is not None]
    arenas = {room.arena for room in found.values()}
    return ArenaUse(sum(_size(arena) for arena in arenas), at_once(blocks), len(found))


def lying(program: RankProgram, call: fx.Node) -> dict[fx.Node, int]:
    """What lies in a program's arenas when a call is done: the bytes, by the calls that give the places."""
    nodes = list(program.graph.nodes)
    tenancy, at, found = Tenancy(nodes), nodes.index(call), dict[fx.Node, int]()
    for node, room in rooms(nodes).items():
        block = tenancy.of(node, room.end - room.begin)
        if block is not None and block.born <= at <= block.last:
            found[node] = block.nbytes
    return found


def _size(arena: fx.Node) -> int:
    nbytes: Any = arena.args[0]
    return int(nbytes)


class Overlaps:
    """The places in a program's arenas.

    Args:
        fail: raises, of what is wrong at which call.
    """

    def __init__(self, nodes: Sequence[fx.Node], share: Sharing, fail: Callable[..., NoReturn]) -> None:
        self._share, self._fail = share, fail
        self._rooms = rooms(nodes)
        self._by_root: dict[fx.Node, list[fx.Node]] = {}
        for node in self._rooms:
            self._by_root.setdefault(share.root(node), []).append(node)
        self._beside: dict[fx.Node, list[fx.Node]] = {}
        inside = regions(nodes) if self._rooms else {}
        self._in_units = {
            node for node, around in inside.items() if any(part_in_iterations(n) == "unit" for n in around)
        }

    def take(self, node: fx.Node) -> None:
        """A call gives a place: it lies within the arena, and no unit of iterations uses it."""
        room = self._rooms.get(node)
        if room is None:
            return
        arguments: Any = node.args
        arena, offset, _, dtype = arguments
        if arena.target is not memory_ops.arena:
            self._fail(f"{node.name} is a place in {arena.name}, which is no arena", node, expected="memory.arena")
        if offset < 0 or offset % dtype.itemsize or room.end > arena.args[0]:
            self._fail(
                f"{node.name} does not lie in its arena",
                node,
                expected=f"bytes 0 .. {arena.args[0]}, and a begin that {dtype.itemsize} divides",
                got=f"bytes {offset} .. {room.end}",
            )
        for use in (node, *self._share.uses(self._share.root(node))):
            if use in self._in_units:
                self._fail(
                    f"{node.name} is used in a unit of iterations", use, expected="memory.empty: units take iterations"
                )

    def beside(self, into: fx.Node) -> list[fx.Node]:
        """The roots of what lies elsewhere and has a byte in common with memory that is written."""
        root = self._share.root(into)
        if root.target is memory_ops.arena:
            self._fail(f"{root.name} is written as such", into, expected="memory.slot of it")
        if root not in self._beside:
            mine = [self._rooms[node] for node in self._by_root.get(root, ())]
            self._beside[root] = list(dict.fromkeys(self._meeting(root, mine)))
        return self._beside[root]

    def _meeting(self, root: fx.Node, mine: Sequence[Room]) -> Iterator[fx.Node]:
        for node, room in self._rooms.items() if mine else ():
            if self._share.root(node) is not root and any(room.meets(each) for each in mine):
                yield self._share.root(node)

    def holds(self, value: fx.Node) -> bool:
        """Whether a value may lie in an arena."""
        return any(root in self._by_root or root.target is memory_ops.arena for root in self._share.seen_in(value))
