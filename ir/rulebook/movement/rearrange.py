"""Ops that put elements elsewhere: turns, repetition, diagonals, windows."""

from __future__ import annotations

from typing import Any

import torch

from shardfx.ir.cut import Window
from shardfx.ir.graph import Node
from shardfx.ir.rulebook.arithmetic.pool import side_by_side
from shardfx.ir.rulebook.dims import argument, moves, words
from shardfx.ir.rules.book import RuleEntry, rule
from shardfx.ir.rules.local import Emit
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.rules.template import template
from shardfx.ir.rules.windows import seeing

aten = torch.ops.aten


def mirrored(node: Node) -> dict[int, int]:
    """The dims of an image that are turned round, and where each then stands in the result."""
    ndim = node.operands[0].type.ndim
    dims = [dim % ndim for dim in argument(node, "dims")]
    if node.op.overloadpacket is aten.flip:
        return {dim: dim for dim in dims}
    (i, j), turns = dims, argument(node, "k") % 4
    return ({}, {j: i}, {i: i, j: j}, {i: j})[turns]


def turned(node: Node) -> ShardingRule:
    """Of a dim that is turned round a rank needs the rows of its mirror image: row o is the one as far from the end."""
    found, sizes = mirrored(node), node.operands[0].shape
    other = {to: dim for dim, to in found.items() if to not in found}  # a quarter turn: where the first one stood
    of = dict(enumerate(range(len(sizes)))) | {to: dim for dim, to in (found | other).items()}
    last = {dim: sizes[dim] - 1 for dim in found if sizes[dim] > 1}
    y = words(f"{'o' if of[to] in last else 'd'}{of[to]}" for to in range(len(sizes)))
    rule = template(f"{words(f'd{dim}' for dim in range(len(sizes)))} -> {y}", "0", moves_only=True)(node)
    return seeing(rule, {f"d{dim}": (f"o{dim}", Window(n + 1, -1, 1, n, n)) for dim, n in last.items()})


def turned_rows(emit: Emit, args: tuple[Any, ...], leaders: frozenset[str]) -> Any:
    """A rank's rows, of those that it holds, turned round."""
    x = args[0]
    for dim, to in sorted(mirrored(emit.node).items()):
        size = emit.node.operands[0].shape[dim]
        (at, held), (first, count) = emit.operand_bounds(0, dim), emit.result_bounds(0, to)
        begin = size - first - count - at
        if count < held:
            x = emit.call(aten.slice.Tensor, x, dim, begin, begin + count)
    return emit.call(emit.node.op, x, *args[1:])


def unfold(node: Node) -> str:
    """The dim that is cut into windows is whole, if they do not stand side by side, and so is the new last one."""
    back = node.op.overloadpacket is aten.unfold_backward
    plain, wide = (node.outs[0], node.operands[0]) if back else (node.operands[0], node.outs[0])
    if not plain.shape:
        return "~e! -> ~e!"
    dim = argument(node, "dim", "dimension") % plain.type.ndim
    apart = side_by_side(plain.shape[dim], wide.shape[dim], wide.shape[-1], argument(node, "step"), 0)
    x = f"d.. (w s!)@{dim}" if apart else f"d.. x@{dim}!"
    y = f"d.. w@{dim} e!" if apart else f"d.. w@{dim}! e!"
    return f"{y} -> {x}" if back else f"{x} -> {y}"


def repeat_local(emit: Emit) -> Any:
    """Each rank repeats what it has as often as makes its part of the result."""
    out, x = emit.result_shape(0), emit.operand_shape(0)
    lead = len(out) - len(x)
    counts = [*out[:lead], *(a // b if b else 1 for a, b in zip(out[lead:], x, strict=True))]
    return emit.call(aten.repeat.default, emit.args[0], counts)


def repeat(node: Node) -> str:
    """``d -> (r d)``: what is repeated may be cut, and so may the repetitions."""
    x, out = node.operands[0].type.ndim, node.outs[0].type.ndim
    result = (f"(r{i} d{i})" if i >= out - x else f"d{i}" for i in range(out))
    return f"~{words(f'd{i}' for i in range(out - x, out))} -> {words(result)}"


DIAGONAL, PLANE = "d.. q!", "d.. i@dim1! j@dim2!"

RULES: tuple[RuleEntry, ...] = (
    rule((aten.flip, aten.rot90), turned, rows=turned_rows),
    rule((aten.tril, aten.triu), "n.. i! j! -> n.. i! j!", linear="0"),
    moves(aten.repeat, repeat, local=repeat_local),
    moves((aten.diagonal, aten.diagonal_copy), f"{PLANE} -> {DIAGONAL}"),
    rule(aten.diagonal_backward, f"{DIAGONAL} -> {PLANE}", linear="0", shape_arg=1),
    rule(aten.diag_embed, f"{DIAGONAL} -> {PLANE}", linear="0"),
    rule((aten.unfold, aten.unfold_copy), unfold, linear="0"),
    rule(aten.unfold_backward, unfold, linear="0", shape_arg=1),
    # Slices along one dim are scaled, each by its own norm.
    rule(aten.renorm, "d..! k@dim -> d.. k@dim"),
)
