"""Interpolation and adaptive means: a row of the result is made of a few rows of the picture, which a rank needs of a
sharded picture. Where rows are made block by block (twice as many nearest rows, means of each eight) ``h`` is ``(g a)``
of the picture and ``(g b)`` of the result, and ``g`` may be sharded.

Padding: rows of the result are those of the picture, further on, and beyond the border a constant, the rows of the
picture in a mirror, or its last one.
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
"""How many rows before and behind its place a row is made of."""
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
    """A dim whose rows are made of blocks, each of its own block."""

    def words(self) -> tuple[str, str]:
        return "(g# a#!)", "(g# b#!)"

    def blocks(self) -> tuple[str, int] | None:
        return "g#", math.gcd(self.size, self.places)


@dataclass(frozen=True)
class InterpolatedDim(SpatialDim):
    """A dim of ``size`` rows, between which ``places`` lie."""

    kind: str

    def words(self) -> tuple[str, str]:
        return "h#", "p#"

    def window(self, back: bool) -> Window | None:
        if back:  # the gradient of one row is a sum of what ranks have
            return reverse(self.down, self.size) if self.size > 1 else None
        return self.down

    @property
    def step(self) -> float:
        """How far the places of two rows of the result are apart."""
        if self.kind.startswith("aligned"):
            return (self.size - 1) / (self.places - 1) if self.places > 1 else 0.0
        return self.size / self.places

    @property
    def down(self) -> Window:
        """The rows of the picture that a row of the result is made of."""
        size, places, reach = self.size, self.places, REACH[self.kind.split()[-1]]
        if self.kind.startswith("aligned"):
            per = max(places - 1, 1)
            return Window(places, size - 1 if places > 1 else 0, per, (1 - reach) * per, reach * per)
        per, half = 2 * places, size - places
        return Window(places, 2 * size, per, half + (1 - reach) * per, half + reach * per)


def kind_of(node: Node) -> str:
    """``linear``, ``aligned cubic``: which rows, with which weights."""
    aligned = has_argument(node.op, "align_corners") and argument(node, "align_corners")
    return f"aligned {KIND_OF[node.op]}" if aligned else KIND_OF[node.op]


def resized(node: Node, x: Shape, y: Shape) -> list[SpatialDim]:
    """How the last dims of an image become those of another; replicated where rows are smoothed, where the ``scale``
    is not that of the sizes (of 21 rows 10, each two rows behind the one before), or means and nearest rows are not
    those of blocks."""
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
    """``x[n.. h..] -> y[n.. p..]``, h as p needs it."""
    return spatial(node, resized(node, *ends(node)), "n.. X -> n.. Y", "0")


def backward(node: Node) -> ShardingRule:
    """``gy[n.. p..] -> gx[n.. h..]``, p as h needs it."""
    form, linear = ("n.. Y, n.. X -> n.. X", "0|1>") if len(node.operands) > 1 else ("n.. Y -> n.. X", "0")
    return spatial(node, resized(node, *ends(node, back=True)), form, linear, back=True)


def forward_rows(emit: Emit, args: tuple[Any, ...], leaders: frozenset[str]) -> Any:
    """A rank's rows of the result, of the rows of the image that they are made of."""
    (tile, made), (x, y) = tiles(emit), ends(emit.node)
    steps, kind = _steps(emit.node, x, y), kind_of(emit.node)
    return emit.call(resize_tile, args[0], tile.at, list(x), made.at, made.lengths, steps, kind)


def backward_rows(emit: Emit, args: tuple[Any, ...], leaders: frozenset[str]) -> Any:
    """A rank's rows of the image's gradient, of the rows of the result that they are a part of."""
    (tile, made), (x, y) = tiles(emit), ends(emit.node, back=True)
    options = (made.at, list(x), made.lengths, tile.at, _steps(emit.node, x, y), kind_of(emit.node))
    return emit.call(resize_tile_backward, args[0], *options)


def _steps(node: Node, x: Shape, y: Shape) -> list[float]:
    return [each.step for each in resized(node, x, y) if isinstance(each, InterpolatedDim)]


def entries(name: str, kind: str) -> Iterator[RuleEntry]:
    """The rules of one op and of its backward."""
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
    """The dims that are padded, and how many rows are put before each; fewer than none are cropped."""
    pads, ndim = argument(node, "pad", "padding"), node.outs[0].type.ndim
    return {ndim - 1 - i: pads[2 * i] for i in range(len(pads) // 2) if pads[2 * i] or pads[2 * i + 1]}


def padded_constant(node: Node) -> ShardingRule:
    """Rows of the result are those of x, further on; linear if what is put in is zero."""
    touched, ndim, made = before(node), node.outs[0].type.ndim, node.outs[0].shape
    x, y = words(f"d{d}" for d in range(ndim)), words(f"o{d}" if d in touched else f"d{d}" for d in range(ndim))
    found = template(f"{x} -> {y}", "" if argument(node, "value") else "0")(node)
    return seeing(found, {f"d{d}": (f"o{d}", Window(made[d], 1, 1, -n, -n)) for d, n in touched.items()})


def padded_rows(emit: Emit, args: tuple[Any, ...], leaders: frozenset[str]) -> Any:
    """A rank's rows: those of x that it has, and padding at the global border. It is the same op on every rank
    that has some, so that the proof knows its result, which may be ``x`` itself."""
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
    """What stands beyond the border: ``mirrored`` rows, or one ``repeated``."""
    return next(kind for name, kind in EDGES.items() if name in str(node.op))


def edged(node: Node) -> ShardingRule:
    """Rows of the result are those of x, further on, and beyond the border rows of x near it; a row of the gradient is
    made of its own in the result, and near the border of those beyond it. In a mirror what is far behind the border is
    as far before it."""
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
