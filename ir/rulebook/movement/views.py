"""Ops that move elements about: views, transposes, slices, splits, concatenations.

A view is written in the sub-dims that its input's and output's dims have in common, so that a cut passes
through it whichever way: ``[8, 128, 64] -> [1024, 64]`` is ``b t d -> (b t) d``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardfx.ir.graph import Node
from shardfx.ir.rules.book import RuleEntry, rule
from shardfx.ir.rules.local import Emit
from shardfx.ir.rules.sharding_rule import Dim, ShardingRule

aten = torch.ops.aten

FIRST = (frozenset({0}),)


def common_factors(a: Sequence[int], b: Sequence[int]) -> tuple[list[Dim], list[Dim], dict[str, int], set[str]]:
    """The dims of two shapes of one size, as products of common factors; those that don't nest are whole."""
    left: list[Dim] = [() for _ in a]
    right: list[Dim] = [() for _ in b]
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    i = j = 0
    while i < len(a) or j < len(b):
        ai, bj = i, j
        pa, pb = 1, 1
        while True:
            if pa <= pb and i < len(a) and (pa < pb or i == ai):
                pa *= a[i]
                i += 1
            elif j < len(b) and (pb < pa or j == bj):
                pb *= b[j]
                j += 1
            else:
                break
        while i < len(a) and a[i] == 1 and pa == pb and i == ai:
            i += 1
        _group(list(range(ai, i)), list(range(bj, j)), a, b, left, right, sizes, whole)
    return left, right, sizes, whole


def _ends(shape: Sequence[int], dims: Sequence[int]) -> list[int]:
    return list(itertools.accumulate((shape[d] for d in dims), lambda x, y: x * y))


def _group(
    ia: list[int],
    jb: list[int],
    a: Sequence[int],
    b: Sequence[int],
    left: list[Dim],
    right: list[Dim],
    sizes: dict[str, int],
    whole: set[str],
) -> None:
    """Name the factors of one group of dims that have the same product."""
    ends = sorted({1, *_ends(a, ia), *_ends(b, jb)})
    nested = all(x and y % x == 0 for x, y in itertools.pairwise(ends))
    if not nested:
        for dims, shape, names, prefix in ((ia, a, left, "x"), (jb, b, right, "y")):
            for d in dims:
                if shape[d] != 1:
                    names[d] = (f"{prefix}{d}",)
                    sizes[f"{prefix}{d}"] = shape[d]
                    whole.add(f"{prefix}{d}")
        return
    factors = []
    for low, high in itertools.pairwise(ends):
        name = f"f{len(sizes)}"
        sizes[name] = high // low
        factors.append((high, name))
    for dims, shape, names in ((ia, a, left), (jb, b, right)):
        low = 1
        for d in dims:
            high = low * shape[d]
            names[d] = tuple(name for end, name in factors if low < end <= high)
            low = high


def view(node: Node) -> ShardingRule:
    left, right, sizes, whole = common_factors(node.operands[0].shape, node.outs[0].shape)
    return ShardingRule((tuple(left),), (tuple(right),), sizes, frozenset(whole), linear=FIRST, moves_only=True)


def _names(shape: Sequence[int]) -> tuple[list[Dim], dict[str, int]]:
    return [(f"d{i}",) for i in range(len(shape))], {f"d{i}": s for i, s in enumerate(shape)}


def permuted(order: Callable[[Node, int], list[int]]) -> Callable[[Node], ShardingRule]:
    """The rule of an op whose result dim i is the input's dim order[i]."""

    def make(node: Node) -> ShardingRule:
        names, sizes = _names(node.operands[0].shape)
        result = tuple(names[i] for i in order(node, len(names)))
        return ShardingRule((tuple(names),), (result,), sizes, linear=FIRST, moves_only=True)

    make.__name__ = "permuted"
    return make


