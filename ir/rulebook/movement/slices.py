"""Slices and concatenation: slice, select, split, cat, stack, and their gradients; roll, flip, unfold, repeat.

A slice that is one of the equal blocks of a dim keeps shardings within the block: ``(c! k) -> k``. For other slices a
rank needs the rows of its shard of the result. Elsewhere the dim is replicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardfx.ir.dim_sharding import Window
from shardfx.ir.graph import Node, Value
from shardfx.ir.ops.computing.tiles import circular
from shardfx.ir.rulebook.arithmetic.spatial_dims import side_by_side
from shardfx.ir.rulebook.dims import argument, at_dim, moves, words
from shardfx.ir.rules.book import RuleEntry, rule
from shardfx.ir.rules.local import Emit, nothing
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.rules.template import Template, template
from shardfx.ir.rules.windows import seeing

aten = torch.ops.aten

REPLICATED, BLOCKS, PART = "d.. k@dim!", "d.. (c! k)@dim", "d.. k@dim"
BLOCK_OF = "d.. (k c!)@dim"
REST, ROWS = "d.. o@dim!", "d.. o@dim"


def _range(node: Node, size: int) -> tuple[int, int, int]:
    """Start, end and step of a slice, within a dim of this size."""
    start, end, step = (argument(node, name) for name in ("start", "end", "step"))
    start = 0 if start is None else start
    end = size if end is None else end
    start = max(start + size, 0) if start < 0 else min(start, size)
    end = max(end + size, 0) if end < 0 else min(end, size)
    return start, max(end, start), step


def _aligned(start: int, end: int, step: int, size: int) -> bool:
    length = end - start
    return step == 1 and length > 0 and size % length == 0 and start % length == 0


def _ends(node: Node) -> tuple[Value, Value]:
    """The full tensor and the slice: operand and result, in the gradient the reverse."""
    ends = (node.operands[0], node.outs[0])
    return ends if node.op is aten.slice.Tensor else ends[::-1]


def slice_(node: Node) -> str | ShardingRule:
    """A slice of a tensor, or a slice written into zeros: every step-th row of the full dim, from an offset on."""
    large, small = _ends(node)
    dim, back = argument(node, "dim"), large is not node.operands[0]
    forms = [BLOCKS, PART]
    if small.shape[dim] == large.shape[dim]:
        forms = [PART, PART]
    elif 0 in small.shape:
        forms = [REPLICATED, REST]
    elif not _aligned(*(asked := _range(node, large.shape[dim])), large.shape[dim]):
        start, _, step = asked
        made = template(f"{ROWS} -> {PART}" if back else f"{PART} -> {ROWS}", "0", moves_only=True)(node)
        if back:
            return seeing(made, {"o": ("k", Window(large.shape[dim], 1, step, step - 1 - start, -start))})
        return seeing(made, {"k": ("o", Window(small.shape[dim], step, 1, start, start))})
    return " -> ".join(reversed(forms) if back else forms)


def slice_local(emit: Emit) -> Any:
    """The part of a slice that lies in this rank's shard."""
    large, small = _ends(emit.node)
    dim = at_dim(emit, large)
    start, end, step = _range(emit.node, large.shape[dim])
    local, part = emit.operand_shape(0), emit.result_shape(0)
    back = large is not emit.node.operands[0]
    if (start, end, step) == (0, large.shape[dim], 1) and not back:
        return emit.args[0]
    if not _aligned(start, end, step, large.shape[dim]) and small.shape[dim] != large.shape[dim] and part[dim]:
        return _slice_back_rows(emit, dim, start, step) if back else _slice_rows(emit, dim, start, step)
    if back:
        local, part = part, local
    if _aligned(start, end, step, large.shape[dim]) and local[dim] != large.shape[dim]:
        start = start // (end - start) * part[dim]
        end = start + part[dim]
    return emit.call(emit.node.op, emit.args[0], *([list(local)] if back else []), dim, start, end, step)


def _slice_rows(emit: Emit, dim: int, start: int, step: int) -> Any:
    """A rank's rows of the slice, from its rows of the operand."""
    (at, _), (first, count) = emit.operand_bounds(0, dim), emit.result_bounds(0, dim)
    begin = start + step * first - at
    return emit.call(aten.slice.Tensor, emit.args[0], dim, begin, begin + step * (count - 1) + 1, step)


