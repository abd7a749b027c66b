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

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, NoReturn

import torch
from torch import fx

from shardfx.ir.ops import memory_ops

from .aliasing import Aliasing
from .loops.loop_regions import loop_role, regions
from .rank_program import RankProgram

ALIGNMENT = 64
"""Offsets are multiples of it: a processor's cache line."""


class Interval(NamedTuple):
    """Bytes that are live from one call to another, both included."""

    nbytes: int
    born: int
    last: int

    @property
    def aligned(self) -> int:
        """The bytes, rounded up to the alignment."""
        return -(-self.nbytes // ALIGNMENT) * ALIGNMENT


class Packing(NamedTuple):
    """The offset of each interval, and the bytes of the arena."""

    offsets: tuple[int, ...]
    nbytes: int


def peak_bytes(intervals: Sequence[Interval]) -> int:
    """The maximum of bytes live at once: the lower bound of any packing."""
    steps = [0] * (max((each.last for each in intervals), default=0) + 2)
    for each in intervals:
        steps[each.born] += each.aligned
        steps[each.last + 1] -= each.aligned
    return max(accumulate(steps), default=0)


ORDERS: tuple[Callable[[Interval], tuple[int, ...]], ...] = (
    lambda each: (-each.aligned, each.born),
    lambda each: (each.born - each.last, -each.aligned),
    lambda each: (each.aligned * (each.born - each.last), each.born),
    lambda each: (each.born, -each.aligned),
)
"""The orders in which a greedy packing is tried: by size, by lifetime, by both, as they are made."""


def pack(intervals: Sequence[Interval]) -> Packing:
    """Place intervals so that none that are live together overlap: the smallest of some greedy packings."""
    orders = (sorted(range(len(intervals)), key=lambda i, by=by: by(intervals[i])) for by in ORDERS)  # type: ignore[misc]
    return min((_packed(intervals, order) for order in orders), key=lambda packing: packing.nbytes)


def _packed(intervals: Sequence[Interval], order: Iterable[int]) -> Packing:
    """First-fit packing: each interval in turn in the smallest gap that fits between those placed."""
    offsets, placed = [0] * len(intervals), list[tuple[int, Interval]]()
    for number in order:
        mine, end, gaps = intervals[number], 0, list[tuple[int, int]]()
        for begin, other in sorted(
            (at, each) for at, each in placed if each.born <= mine.last and mine.born <= each.last
        ):
            if begin - end >= mine.aligned:
                gaps.append((begin - end, end))
            end = max(end, begin + other.aligned)
        offsets[number] = min(gaps)[1] if gaps else end
        placed.append((offsets[number], mine))
    return Packing(tuple(offsets), max((at + each.aligned for at, each in placed), default=0))


class ArenaSlot(NamedTuple):
    """A slot of an arena: bytes ``begin`` .. ``end`` - 1."""

    arena: fx.Node
    begin: int
    end: int

    def overlaps(self, other: ArenaSlot) -> bool:
        """Whether the two have a byte in common."""
        return self.arena is other.arena and self.begin < other.end and other.begin < self.end


class ArenaUse(NamedTuple):
    """The bytes of a program's arena, the most that are live in it at once (no arena could be smaller), and how many
    slots are in it."""

    nbytes: int
    live: int
    slots: int


def arena_slots(nodes: Iterable[fx.Node]) -> dict[fx.Node, ArenaSlot]:
    """The arena slots of a program, by the calls that allocate them."""
    found: dict[fx.Node, ArenaSlot] = {}
    for node in nodes:
        if node.target is memory_ops.slot:
            arguments: Any = node.args
            arena, begin, shape, dtype = arguments
            found[node] = ArenaSlot(arena, begin, begin + dense_bytes(shape, dtype))
    return found


def dense_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """The bytes of a dense tensor."""
    return torch.Size(shape).numel() * dtype.itemsize


class BufferIntervals:
    """Live intervals of the buffers of a program."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self._aliasing = Aliasing(nodes)
        self._place = {node: place for place, node in enumerate(nodes)}
        self._inside = regions(nodes)
        self._in_actions = {node for node in nodes if any(loop_role(each) == "unit" for each in self._inside[node])}

    def of(self, buffer: fx.Node, nbytes: int) -> Interval | None:
        """The live interval of a buffer; None: it leaves the program, is made in a loop, or is used by schedule
        actions."""
        if self._inside[buffer]:
            return None
        uses = [use for root in self._aliasing.seen_in(buffer) for use in self._aliasing.uses(root)]
        if any(use.op == "output" for use in uses) or not self._in_actions.isdisjoint((buffer, *uses)):
            return None
        return Interval(nbytes, self._place[buffer], self._aliasing.until(buffer))


def arena_use(program: RankProgram) -> ArenaUse | None:
    """How large a program's arena is and could be; None: it has none."""
    nodes = list(program.graph.nodes)
    if not (slots := arena_slots(nodes)):
        return None
    live = BufferIntervals(nodes)
    intervals = (live.of(node, slot.end - slot.begin) for node, slot in slots.items())
    sizes: list[Any] = [arena.args[0] for arena in dict.fromkeys(slot.arena for slot in slots.values())]
    return ArenaUse(sum(sizes), peak_bytes([*filter(None, intervals)]), len(slots))


class ArenaCheck:
    """Checks the slots of a program's arenas, call by call; ``fail`` raises, of what is wrong at which call."""

    def __init__(self, nodes: Sequence[fx.Node], aliasing: Aliasing, fail: Callable[..., NoReturn]) -> None:
        self._aliasing, self._fail = aliasing, fail
        self._slots = arena_slots(nodes)
        self._by_root: dict[fx.Node, list[fx.Node]] = {}
        for node in self._slots:
            self._by_root.setdefault(aliasing.root(node), []).append(node)
        self._overlapping: dict[fx.Node, list[fx.Node]] = {}
        inside = regions(nodes) if self._slots else {}
        self._in_actions = {node for node, around in inside.items() if any(loop_role(n) == "unit" for n in around)}

    def take(self, node: fx.Node) -> None:
        """Check a call that allocates a slot: it lies within the arena, and no schedule action uses it."""
        slot = self._slots.get(node)
        if slot is None:
            return
        arguments: Any = node.args
        arena, offset, _, dtype = arguments
        if arena.target is not memory_ops.arena:
            self._fail(f"{node.name} is a slot of {arena.name}, which is no arena", node, expected="memory.arena")
        if offset < 0 or offset % dtype.itemsize or slot.end > arena.args[0]:
            self._fail(
                f"{node.name} does not lie in its arena",
                node,
                expected=f"bytes 0 .. {arena.args[0]}, and a begin that {dtype.itemsize} divides",
                got=f"bytes {offset} .. {slot.end}",
            )
        for use in (node, *self._aliasing.uses(self._aliasing.root(node))):
            if use in self._in_actions:
                self._fail(
                    f"{node.name} is used in a schedule action", use, expected="memory.empty: actions interleave"
                )

    def overlapping(self, into: fx.Node) -> list[fx.Node]:
        """The roots of other buffers that overlap memory that is written."""
        root = self._aliasing.root(into)
        if root.target is memory_ops.arena:
            self._fail(f"{root.name} is written as such", into, expected="memory.slot of it")
        if root not in self._overlapping:
            mine = [self._slots[node] for node in self._by_root.get(root, ())]
            others = ((self._aliasing.root(node), slot) for node, slot in self._slots.items() if mine)
            found = (other for other, slot in others if other is not root and any(map(slot.overlaps, mine)))
            self._overlapping[root] = list(dict.fromkeys(found))
        return self._overlapping[root]

    def holds(self, value: fx.Node) -> bool:
        """Whether a value may lie in an arena."""
        return any(root in self._by_root or root.target is memory_ops.arena for root in self._aliasing.seen_in(value))
