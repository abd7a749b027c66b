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
from shardfx.ir.rules.windows import Stretch, fitted, seeing

from .pool import tile

aten = torch.ops.aten


def before(node: Node) -> dict[int, int]:
    """The dims that are padded, and how many rows are put before each; fewer than none are cut off."""
    pads, ndim = argument(node, "pad", "padding"), node.outs[0].type.ndim
    return {ndim - 1 - i: pads[2 * i] for i in range(len(pads) // 2) if pads[2 * i] or pads[2 * i + 1]}


def padded_constant(node: Node) -> ShardingRule:
    """Rows of the result are those of x, further on; linear if what is put in is zero."""
    touched, ndim, made = before(node), node.outs[0].type.ndim, node.outs[0].shape
    x, y = words(f"d{d}" for d in range(ndim)), words(f"o{d}" if d in touched else f"d{d}" for d in range(ndim))
    found = template(f"{x} -> {y}", "" if argument(node, "value") else "0")(node)
    return seeing(found, {f"d{d}": (f"o{d}", Window(made[d], 1, 1, -n, -n)) for d, n in touched.items()})


def padded_rows(emit: Emit, args: tuple[Any, ...], leaders: frozenset[str]) -> Any:
    """A rank's rows: those of x that it holds, and padding at the border of the whole. It is the same op on every rank
    that holds some, so that the proof knows its result, which may be ``x`` itself."""
    x, _, *value = args
    stretches = []
    for dim, front in before(emit.node).items():
        (start, length), (first, count) = emit.operand_bounds(0, dim), emit.result_bounds(0, dim)
        stretches.append(Stretch(dim, start, start + length, first - front, first - front + count))
    if any(each.kept == (0, 0) for each in stretches):
        return fitted(emit, x, stretches, *value)
    by_dim = {each.dim: (each.start - each.first, each.last - each.end) for each in stretches}
    pads = [n for dim in reversed(range(min(by_dim), len(emit.node.outs[0].shape))) for n in by_dim.get(dim, (0, 0))]
    return emit.call(aten.constant_pad_nd.default, x, pads, *value)


KINDS = {"reflection": "mirrored", "replication": "repeated"}


def kind_of(node: Node) -> str:
    """What stands beyond the border: ``mirrored`` rows, or one ``repeated``."""
    return next(kind for name, kind in KINDS.items() if name in str(node.op))


def reach(node: Node) -> dict[int, tuple[int, int, int]]:
    """The dims that are padded: by how much in front, and how many rows before and behind the row in the place of one
    it may be made of. In a mirror what is far behind the border is as far before it."""
    ndim, pads = node.outs[0].type.ndim, argument(node, "padding")
    found = {}
    for dim, front in before(node).items():
        back = pads[2 * (ndim - 1 - dim) + 1]
        found[dim] = (front, 2 * back, 2 * front) if kind_of(node) == "mirrored" else (front, 0, 0)
    return found


def edged(node: Node) -> ShardingRule:
    """Rows beyond the border are rows of x near it, and a rank's rows those of x further on, or these."""
    ndim, made = node.outs[0].type.ndim, node.outs[0].shape
    found, mark = reach(node), "!" if min(argument(node, "padding")) < 0 else ""
    x = words(f"d{d}{mark}" if d in found else f"d{d}" for d in range(ndim))
    y = words(f"o{d}{mark}" if d in found else f"d{d}" for d in range(ndim))
    rule = template(f"{x} -> {y}", "0")(node)
    pairs = {} if mark else found
    windows = {d: Window(made[d], 1, 1, -front - lo, hi - front) for d, (front, lo, hi) in pairs.items()}
    return seeing(rule, {f"d{d}": (f"o{d}", window) for d, window in windows.items()})


def edged_backward(node: Node) -> ShardingRule:
    """A row of the gradient is made of its own in the result, and near the border of those beyond it."""
    ndim, made = node.outs[0].type.ndim, node.outs[0].shape
    found, pads = reach(node), argument(node, "padding")
    mark = "!" if min(pads) < 0 else ""
    x = words(f"d{d}{mark}" if d in found else f"d{d}" for d in range(ndim))
    y = words(f"o{d}{mark}" if d in found else f"d{d}" for d in range(ndim))
    rule = template(f"{y}, {x} -> {x}", "0|1>")(node)
    windows = {}
    for d, (front, lo, _) in ({} if mark else found).items():
        back = pads[2 * (ndim - 1 - d) + 1]
        windows[d] = Window(made[d], 1, 1, -front if lo or front else 0, front + (lo or back))
    return seeing(rule, {f"o{d}": (f"d{d}", window) for d, window in windows.items()})


def edged_rows(emit: Emit, args: tuple[Any, ...], leaders: frozenset[str]) -> Any:
    """A rank's rows of a padded picture, or of its gradient."""
    node, pads = emit.node, argument(emit.node, "padding")
    space = len(pads) // 2
    (x, y) = (node.outs[0], node.operands[0]) if len(node.operands) > 1 else (node.operands[0], node.outs[0])
    size, fronts = list(x.shape[-space:]), [float(n) for n in pads[-2::-2]]
    if len(node.operands) == 1:
        held, made = tile(emit.operand_bounds, 0, x, space), tile(emit.result_bounds, 0, y, space)
        return emit.call(resize_tile, args[0], held.at, size, made.at, made.lengths, fronts, kind_of(node))
    held, made = tile(emit.operand_bounds, 0, y, space), tile(emit.result_bounds, 0, x, space)
    options = (made.at, size, made.lengths, held.at, fronts, kind_of(node))
    return emit.call(resize_tile_backward, args[0], *options, args[1])


RULES: tuple[RuleEntry, ...] = (
    *(
        rule(ops(f"{kind}_pad{n}d{back}"), edged_backward if back else edged, rows=edged_rows)
        for kind, n, back in itertools.product(KINDS, (1, 2, 3), ("", "_backward"))
    ),
    rule(aten.constant_pad_nd, padded_constant, rows=padded_rows),
)
