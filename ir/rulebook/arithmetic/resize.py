"""Interpolation and adaptive means: a row of the result depends on a few rows of the image, so a rank needs a halo of a
sharded image. Where the result is blockwise (nearest rows twice as many, means of each eight) ``h`` is ``(g a)``
in the image and ``(g b)`` in the result, and ``g`` may be sharded.

Padding: the result has the rows of the image at an offset, and beyond the border a constant, the mirrored rows, or
the last one repeated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from shardfx.ir.dim_sharding import Window
from shardfx.ir.graph import Node
from shardfx.ir.ops.computing.tiles import resize_tile, resize_tile_backward
from shardfx.ir.rulebook.dims import argument, ops, words
from shardfx.ir.rules.book import RuleEntry, rule
from shardfx.ir.rules.local import Emit
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.rules.template import Shape, has_argument, template
from shardfx.ir.rules.windows import RowRange, fitted, reverse, seeing

from .spatial_dims import SpatialDim, ends, spatial, tiles

aten = torch.ops.aten

REACH = {"linear": 1, "cubic": 2}
"""The number of rows before and behind its position that a row is interpolated from."""
KINDS = {
    "linear": "upsample_linear1d upsample_bilinear2d upsample_trilinear3d",
    "cubic": "upsample_bicubic2d",
    "smooth": "_upsample_bilinear2d_aa _upsample_bicubic2d_aa",
    "mean": "_adaptive_avg_pool2d _adaptive_avg_pool3d",
    "nearest": "upsample_nearest1d upsample_nearest2d upsample_nearest3d"
    " _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d",
}
KIND_OF = {
    getattr(aten, f"{name}{end}").default: kind
    for kind, names in KINDS.items()
    for name in names.split()
    for end in ("", "_backward")
}


@dataclass(frozen=True)
class BlockwiseDim(SpatialDim):
    """A dim that is resized block by block, each from its own block."""

    def words(self) -> tuple[str, str]:
        return "(g# a#!)", "(g# b#!)"

    def blocks(self) -> tuple[str, int] | None:
        return "g#", math.gcd(self.size, self.places)


@dataclass(frozen=True)
class InterpolatedDim(SpatialDim):
    """A dim of ``size`` rows that is interpolated at ``places`` positions."""

    kind: str

    def words(self) -> tuple[str, str]:
        return "h#", "p#"

    def window(self, back: bool) -> Window | None:
        if back:  # the gradient of one row is a sum of what ranks have
            return reverse(self.down, self.size) if self.size > 1 else None
        return self.down

    @property
    def step(self) -> float:
        """The distance between two adjacent rows of the result, in rows of the image."""
        if self.kind.startswith("aligned"):
            return (self.size - 1) / (self.places - 1) if self.places > 1 else 0.0
        return self.size / self.places

    @property
    def down(self) -> Window:
        """The window of image rows that a row of the result is interpolated from."""
        size, places, reach = self.size, self.places, REACH[self.kind.split()[-1]]
        if self.kind.startswith("aligned"):
            per = max(places - 1, 1)
            return Window(places, size - 1 if places > 1 else 0, per, (1 - reach) * per, reach * per)
        per, half = 2 * places, size - places
        return Window(places, 2 * size, per, half + (1 - reach) * per, half + reach * per)


def kind_of(node: Node) -> str:
    """The kind of interpolation, such as ``linear`` or ``aligned cubic``: its rows and weights."""
    aligned = has_argument(node.op, "align_corners") and argument(node, "align_corners")
    return f"aligned {KIND_OF[node.op]}" if aligned else KIND_OF[node.op]


def resized(node: Node, x: Shape, y: Shape) -> list[SpatialDim]:
    """The spatial dims of a resize; replicated if rows are smoothed, if the ``scale`` is not that of the sizes (10 rows
    of 21, each two rows behind the one before), or if means or nearest rows do not form
    blocks."""
    kind, space = kind_of(node), len(x)
    named = ("scales",) if space == 1 else ("scales_d", "scales_h", "scales_w")[-space:]
    told = [(s, a, b) for s, a, b in zip((argument(node, name) for name in named), x, y, strict=True) if s is not None]
    exact = kind.startswith("aligned") or all(s * a == b and (kind != "nearest" or 1 / s == a / b) for s, a, b in told)

    def dim(a: int, b: int) -> SpatialDim:
        if exact and kind in ("mean", "nearest") and math.gcd(a, b) in (a, b):
            return BlockwiseDim(a, b)
        return InterpolatedDim(a, b, kind) if exact and kind.split()[-1] in REACH else SpatialDim(a, b)

    return list(map(dim, x, y))


def forward(node: Node) -> ShardingRule:
    """``x[n.. h..] -> y[n.. p..]``, with h seen through windows of p."""
    return spatial(node, resized(node, *ends(node)), "n.. X -> n.. Y", "0")


def backward(node: Node) -> ShardingRule:
    """``gy[n.. p..] -> gx[n.. h..]``, with p seen through windows of h."""
    form, linear = ("n.. Y, n.. X -> n.. X", "0|1>") if len(node.operands) > 1 else ("n.. Y -> n.. X", "0")
    return spatial(node, resized(node, *ends(node, back=True)), form, linear, back=True)


def forward_rows(emit: Emit, args: tuple[Any, ...], leaders: frozenset[str]) -> Any:
    """A rank's rows of the result, interpolated from its tile of the image with halo."""
    (tile, made), (x, y) = tiles(emit), ends(emit.node)
    steps, kind = _steps(emit.node, x, y), kind_of(emit.node)
    return emit.call(resize_tile, args[0], tile.at, list(x), made.at, made.lengths, steps, kind)


