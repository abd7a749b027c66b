"""Twins: the counterpart in another of several equal blocks (see :mod:`.unfold`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardfx.ir.graph import Node, Value
from shardfx.ir.repeat import Repeat

Parts = tuple[list[Node], list[Node], list[Node], list[Node]]
"""A block's nodes: forward, backward, behind the backward (the update, and sends of outputs), and removed
ones."""
FORWARD, BACKWARD, BEHIND, GONE = range(4)
Row = tuple[Sequence[Node | None], ...]
"""The nodes of a block that correspond to those of ``a``; None where it has no such node."""


@dataclass(frozen=True)
class At:
    """The position of a node: its block, counted from ``a``, its part, and its index there."""

    delta: int
    part: int
    place: int


@dataclass(eq=False)
class BlockTwin:
    """Maps ``a`` and its neighbours to their counterparts in another block.

    ``blocks`` are the indices of these three, ``rows`` their nodes.
    """

    repeat: Repeat
    blocks: tuple[int, int, int]
    rows: Sequence[Row]
    places: Mapping[Node, At]
    inputs: dict[Value, Value]

    @cached_property
    def _numbers(self) -> dict[int | None, int]:
        return dict(zip(self.repeat.around, self.blocks, strict=False))

    def name(self, name: str) -> str:
        """The name of the counterpart of a module or parameter of ``a`` or of its neighbours."""
        index = self.repeat.within(name)
        return name if index not in self._numbers else self.repeat.moved(name, self._numbers[index])

    def value(self, value: Value) -> Value:
        """The counterpart of a value; itself, if it belongs to no block."""
        if value.node is None:
            return self.inputs.get(value, value)
        node = self.node(value.node)
        if node is value.node:
            return value
        found = node.results[value.index]
        assert found is not None
        return found

    def node(self, node: Node) -> Node:
        """The counterpart of a node; itself, if it belongs to no block."""
        at = self.places.get(node)
        return node if at is None else self.rows[1 + at.delta][at.part][at.place] or node

    def block_of(self, value: Value) -> int | None:
        """The block of a value before unfolding, relative to ``a``: -1, 0 or 1; None if it belongs to none."""
        if value.node is not None:
            at = self.places.get(value.node)
            return at.delta if at is not None else None
        index = self.repeat.within(value.name)
        around = self.repeat.around[:3]
        return around.index(index) - 1 if index in around else None


@dataclass(frozen=True)
class Unfolded:
    """The unfolded copies of one repeat, in order, and ``a`` itself, whose next neighbour is now the first of them.
    (``b`` now has the last of them as its previous neighbour.)"""

    a: BlockTwin
    copies: Sequence[BlockTwin]