def _transposed(node: Node, ndim: int) -> list[int]:
    order = list(range(ndim))
    if ndim:
        i, j = node.args[1] % ndim, node.args[2] % ndim
        order[i], order[j] = order[j], order[i]
    return order


def expand(node: Node) -> ShardingRule:
    """New dims, and dims of size one that grow, are factors of the result alone."""
    shape, out = node.operands[0].shape, node.outs[0].shape
    names, sizes = _names(out)
    lead = len(out) - len(shape)
    operand = tuple(() if s == 1 and out[lead + i] != 1 else names[lead + i] for i, s in enumerate(shape))
    return ShardingRule((operand,), (tuple(names),), sizes, linear=FIRST, moves_only=True)


def _blocks(names: list[Dim], sizes: dict[str, int], dim: int, size: int, block: int) -> Dim:
    """Write dim ``dim`` of ``size`` as (c! n), n of ``block`` elements."""
    sizes["c"], sizes["n"] = size // block if block else 0, block
    return ("c", "n")


def _slice_range(args: Sequence[Any], dim_at: int, size: int) -> tuple[int, int, int]:
    start, end, step = (*args[dim_at + 1 :], None, None, None)[:3]
    start = 0 if start is None else start
    end = size if end is None else end
    start = max(start + size, 0) if start < 0 else min(start, size)
    end = max(end + size, 0) if end < 0 else min(end, size)
    return start, max(end, start), 1 if step is None else step


def _dim(node: Node, at: int, ndim: int, default: int = 0) -> int:
    value = node.args[at] if len(node.args) > at else node.kwargs.get("dim", default)
    return int(value) % max(ndim, 1)


def _aligned(start: int, end: int, step: int, size: int) -> bool:
    length = end - start
    return step == 1 and length > 0 and size % length == 0 and start % length == 0


def slice_(node: Node) -> ShardingRule:
    """A slice that is one of the equal blocks of a dim keeps the cuts within the block; else the dim is whole."""
    shape, out = node.operands[0].shape, node.outs[0].shape
    dim = _dim(node, 1, len(shape))
    names, sizes = _names(shape)
    start, end, step = _slice_range(node.args, 1, shape[dim])
    operand, result = list(names), list(names)
    if out[dim] == shape[dim]:
        return ShardingRule((tuple(names),), (tuple(names),), sizes, linear=FIRST, moves_only=True)
    if _aligned(start, end, step, shape[dim]):
        operand[dim] = _blocks(names, sizes, dim, shape[dim], out[dim])
        result[dim] = ("n",)
        whole = {"c"}
    else:
        sizes["o"] = out[dim]
        result[dim] = ("o",)
        whole = {f"d{dim}", "o"}
    return ShardingRule((tuple(operand),), (tuple(result),), sizes, frozenset(whole), linear=FIRST, moves_only=True)


def slice_local(emit: Emit) -> Any:
    shape = emit.node.operands[0].shape
    dim = _dim(emit.node, 1, len(shape))
    start, end, step = _slice_range(emit.node.args, 1, shape[dim])
    local, out = emit.operand_shape(0)[dim], emit.result_shape(0)[dim]
    if end - start == shape[dim] and step == 1:
        return emit.args[0]
    if _aligned(start, end, step, shape[dim]) and local != shape[dim]:
        start = start // (end - start) * out
        end = start + out
    return emit.call(aten.slice.Tensor, emit.args[0], dim, start, end, step)


def slice_backward(node: Node) -> ShardingRule:
    grad, out = node.operands[0].shape, node.outs[0].shape
    dim = _dim(node, 2, len(out))
    names, sizes = _names(grad)
    start, end, step = _slice_range(node.args, 2, out[dim])
    result = list(names)
    whole: set[str] = set()
    if grad[dim] != out[dim]:
        if _aligned(start, end, step, out[dim]):
            del sizes[f"d{dim}"]
            names[dim] = ("n",)
            result[dim] = _blocks(names, sizes, dim, out[dim], grad[dim])
            whole = {"c"}
        else:
            sizes["o"] = out[dim]
            result[dim] = ("o",)
            whole = {f"d{dim}", "o"}
    return ShardingRule((tuple(names),), (tuple(result),), sizes, frozenset(whole), linear=FIRST, moves_only=True)


