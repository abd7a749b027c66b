"""Rules of ops on images: the factors and windows of each spatial dim, and the position of a rank's tile.

    n.. h0 h1 -> n.. p0 p1              windows overlap: a rank needs the rows of ``h`` that its ``p`` read
    n.. (p0 a0!) h1 -> n.. p0 p1        along dim 0 windows are adjacent

``h`` is the image, ``p`` the positions of windows over it; a backward goes from ``p`` to ``h``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardfx.ir.dim_sharding import Window
from shardfx.ir.graph import Node
from shardfx.ir.rulebook.dims import argument
from shardfx.ir.rules.local import Emit
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.rules.template import Shape, has_argument, template
from shardfx.ir.rules.windows import RowRange, down, reverse, seeing


@dataclass(frozen=True)
class SpatialDim:
    """A replicated spatial dim of ``size`` rows and of ``places`` windows; ``#`` in its factors stands for its index
    among the spatial dims."""

    size: int
    places: int

    def words(self) -> tuple[str, str]:
        """The factors in a template, of the image and of the windows."""
        return "h#!", "p#!"

    def blocks(self) -> tuple[str, int] | None:
        """The factor that both share if windows are adjacent, and its size."""
        return None

    def window(self, back: bool) -> Window | None:
        """The rows of the image that a window reads, or the windows that read a row (``back``); None without
        windows."""
        return None


@dataclass(frozen=True)
class Slide(SpatialDim):
    """A dim with sliding windows, such as those of a pool or a convolution."""

    kernel: int
    stride: int
    padding: int
    dilation: int = 1
    blockwise: bool = True
    """Whether adjacent windows are factored into blocks."""

    @property
    def apart(self) -> bool:
        """Whether windows are adjacent blocks, as the patches of a vision transformer, or a kernel of size 1."""
        return self.blockwise and side_by_side(
            self.size, self.places, self.kernel, self.stride, self.padding, self.dilation
        )

    def words(self) -> tuple[str, str]:
        return ("(p# a#!)", "p#") if self.apart else ("h#", "p#")

    def blocks(self) -> tuple[str, int] | None:
        return ("p#", self.places) if self.apart else None

    def window(self, back: bool) -> Window | None:
        return None if self.apart else reverse(self.down, self.size) if back else self.down

    @property
    def down(self) -> Window:
        """The window of image rows that each position reads."""
        return down(self.places, self.kernel, self.stride, self.padding, self.dilation)

    def read(self, dim: int, stored: tuple[int, int], places: tuple[int, int]) -> RowRange:
        """The rows of dim ``dim`` of the image that a kernel without padding reads for some windows, beside the stored
        rows (each range as start and length)."""
        first, last = self.down.reach(*places)
        return RowRange(dim, stored[0], stored[0] + stored[1], first, last + 1)


def side_by_side(size: int, out: int, kernel: int, stride: int, padding: int, dilation: int = 1) -> bool:
    """Whether each window lies in its own block of ``stride`` elements, and the blocks cover the dim."""
    return padding == 0 and dilation * (kernel - 1) + 1 <= stride and size == out * stride


def spread(value: Any, space: int, default: Sequence[int] = ()) -> list[int]:
    """An argument such as a stride: one number for all dims, a list, or an empty list for the default."""
    found = list(value) if isinstance(value, (list, tuple)) else [value]
    return found * space if len(found) == 1 else found or list(default)


def slides(node: Node, x: Shape, y: Shape, blockwise: bool = False) -> list[Slide]:
    """The windows of a pool from an image to a result of these sizes, for each spatial dim."""
    space = len(x)
    kernel = spread(argument(node, "kernel_size"), space)
    stride = spread(argument(node, "stride"), space, kernel)
    padding = spread(argument(node, "padding"), space)
    dilation = spread(argument(node, "dilation"), space) if has_argument(node.op, "dilation") else [1] * space
    options = zip(x, y, kernel, stride, padding, dilation, strict=True)
    return [Slide(n, places, k, s, p, d, blockwise) for n, places, k, s, p, d in options]


def spaces_of(node: Node) -> int:
    """The number of spatial dims."""
    return next(n for n in (1, 2, 3) if f"{n}d" in str(node.op))


def ends(node: Node, back: bool = False) -> tuple[Shape, Shape]:
    """The sizes of the image and of its windows; of a backward (``back``) those of the result and the first operand."""
    space = spaces_of(node)
    x, y = node.operands[0].shape[-space:], node.outs[0].shape[-space:]
    return (y, x) if back else (x, y)


def spatial(
    node: Node,
    dims: Sequence[SpatialDim],
    form: str,
    linear: str = "",
    *,
    back: bool = False,
    alone: bool = False,
    unread: str = "",
) -> ShardingRule:
    """The rule of an op on images: ``form`` has ``X`` for the spatial dims of the image, ``Y`` for the windows.

    Args:
        alone: factors seen through windows may also be sharded by themselves.
    """
    x, y = (" ".join(each.words()[k].replace("#", str(i)) for i, each in enumerate(dims)) for k in (0, 1))
    blocks = [(i, found) for i, each in enumerate(dims) if (found := each.blocks()) is not None]
    sizes = tuple((name.replace("#", str(i)), size) for i, (name, size) in blocks)
    made = template(form.replace("X", x).replace("Y", y), linear, unread=unread)(node, sizes)
    seen, leader = ("p", "h") if back else ("h", "p")
    windows = [(i, window) for i, each in enumerate(dims) if (window := each.window(back)) is not None]
    return seeing(made, {f"{seen}{i}": (f"{leader}{i}", window) for i, window in windows}, alone)


class Tile(NamedTuple):
    """The position of a rank's tile in an image: start and length of each spatial dim."""

    at: list[int]
    lengths: list[int]


def tiles(emit: Emit, space: int | None = None) -> tuple[Tile, Tile]:
    """A rank's tile of the first operand, and of the result."""
    space = spaces_of(emit.node) if space is None else space
    x, y = emit.node.operands[0].type.ndim, emit.node.outs[0].type.ndim
    stored = [emit.operand_bounds(0, dim) for dim in range(x - space, x)]
    made = [emit.result_bounds(0, dim) for dim in range(y - space, y)]
    return Tile(*map(list, zip(*stored, strict=True))), Tile(*map(list, zip(*made, strict=True)))
