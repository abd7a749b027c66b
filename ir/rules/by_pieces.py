"""Decompositions that hang on how ranks hold the first operand: in how many equal pieces its rows lie.

    batch_norm(x[8{dp}, ...])   ->   the moments of each of two pieces, and from these the moments of all

Each of them is the op, whatever the number: the pieces only say what is worth computing apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardfx.ir.cut import WHOLE, Cut
from shardfx.ir.graph import Node
from shardfx.ir.mesh import Mesh
from shardfx.ir.spec import Spec

MOST = 64
"""In more pieces than this, what all ranks exchange is more than the sums that each would add to."""


@dataclass(frozen=True)
class ByPieces:
    """A decomposition: ``function(*args, pieces=...)``, of an op whose first operand has its rows in the first dim."""

    function: Callable[..., Any]
    pieces: int = 1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, pieces=self.pieces, **kwargs)


def in_pieces(expand: Any, node: Node, cuts: Sequence[Cut], mesh: Mesh) -> Any:
    """The decomposition of a node of whose first operand ranks hold so much of each dim. Where they hold tiles of an
    image, that would gather it."""
    if not isinstance(expand, ByPieces):
        return expand
    rows, tiled = next(iter(cuts), WHOLE), any(cuts[2:])
    size, pieces = node.operands[0].shape[0], mesh.extent(rows.axes)
    plain = not (rows.parts or tiled) and size % pieces == 0 and size // pieces > 0 and pieces <= MOST
    return replace(expand, pieces=pieces) if plain else expand


def choices(expand: Any, node: Node, held: Iterable[Spec], mesh: Mesh) -> list[Any]:
    """The decompositions that somebody may have taken of a node whose first operand is held so, or was to be."""
    cuts = {axes for spec in held for n in range(1, 1 + len(spec.dims[0].axes)) for axes in _some(spec.dims[0], n)}
    by_pieces = sorted(cuts) if isinstance(expand, ByPieces) else []
    found = [in_pieces(expand, node, [Cut(axes)], mesh) for axes in by_pieces]
    return list(dict.fromkeys([*found, expand]))


def _some(rows: Cut, count: int) -> Iterable[tuple[str, ...]]:
    return itertools.combinations(rows.axes, count)