def slice_backward_local(emit: Emit) -> Any:
    shape = emit.node.outs[0].shape
    dim = _dim(emit.node, 2, len(shape))
    start, end, step = _slice_range(emit.node.args, 2, shape[dim])
    out, grad = emit.result_shape(0), emit.operand_shape(0)
    if _aligned(start, end, step, shape[dim]) and out[dim] != shape[dim]:
        start = start // (end - start) * grad[dim]
        end = start + grad[dim]
    return emit.call(aten.slice_backward.default, emit.args[0], list(out), dim, start, end, step)


def select(node: Node) -> ShardingRule:
    shape = node.operands[0].shape
    dim = _dim(node, 1, len(shape))
    names, sizes = _names(shape)
    result = tuple(n for i, n in enumerate(names) if i != dim)
    return ShardingRule((tuple(names),), (result,), sizes, frozenset({f"d{dim}"}), linear=FIRST, moves_only=True)


def select_backward(node: Node) -> ShardingRule:
    out = node.outs[0].shape
    dim = _dim(node, 2, len(out))
    names, sizes = _names(out)
    operand = tuple(n for i, n in enumerate(names) if i != dim)
    return ShardingRule((operand,), (tuple(names),), sizes, frozenset({f"d{dim}"}), linear=FIRST, moves_only=True)


def split(node: Node) -> ShardingRule:
    """Equal pieces keep the cuts within a piece: ``(c! n) -> n, n, n``."""
    shape = node.operands[0].shape
    dim = _dim(node, 2, len(shape))
    names, sizes = _names(shape)
    pieces = [v.shape[dim] for v in node.outs]
    operand, whole = list(names), {f"d{dim}"}
    results = [list(names) for _ in pieces]
    if len(set(pieces)) == 1:
        operand[dim] = _blocks(names, sizes, dim, shape[dim], pieces[0])
        for result in results:
            result[dim] = ("n",)
        whole = {"c"}
    else:
        for i, (result, piece) in enumerate(zip(results, pieces, strict=True)):
            sizes[f"p{i}"] = piece
            result[dim] = (f"p{i}",)
            whole.add(f"p{i}")
    return ShardingRule(
        (tuple(operand),), tuple(tuple(r) for r in results), sizes, frozenset(whole), linear=FIRST, moves_only=True
    )


def split_local(emit: Emit) -> Any:
    dim = _dim(emit.node, 2, len(emit.node.operands[0].shape))
    lengths = [emit.result_shape(i)[dim] for i in range(len(emit.node.outs))]
    return emit.call(aten.split_with_sizes.default, emit.args[0], lengths, dim)


def unbind(node: Node) -> ShardingRule:
    shape = node.operands[0].shape
    dim = _dim(node, 1, len(shape))
    names, sizes = _names(shape)
    result = tuple(n for i, n in enumerate(names) if i != dim)
    return ShardingRule(
        (tuple(names),), (result,) * len(node.outs), sizes, frozenset({f"d{dim}"}), linear=FIRST, moves_only=True
    )


