"""Ops that put elements elsewhere: rotations, repetition, diagonals, windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardfx.ir.dim_sharding import Window
from shardfx.ir.graph import Node
from shardfx.ir.ops.computing.tiles import around, ring, ring_sum
from shardfx.ir.rulebook.arithmetic.spatial_dims import side_by_side
from shardfx.ir.rulebook.dims import argument, at_dim, moves, words
from shardfx.ir.rules.book import RuleEntry, rule
from shardfx.ir.rules.local import Emit
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.rules.template import template
from shardfx.ir.rules.windows import seeing

aten = torch.ops.aten


def unfold(node: Node) -> str:
    """The windows of a dim, whose rows stand in a new last one: where they stand side by side they may be sharded."""
    ends = node.operands[0], node.outs[0]
    if not all(each.shape for each in ends):
        return "~e! -> ~e!"
    back = node.op.overloadpacket is aten.unfold_backward
    plain, wide = ends[::-1] if back else ends
    dim = argument(node, "dim", "dimension") % plain.type.ndim
    apart = side_by_side(plain.shape[dim], wide.shape[dim], wide.shape[-1], argument(node, "step"), 0)
    x, y = (f"d.. (w s!)@{dim}", f"d.. w@{dim} e!") if apart else (f"d.. x@{dim}!", f"d.. w@{dim}! e!")
    return f"{y} -> {x}" if back else f"{x} -> {y}"


def repeat_local(emit: Emit) -> Any:
    """Each rank repeats what it has as often as makes its part of the result."""
    out, x = emit.result_shape(0), emit.operand_shape(0)
    lead = len(out) - len(x)
    counts = [*out[:lead], *(a // b if b else 1 for a, b in zip(out[lead:], x, strict=True))]
    return emit.call(aten.repeat.default, emit.args[0], counts)


def repeat(node: Node) -> str:
    """``d -> (r d)``: what is repeated may be sharded, and so may the repetitions."""
    x, out = node.operands[0].type.ndim, node.outs[0].type.ndim
    result = (f"(r{i} d{i})" if i >= out - x else f"d{i}" for i in range(out))
    return f"~{words(f'd{i}' for i in range(out - x, out))} -> {words(result)}"


# ---- images whose edges meet: of the rows that stay, of those in front and of those behind a rank needs what its own
# rows are, each by itself


PARTS = {"x": "h", "before": "i", "behind": "j"}


def placed(node: Node) -> dict[str, tuple[int, int, int]]:
    """For each operand that is given: from which row of the result to which it stands for it (for a sum, is added to
    it), and which of its rows is the first of these."""
    rows = zip(PARTS, *(argument(node, name) for name in ("starts", "lengths", "at")), strict=True)
    return {name: (at, at + n, start) for name, start, n, at in rows if argument(node, name) is not None}


def ringed(node: Node) -> ShardingRule:
    """``x[.. h ..], before[.. i ..], behind[.. j ..] -> y[.. o ..]``, each as o needs it."""
    made = argument(node, "size")
    rule = template("d.. h@dim, d.. i@dim, d.. j@dim -> d.. o@dim", "&", moves_only=node.op is ring)(node)
    further = {PARTS[name]: row - first for name, (first, _, row) in placed(node).items()}
    return seeing(rule, {letter: ("o", Window(made, 1, 1, n, n)) for letter, n in further.items()})


def ringed_rows(emit: Emit, args: tuple[Any, ...], leaders: frozenset[str]) -> Any:
    """A rank's rows, of those that stay, and of those in front and behind."""
    dim, given = at_dim(emit, emit.node.outs[0]), placed(emit.node)
    at, count = emit.result_bounds(0, dim)
    found = []
    for name in PARTS:
        first, last, row = given.get(name, (0, 0, 0))
        begin, end = max(first, at), min(last, at + count)
        if begin < end:
            held = emit.operand_bounds(list(given).index(name), dim)[0]
            found.append((begin - first + row - held, end - begin, begin - at))
        else:
            found.append((0, 0, 0))
    return emit.call(emit.node.op, *args[:3], dim, *(list(each) for each in zip(*found, strict=True)), count)


def roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    """An image that is rolled, dim by dim."""
    if not dims:
        return torch.roll(x.flatten(), shifts, 0).view(x.shape)
    y = x
    for shift, dim in zip(shifts, dims, strict=True):
        front = shift % max(x.shape[dim], 1)
        if front:
            y = ring(*around(y, dim, front, -front))
    return y.clone() if y is x else y


DIAGONAL, PLANE = "d.. q!", "d.. i@dim1! j@dim2!"

RULES: tuple[RuleEntry, ...] = (
    moves(aten.flip, "d.. k@dims! -> d.. k@dims"),
    moves(aten.rot90, "d.. k@dims! -> d.. o@dims!"),
    rule((aten.tril, aten.triu), "n.. i! j! -> n.. i! j!", linear="0"),
    moves(aten.repeat, repeat, local=repeat_local),
    moves((aten.diagonal, aten.diagonal_copy), f"{PLANE} -> {DIAGONAL}"),
    rule(aten.diagonal_backward, f"{DIAGONAL} -> {PLANE}", linear="0", shape_arg=1),
    rule(aten.diag_embed, f"{DIAGONAL} -> {PLANE}", linear="0"),
    rule((aten.unfold, aten.unfold_copy), unfold, linear="0"),
    rule(aten.unfold_backward, unfold, linear="0", shape_arg=1),
    # Slices along one dim are scaled, each by its own norm.
    rule(aten.renorm, "d..! k@dim -> d.. k@dim"),
    rule(aten.roll, "d.. k@dims! -> d.. k@dims", linear="0", moves_only=True, expand=roll),
    rule((ring, ring_sum), ringed, rows=ringed_rows),
)
