"""Does anything in an arena lie where something else is needed? Watched while a program is validated, call by call.

%a = memory.slot(%arena, 0, [8, 6], torch.float32)
%b = memory.slot(%arena, 64, [8, 6], torch.float32)          of the bytes 64 .. 255, %a has 64 .. 191
%x = aten.mm.out(%t, %y, out=%a)
%z = aten.mm.out(%t, %w, out=%b)                             from here on %x is gone
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from torch import fx

from shardfx.ir.ops import memory_ops
from shardfx.ir.program.looped.within_turns import part_in_turns, regions
from shardfx.ir.program.sharing import Sharing

from .tenants import Room, rooms


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
        self._in_units = {node for node, around in inside.items() if any(part_in_turns(n) == "unit" for n in around)}

    def take(self, node: fx.Node) -> None:
        """A call gives a place: it lies within the arena, and no unit of turns uses it."""
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
                self._fail(f"{node.name} is used in a unit of turns", use, expected="memory.empty: units take turns")

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
