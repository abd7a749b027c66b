"""Who may lie in an arena: memory that a program makes for itself, from the call that makes it to its last use.

%flat = memory.empty([48], ...)       a bucket, a place to gather into: there until nothing uses it any more, nor a
                                      collective that was started on it
return (..., %flat)                   what leaves the program has no place, nor what is made in each turn anew, or
                                      used by units of turns, which are done in another order than they stand
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from shardfx.ir.ops import memory_ops
from shardfx.ir.program.looped.within_turns import part_in_turns, regions
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.program.sharing import Sharing

from .packing import Block, at_once


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
        self._in_units = {node for node in nodes if any(part_in_turns(each) == "unit" for each in inside[node])}

    def of(self, memory: fx.Node, nbytes: int) -> Block | None:
        """From when to when; None: it leaves the program, is made in turns, or is used by units of them."""
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