def _slice_back_rows(emit: Emit, dim: int, start: int, step: int) -> Any:
    """A rank's rows of a slice written into zeros, from the rows of the slice that lie there."""
    (at, size), (first, count) = emit.operand_bounds(0, dim), emit.result_bounds(0, dim)
    begin = max(at, -((start - first) // step))
    end = min(at + size, (first + count - 1 - start) // step + 1)
    if begin >= end:
        return nothing(emit, emit.args[0])
    x = emit.args[0]
    if (begin, end) != (at, at + size):
        x = emit.call(aten.slice.Tensor, x, dim, begin - at, end - at)
    row = start + step * begin - first
    shape = list(emit.result_shape(0))
    return emit.call(aten.slice_backward.default, x, shape, dim, row, row + step * (end - begin - 1) + 1, step)


def _shards(shapes: list[tuple[int, ...]], dim: int, ndim: int) -> tuple[str, str]:
    """The dims of parts that are concatenated, and of the concatenation."""
    sizes = {shape[dim] if len(shape) == ndim else 0 for shape in shapes}
    if len(sizes) == 1 and 0 not in sizes:
        return ", ".join([PART] * len(shapes)), BLOCKS
    own = (f"d.. p{i}@dim!" if len(shape) == ndim else f"p{i}!" for i, shape in enumerate(shapes))
    return ", ".join(own), REPLICATED


def split(node: Node) -> str:
    """Equal parts keep the shardings within a part: ``(c! k) -> k, k, k``."""
    x = node.operands[0]
    shards, together = _shards([v.shape for v in node.outs], argument(node, "dim") % x.type.ndim, x.type.ndim)
    return f"{together} -> {shards}"


def split_local(emit: Emit) -> Any:
    """A split into this rank's lengths of the results."""
    dim = at_dim(emit, emit.node.operands[0])
    lengths = [emit.result_shape(i)[dim] for i in range(len(emit.node.outs))]
    return emit.call(aten.split_with_sizes.default, emit.args[0], lengths, dim)


def cat(node: Node) -> str:
    """Equal operands keep their shardings: ``k, k, k -> (c! k)``."""
    out = node.outs[0]
    shards, together = _shards([v.shape for v in node.operands], argument(node, "dim") % out.type.ndim, out.type.ndim)
    return f"{shards} -> {together}"


def slice_scatter(node: Node) -> Template:
    """A tensor written into a slice of another; if the slice is full, the other's elements are not read."""
    x, part = (value.shape for value in node.operands)
    if x == part:
        return template(f"{PART}, {PART} -> {PART}", "0>|1", moves_only=True)
    size = x[argument(node, "dim")]
    start, end, step = (argument(node, name) for name in ("start", "end", "step"))
    if size % step == 0 and 0 <= (start or 0) < step and (end is None or end >= size):  # one of each ``step`` elements
        return template(f"{BLOCK_OF}, {PART} -> {BLOCK_OF}", "0&1", moves_only=True)
    return template(f"{REPLICATED}, {REST} -> {REPLICATED}", "0&1", moves_only=True)


# ---- elsewhere: repetition, diagonals, windows, images whose edges meet ----------------------------------------------


def unfold(node: Node) -> str:
    """Windows of a dim, whose rows are in a new last one: adjacent windows may be sharded."""
    ends = node.operands[0], node.outs[0]
    if not all(each.shape for each in ends):
        return "~e! -> ~e!"
    back = node.op.overloadpacket is aten.unfold_backward
    plain, wide = ends[::-1] if back else ends
    dim = argument(node, "dim", "dimension") % plain.type.ndim
    apart = side_by_side(plain.shape[dim], wide.shape[dim], wide.shape[-1], argument(node, "step"), 0)
    x, y = (f"d.. (w s!)@{dim}", f"d.. w@{dim} e!") if apart else (f"d.. x@{dim}!", f"d.. w@{dim}! e!")
    return f"{y} -> {x}" if back else f"{x} -> {y}"


def rotated(node: Node) -> str:
    """A rotation by 90 degrees exchanges two dims and reverses the second, which is replicated; by 180 degrees it
    reverses both."""
    k, names = argument(node, "k") % 4, [f"d{i}" for i in range(node.operands[0].type.ndim)]
    i, j = (names[dim] for dim in argument(node, "dims"))
    full = {j} if k == 1 else {i} if k == 3 else {i, j} if k else set[str]()
    other = {i: j, j: i} if k % 2 else {}
    return f"{words(names, full)} -> {words((other.get(name, name) for name in names), full)}"


def repeat_local(emit: Emit) -> Any:
    """The local repeat counts: each rank repeats its shard to its part of the result."""
    out, x = emit.result_shape(0), emit.operand_shape(0)
    lead = len(out) - len(x)
    counts = [*out[:lead], *(a // b if b else 1 for a, b in zip(out[lead:], x, strict=True))]
    return emit.call(aten.repeat.default, emit.args[0], counts)


def repeat(node: Node) -> str:
    """``d -> (r d)``: the repeated dim may be sharded, and so may the repetitions."""
    x, out = node.operands[0].type.ndim, node.outs[0].type.ndim
    result = (f"(r{i} d{i})" if i >= out - x else f"d{i}" for i in range(out))
    return f"~{words(f'd{i}' for i in range(out - x, out))} -> {words(result)}"


def roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    """A roll, dim by dim, as circular shifts."""
    if not dims:
        return torch.roll(x.flatten(), shifts, 0).view(x.shape)
    y = x
    for shift, dim in zip(shifts, dims, strict=True):
        front = shift % max(x.shape[dim], 1)
        if front:
            y = circular(y, dim, front, -front)
    return y.clone() if y is x else y


DIAGONAL, PLANE = "d.. q!", "d.. i@dim1! j@dim2!"

RULES: tuple[RuleEntry, ...] = (
    moves((aten.slice.Tensor, aten.slice_backward), slice_, local=slice_local),
    moves(aten.narrow_copy, f"{REPLICATED} -> {REST}"),
    moves(aten.select.int, f"{REPLICATED} -> d.."),
    moves(aten.select_backward, f"d.. -> {REPLICATED}", shape_arg=1),
    moves((aten.unbind, aten.unbind_copy), f"{REPLICATED} -> d.., ..."),
    rule(aten.stack, f"d.., ... -> {REPLICATED}", linear="&", moves_only=True),
    moves(
        (aten.split.Tensor, aten.split_with_sizes, aten.unsafe_split.Tensor, aten.split_with_sizes_copy),
        split,
        local=split_local,
    ),
    rule(aten.cat, cat, linear="&", moves_only=True),
    # The dim that is written to is replicated.
    rule(aten.select_scatter, f"{REPLICATED}, d.. -> {REPLICATED}", linear="0&1", moves_only=True),
    rule(aten.slice_scatter, slice_scatter, moves_only=True),
    moves(aten.flip, "d.. k@dims! -> d.. k@dims"),
    moves(aten.rot90, rotated),
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
)