def backward_rows(emit: Emit, args: tuple[Any, ...], leaders: frozenset[str]) -> Any:
    """A rank's rows of the image's gradient, from the rows of the result that depend on them."""
    (tile, made), (x, y) = tiles(emit), ends(emit.node, back=True)
    options = (made.at, list(x), made.lengths, tile.at, _steps(emit.node, x, y), kind_of(emit.node))
    return emit.call(resize_tile_backward, args[0], *options)


def _steps(node: Node, x: Shape, y: Shape) -> list[float]:
    return [each.step for each in resized(node, x, y) if isinstance(each, InterpolatedDim)]


def entries(name: str, kind: str) -> Iterator[RuleEntry]:
    """The rules of an op and of its backward."""
    space = next(n for n in (1, 2, 3) if f"{n}d" in name)
    follow = {"output_size": f"(g b p)*{space}"}
    op, back = getattr(aten, name).default, getattr(aten, f"{name}_backward").default
    yield rule(op, forward, sized=follow, rows=forward_rows)
    if kind == "mean":
        yield rule(back, backward)
    else:
        yield rule(back, backward, sized=follow, shape_arg=2, rows=backward_rows)


# ---- padding ---------------------------------------------------------------------------------------------------------


def before(node: Node) -> dict[int, int]:
    """The padded dims, and the number of rows put before each; negative ones are cropped."""
    pads, ndim = argument(node, "pad", "padding"), node.outs[0].type.ndim
    return {ndim - 1 - i: pads[2 * i] for i in range(len(pads) // 2) if pads[2 * i] or pads[2 * i + 1]}


def padded_constant(node: Node) -> ShardingRule:
    """Constant padding: the rows of x at an offset; linear if the constant is zero."""
    touched, ndim, made = before(node), node.outs[0].type.ndim, node.outs[0].shape
    x, y = words(f"d{d}" for d in range(ndim)), words(f"o{d}" if d in touched else f"d{d}" for d in range(ndim))
    found = template(f"{x} -> {y}", "" if argument(node, "value") else "0")(node)
    return seeing(found, {f"d{d}": (f"o{d}", Window(made[d], 1, 1, -n, -n)) for d, n in touched.items()})


def padded_rows(emit: Emit, args: tuple[Any, ...], leaders: frozenset[str]) -> Any:
    """A rank's rows: those of x that it has, and padding at the global border. It is the same op on every rank that has
    rows, so that verification recognizes its result, which may be ``x`` itself."""
    x, _, *value = args
    ranges = []
    for dim, front in before(emit.node).items():
        (start, length), (first, count) = emit.operand_bounds(0, dim), emit.result_bounds(0, dim)
        ranges.append(RowRange(dim, start, start + length, first - front, first - front + count))
    if any(each.kept == (0, 0) for each in ranges):
        return fitted(emit, x, ranges, *value)
    by_dim = {each.dim: (each.start - each.first, each.last - each.end) for each in ranges}
    pads = [n for dim in reversed(range(min(by_dim), len(emit.node.outs[0].shape))) for n in by_dim.get(dim, (0, 0))]
    return emit.call(aten.constant_pad_nd.default, x, pads, *value)


EDGES = {"reflection": "mirrored", "replication": "repeated"}


def edge_of(node: Node) -> str:
    """The kind of padding beyond the border: ``mirrored`` rows, or one ``repeated``."""
    return next(kind for name, kind in EDGES.items() if name in str(node.op))


def edged(node: Node) -> ShardingRule:
    """Padding by rows of x: the result has the rows of x at an offset, and beyond the border rows near it; a row of the
    gradient is a sum of its own in the result and, near the border, of those beyond it. A mirror reverses the
    order of rows at the border."""
    back, made = len(node.operands) > 1, node.outs[0].shape
    pads, ndim, mirror = argument(node, "padding"), len(made), edge_of(node) == "mirrored"
    found, mark = before(node), "!" if min(pads) < 0 else ""
    x = words(f"d{d}{mark}" if d in found else f"d{d}" for d in range(ndim))
    y = words(f"o{d}{mark}" if d in found else f"d{d}" for d in range(ndim))
    rule = template(f"{y}, {x} -> {x}" if back else f"{x} -> {y}", "0|1>" if back else "0")(node)
    windows = {}
    for d, front in found.items() if not mark else ():
        rear = pads[2 * (ndim - 1 - d) + 1]
        far = (0, rear * (1 + mirror)) if back else (2 * rear * mirror, 2 * front * mirror)
        windows[d] = Window(made[d], 1, 1, -front - far[0], (front if back else -front) + far[1])
    one, other = ("o", "d") if back else ("d", "o")
    return seeing(rule, {f"{one}{d}": (f"{other}{d}", window) for d, window in windows.items()})


def edged_rows(emit: Emit, args: tuple[Any, ...], leaders: frozenset[str]) -> Any:
    """A rank's rows of a padded image, or of its gradient."""
    node, pads = emit.node, argument(emit.node, "padding")
    space, back = len(pads) // 2, len(node.operands) > 1
    size, fronts = list((node.outs[0] if back else node.operands[0]).shape[-space:]), [float(n) for n in pads[-2::-2]]
    stored, made = tiles(emit, space)
    if not back:
        return emit.call(resize_tile, args[0], stored.at, size, made.at, made.lengths, fronts, edge_of(node))
    options = (made.at, size, made.lengths, stored.at, fronts, edge_of(node))
    return emit.call(resize_tile_backward, args[0], *options, args[1])


RULES: tuple[RuleEntry, ...] = (
    *(entry for kind, names in KINDS.items() for name in names.split() for entry in entries(name, kind)),
    *(
        rule(ops(f"{kind}_pad{n}d {kind}_pad{n}d_backward"), edged, rows=edged_rows)
        for kind, n in itertools.product(EDGES, (1, 2, 3))
    ),
    rule(aten.constant_pad_nd, padded_constant, rows=padded_rows),
)
