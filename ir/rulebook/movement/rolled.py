"""Images whose edges meet: rolled ones, and those that are padded by what stands at the other end.

Of the rows that stay, of those in front and of those behind a rank needs what its own rows are, each by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardfx.ir.dim_sharding import Window
from shardfx.ir.graph import Node
from shardfx.ir.ops.computing.rings import ring, ring_sum, ring_tile
from shardfx.ir.rulebook.dims import argument, at_dim
from shardfx.ir.rules.book import RuleEntry, rule
from shardfx.ir.rules.local import Emit
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.rules.template import template
from shardfx.ir.rules.windows import seeing

aten = torch.ops.aten
FORM = "d.. h@dim, d.. i@dim, d.. j@dim -> d.. o@dim"


def offsets(node: Node) -> dict[str, tuple[int, int, int]]:
    """For each operand that is given: from which row of the result to which it stands for it (for a sum, is added to
    it), and which of its rows is the first of these."""
    dim, front, back = (argument(node, name) for name in ("dim", "front", "back"))
    size, made = node.operands[0].shape[dim], node.outs[0].shape[dim]
    if node.op is ring:
        stays = max(front, 0), made - max(back, 0)
        found = {"x": (*stays, stays[0] - front), "before": (0, front, size - front), "behind": (made - back, made, 0)}
    else:
        found = {"x": (0, made, front), "before": (made - front, made, 0), "behind": (0, back, front + made)}
    return {name: each for name, each in found.items() if argument(node, name) is not None}


def turned(node: Node) -> ShardingRule:
    """``x[.. h ..], before[.. i ..], behind[.. j ..] -> y[.. o ..]``, each as o needs it."""
    given, made = offsets(node), node.outs[0].shape[argument(node, "dim")]
    rule = template(FORM, "&", moves_only=node.op is ring)(node)
    letters = {"x": "h", "before": "i", "behind": "j"}
    further = {letters[name]: row - first for name, (first, _, row) in given.items()}
    return seeing(rule, {letter: ("o", Window(made, 1, 1, n, n)) for letter, n in further.items()})


def turned_rows(emit: Emit, args: tuple[Any, ...], leaders: frozenset[str]) -> Any:
    """A rank's rows, of those that stay, and of those in front and behind."""
    dim, given = at_dim(emit, emit.node.outs[0]), offsets(emit.node)
    at, count = emit.result_bounds(0, dim)
    found = []
    for name in ("x", "before", "behind"):
        first, last, row = given.get(name, (0, 0, 0))
        begin, end = max(first, at), min(last, at + count)
        if begin < end:
            held = emit.operand_bounds(list(given).index(name), dim)[0]
            found.append((begin - first + row - held, end - begin, begin - at))
        else:
            found.append((0, 0, 0))
    starts, lengths, places = (list(each) for each in zip(*found, strict=True))
    return emit.call(ring_tile, *args[:3], dim, starts, lengths, places, count)


def roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    """An image that is rolled, dim by dim."""
    if not dims:
        return torch.roll(x.flatten(), shifts, 0).view(x.shape)
    y = x
    for shift, dim in zip(shifts, dims, strict=True):
        front = shift % max(x.shape[dim], 1)
        if front:
            y = ring(y, y, None, dim, front, -front)
    return y.clone() if y is x else y


RULES: tuple[RuleEntry, ...] = (
    rule(aten.roll, "d.. k@dims! -> d.. k@dims", linear="0", moves_only=True, expand=roll),
    rule(ring, turned, rows=turned_rows),
    rule(ring_sum, turned, rows=turned_rows),
)
