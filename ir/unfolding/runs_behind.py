"""What stands behind the backward, block by block: the stretches of a block's nodes there, and how blocks follow.

    squares of s, of a | b, e, the norm, steps of s, of a | b, e, gathers of e, of b | a, s

Copies of ``a`` stand between its stretch and that of ``b``, in the order of the blocks, or the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from shardfx.ir.graph import Node


@dataclass(frozen=True)
class Stretch:
    """Nodes of a block that stand one behind the other; ``falls``: those of the next block stand before them."""

    nodes: tuple[Node, ...]
    falls: bool


def stretches(nodes: Iterable[Node], twin: Mapping[Node, Node]) -> list[Stretch] | None:
    """The stretches of the nodes that have a twin in the next block; None, where these stand before and behind."""
    position = {node: i for i, node in enumerate(nodes)}
    found = []
    for own, run in groupby(position, twin.__contains__):
        stretch = tuple(run)
        falls = {position[twin[node]] < position[node] for node in stretch} if own else set()
        if len(falls) > 1:
            return None
        if own:
            found.append(Stretch(stretch, falls.pop()))
    return found


def in_order(found: Sequence[Stretch], like: Callable[[Node], Iterable[Node]]) -> bool:
    """Whether what a node is made of in the block beside it stands in the same stretch, or in one before.

    Args:
        like: the nodes of the block itself that are like those beside it that a node is made of.
    """
    number = {node: i for i, stretch in enumerate(found) for node in stretch.nodes}
    return all(number[other] <= number[node] for node in number for other in like(node))
