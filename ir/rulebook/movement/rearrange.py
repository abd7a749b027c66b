"""Ops that put elements elsewhere: iterations, repetition, diagonals, windows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from shardfx.ir.dim_sharding import Window
from shardfx.ir.graph import Node
from shardfx.ir.rulebook.arithmetic.pool import side_by_side
from shardfx.ir.rulebook.dims import argument, moves, words
from shardfx.ir.rules.book import RuleEntry, rule
from shardfx.ir.rules.local import Emit
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.rules.template import template
from shardfx.ir.rules.windows import Stretch, down, seeing, up

aten = torch.ops.aten


def mirrored(node: Node) -> dict[int, int]:
    """The dims of an image that are turned round, and where each then stands in the result."""
    ndim = node.operands[0].type.ndim
    dims = [dim % ndim for dim in argument(node, "dims")]
    if node.op.overloadpacket is aten.flip:
        return {dim: dim for dim in dims}
    (i, j), iterations = dims, argument(node, "k") % 4
    return ({}, {j: i}, {i: i, j: j}, {i: j})[iterations]


def turned(node: Node) -> ShardingRule:
    """Of a dim that is turned round a rank needs the rows of its mirror image: row o is the one as far from the end."""
    found, sizes = mirrored(node), node.operands[0].shape
    other = {to: dim for dim, to in found.items() if to not in found}  # a quarter iteration: where the first one stood
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


class Unfolded(NamedTuple):
    """How windows stand along a dim of a size: how long they are, how many, and every how many rows one begins."""

    dim: int
    size: int
    length: int
    places: int
    step: int

    @staticmethod
    def of(node: Node) -> Unfolded:
        """Those of an op, or of the one whose gradient it is."""
        ends = node.operands[0], node.outs[0]
        plain, wide = ends[::-1] if node.op.overloadpacket is aten.unfold_backward else ends
        dim = argument(node, "dim", "dimension") % plain.type.ndim
        return Unfolded(dim, plain.shape[dim], wide.shape[-1], wide.shape[dim], argument(node, "step"))


def unfold(node: Node) -> str | ShardingRule:
    """The windows of a dim, whose rows stand in a new last one: side by side, or a rank needs those of its own."""
    if not node.operands[0].shape or not node.outs[0].shape:
        return "~e! -> ~e!"
    back, (dim, size, length, count, step) = node.op.overloadpacket is aten.unfold_backward, Unfolded.of(node)
    apart = side_by_side(size, count, length, step, 0)
    x, y = f"d.. (w s!)@{dim}" if apart else f"d.. x@{dim}", f"d.. w@{dim} e!"
    rule = template(f"{y} -> {x}" if back else f"{x} -> {y}", "0")(node)
    if apart:
        return rule
    return seeing(rule, {"w": ("x", up(size, length, step, 0))} if back else {"x": ("w", down(count, length, step, 0))})


def unfolded_rows(emit: Emit, args: tuple[Any, ...], leaders: frozenset[str]) -> Any:
    """A rank's windows, of the rows that it holds; or its rows, of the windows that have them."""
    dim, _, length, _, step = Unfolded.of(emit.node)
    (at, held), (first, count) = emit.operand_bounds(0, dim), emit.result_bounds(0, dim)
    if emit.node.op.overloadpacket is not aten.unfold_backward:
        begin, end = first * step - at, (first + count - 1) * step + length - at
        x = emit.call(aten.slice.Tensor, args[0], dim, begin, end) if end - begin < held else args[0]
        return emit.call(emit.node.op, x, *args[1:])
    shape = list(emit.result_shape(0))
    rows = Stretch(dim, at * step, (at + held - 1) * step + length, first, first + count)
    made = emit.call(emit.node.op, args[0], [*shape[:dim], rows.end - rows.start, *shape[dim + 1 :]], *args[2:])
    begin, end = rows.kept
    if end - begin < rows.end - rows.start:
        made = emit.call(aten.slice.Tensor, made, dim, begin, end)
    pads = [*[0] * (2 * (len(shape) - dim - 1)), *rows.added]
    return emit.call(aten.constant_pad_nd.default, made, pads) if any(pads) else made


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


DIAGONAL, PLANE = "d.. q!", "d.. i@dim1! j@dim2!"

RULES: tuple[RuleEntry, ...] = (
    rule((aten.flip, aten.rot90), turned, rows=turned_rows),
    rule((aten.tril, aten.triu), "n.. i! j! -> n.. i! j!", linear="0"),
    moves(aten.repeat, repeat, local=repeat_local),
    moves((aten.diagonal, aten.diagonal_copy), f"{PLANE} -> {DIAGONAL}"),
    rule(aten.diagonal_backward, f"{DIAGONAL} -> {PLANE}", linear="0", shape_arg=1),
    rule(aten.diag_embed, f"{DIAGONAL} -> {PLANE}", linear="0"),
    rule((aten.unfold, aten.unfold_copy), unfold, linear="0", rows=unfolded_rows),
    rule(aten.unfold_backward, unfold, linear="0", shape_arg=1, rows=unfolded_rows),
    # Slices along one dim are scaled, each by its own norm.
    rule(aten.renorm, "d..! k@dim -> d.. k@dim"),
)
