"""Padding: dims that are not padded pass; rows of the result are those of x, further on, and beyond the border a
constant, the rows of x in a mirror, or its last one."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from shardfx.ir.dim_sharding import Window
from shardfx.ir.graph import Node
from shardfx.ir.ops.computing.resized import resize_tile, resize_tile_backward
from shardfx.ir.rulebook.dims import argument, ops, words
from shardfx.ir.rules.book import RuleEntry, rule
from shardfx.ir.rules.local import Emit
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.rules.template import template
from shardfx.ir.rules.windows import RowRange, fitted, seeing

from .spatial_dims import tiles

aten = torch.ops.aten


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
    """A rank's rows: those of x that it has, and padding at the border of the whole. It is the same op on every rank
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


KINDS = {"reflection": "mirrored", "replication": "repeated"}


def kind_of(node: Node) -> str:
    """What stands beyond the border: ``mirrored`` rows, or one ``repeated``."""
    return next(kind for name, kind in KINDS.items() if name in str(node.op))


def edged(node: Node) -> ShardingRule:
    """Rows of the result are those of x, further on, and beyond the border rows of x near it; a row of the gradient is
    made of its own in the result, and near the border of those beyond it. In a mirror what is far behind the border is
    as far before it."""
    back, made = len(node.operands) > 1, node.outs[0].shape
    pads, ndim, mirror = argument(node, "padding"), len(made), kind_of(node) == "mirrored"
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
    held, made = tiles(emit, space)
    if not back:
        return emit.call(resize_tile, args[0], held.at, size, made.at, made.lengths, fronts, kind_of(node))
    options = (made.at, size, made.lengths, held.at, fronts, kind_of(node))
    return emit.call(resize_tile_backward, args[0], *options, args[1])


RULES: tuple[RuleEntry, ...] = (
    *(
        rule(ops(f"{kind}_pad{n}d {kind}_pad{n}d_backward"), edged, rows=edged_rows)
        for kind, n in itertools.product(KINDS, (1, 2, 3))
    ),
    rule(aten.constant_pad_nd, padded_constant, rows=padded_rows),
)
