"""Padding: dims that are not padded pass; of constants, rows of the result are those of x, further on."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from shardfx.ir.cut import Window
from shardfx.ir.graph import Node
from shardfx.ir.rulebook.dims import argument, ops, words
from shardfx.ir.rules.book import RuleEntry, rule
from shardfx.ir.rules.local import Emit
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.rules.template import template
from shardfx.ir.rules.windows import Stretch, fitted, seeing

aten = torch.ops.aten


def padded(node: Node) -> str:
    """``x -> y`` or ``gy, x -> gx``: dims that are not padded pass."""
    ndim = node.outs[0].type.ndim
    touched = {ndim - 1 - i // 2 for i, amount in enumerate(argument(node, "pad", "padding")) if amount != 0}
    x = words((f"d{d}" for d in range(ndim)), {f"d{d}" for d in touched})
    y = words(f"o{d}!" if d in touched else f"d{d}" for d in range(ndim))
    return f"{y}, {x} -> {x}" if len(node.operands) > 1 else f"{x} -> {y}"


def before(node: Node) -> dict[int, int]:
    """The dims that are padded, and how many rows are put before each; fewer than none are cut off."""
    pads, ndim = argument(node, "pad"), node.outs[0].type.ndim
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


RULES: tuple[RuleEntry, ...] = (
    *(
        rule(ops(f"{kind}_pad{n}d{back}"), padded, linear="0|1>" if back else "0")
        for kind, n, back in itertools.product(("reflection", "replication"), (1, 2, 3), ("", "_backward"))
    ),
    rule(aten.constant_pad_nd, padded_constant, rows=padded_rows),
)
