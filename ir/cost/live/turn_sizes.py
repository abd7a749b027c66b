"""Turns that hold less: of turns that do not divide what they cut, the last ones have fewer rows.

    %rows = time.pick(%turns, [(0, 4, 0), (8, 3, 0)])       turns 0 to 7 have 4 rows, 8 and those behind it 3

Where turns are done in units, those of several are held at once, each in its own size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import fx

from shardfx.ir.ops.time import turns
from shardfx.ir.program.units.unit_order import order_of

if TYPE_CHECKING:
    from .blocks import Block

Since = tuple[fx.Node, int]
"""The begin of turns, and the first of those that are not like the ones before."""
At = Mapping[fx.Node, int]
"""By the begin of turns, which of them."""
FIRST: At = MappingProxyType({})


def sizes_of_turns(nodes: Iterable[fx.Node], first: Sequence[Block], blocks: Callable[[At], Sequence[Block]]) -> None:
    """Say of blocks that are made in units how large they are in which turns.

    Args:
        first: those of the first turn.
        blocks: the same as they are in another turn.
    """
    pairs: list[tuple[Any, Any]] = [(node.args[0], node.args[1]) for node in nodes if node.target is turns.pick]
    sizes = [(begin, runs) for begin, runs in pairs if order_of(begin) and not any(grows for *_, grows in runs)]
    since = dict.fromkeys((begin, turn) for begin, runs in sizes for turn, _, _ in runs if turn)
    for each in sorted(since, key=lambda each: each[1]):
        others = _by_call(blocks(dict([each])))
        for call, mine in _by_call(first).items():
            if len(others.get(call, ())) == len(mine):
                for block, other in zip(mine, others[call], strict=True):
                    if block.sizes or block.nbytes != other.nbytes:
                        block.sizes[each] = other.nbytes


def _by_call(blocks: Iterable[Block]) -> dict[int, list[Block]]:
    found: dict[int, list[Block]] = {}
    for block in blocks:
        found.setdefault(block.born, []).append(block)
    return found