def cat(node: Node) -> ShardingRule:
    """Equal operands keep their cuts: ``n, n, n -> (c! n)``."""
    out = node.outs[0].shape
    dim = _dim(node, 1, len(out))
    names, sizes = _names(out)
    result, whole = list(names), {f"d{dim}"}
    pieces = [v.shape[dim] if v.type.ndim == len(out) else 0 for v in node.operands]
    operands = []
    if len(set(pieces)) == 1 and pieces[0]:
        result[dim] = _blocks(names, sizes, dim, out[dim], pieces[0])
        whole = {"c"}
        operands = [[*names[:dim], ("n",), *names[dim + 1 :]] for _ in pieces]
    else:
        for i, (value, piece) in enumerate(zip(node.operands, pieces, strict=True)):
            sizes[f"p{i}"] = piece if value.type.ndim == len(out) else value.type.numel
            whole.add(f"p{i}")
            operands.append(
                [*names[:dim], (f"p{i}",), *names[dim + 1 :]] if value.type.ndim == len(out) else [(f"p{i}",)]
            )
    together = (frozenset(range(len(operands))),)
    return ShardingRule(
        tuple(tuple(o) for o in operands), (tuple(result),), sizes, frozenset(whole), linear=together, moves_only=True
    )


def stack(node: Node) -> ShardingRule:
    out = node.outs[0].shape
    dim = _dim(node, 1, len(out))
    names, sizes = _names(out)
    operand = tuple(n for i, n in enumerate(names) if i != dim)
    together = (frozenset(range(len(node.operands))),)
    return ShardingRule(
        (operand,) * len(node.operands),
        (tuple(names),),
        sizes,
        frozenset({f"d{dim}"}),
        linear=together,
        moves_only=True,
    )


def whole_dims(*positions: int) -> Callable[[Node], ShardingRule]:
    """The rule of a shape-keeping op that mixes the dims at the given places (negative: from the end)."""

    def make(node: Node) -> ShardingRule:
        shape = node.operands[0].shape
        names, sizes = _names(shape)
        whole = frozenset(f"d{p % len(shape)}" for p in positions)
        return ShardingRule((tuple(names),), (tuple(names),), sizes, whole, linear=FIRST)

    make.__name__ = "whole_dims"
    return make


def argument_dims(node: Node) -> ShardingRule:
    """The same, the dims being the second argument (``flip``) or the third (``roll``)."""
    dims = node.args[2] if node.op.overloadpacket is aten.roll and len(node.args) > 2 else node.args[1]
    shape = node.operands[0].shape
    given = range(len(shape)) if node.op.overloadpacket is aten.roll and len(node.args) < 3 else dims
    return whole_dims(*given)(node)


def squeeze_local(emit: Emit) -> Any:
    """A dim of which a rank holds one element is no dim of size one."""
    return emit.call(aten.reshape.default, emit.args[0], list(emit.result_shape(0)))


RULES: tuple[RuleEntry, ...] = (
    rule((aten.view, aten._unsafe_view, aten.reshape, aten.view_copy), view, shape_arg=1, free=True),
    rule((aten.unsqueeze, aten.unsqueeze_copy), view, free=True),
    rule((aten.squeeze, aten.squeeze_copy), view, local=squeeze_local, free=True),
    rule((aten.expand, aten.expand_copy), expand, shape_arg=1),
    rule((aten.permute, aten.permute_copy), permuted(lambda node, n: [d % n for d in node.args[1]]), free=True),
    rule((aten.transpose.int, aten.transpose_copy.int), permuted(_transposed), free=True),
    rule((aten.t, aten.t_copy), permuted(lambda node, n: list(range(n))[::-1]), free=True),
    rule(aten.slice.Tensor, slice_, local=slice_local),
    rule(aten.slice_backward, slice_backward, local=slice_backward_local),
    rule(aten.select.int, select),
    rule(aten.select_backward, select_backward, shape_arg=1),
    rule(
        (aten.split.Tensor, aten.split_with_sizes, aten.unsafe_split.Tensor, aten.split_with_sizes_copy),
        split,
        local=split_local,
    ),
    rule((aten.unbind, aten.unbind_copy), unbind),
    rule(aten.cat, cat),
    rule(aten.stack, stack),
    rule((aten.flip, aten.roll), argument_dims),
    rule((aten.tril, aten.triu), whole_dims(-1, -2)),
)
