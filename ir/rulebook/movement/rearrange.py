"""Ops that put elements elsewhere: rotations, repetition, diagonals, windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardfx.ir.dim_sharding import Window
from shardfx.ir.graph import Node
from shardfx.ir.ops.computing.rings import ring, ring_sum, ring_tile
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


def ringed(node: Node) -> ShardingRule:
    """``x[.. h ..], before[.. i ..], behind[.. j ..] -> y[.. o ..]``, each as o needs it."""
    given, made = offsets(node), node.outs[0].shape[argument(node, "dim")]
    rule = template(FORM, "&", moves_only=node.op is ring)(node)
    letters = {"x": "h", "before": "i", "behind": "j"}
    further = {letters[name]: row - first for name, (first, _, row) in given.items()}
    return seeing(rule, {letter: ("o", Window(made, 1, 1, n, n)) for letter, n in further.items()})


def ringed_rows(emit: Emit, args: tuple[Any, ...], leaders: frozenset[str]) -> Any:
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
    rule(ring, ringed, rows=ringed_rows),
    rule(ring_sum, ringed, rows=ringed_rows),
)
