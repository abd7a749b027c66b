"""Views: reshapes, transposes, expansion.

A view is written in the sub-dims that its input's and output's dims have in common, so that a sharding passes
through it in both directions: ``[8, 128, 64] -> [1024, 64]`` is ``b t d -> (b t) d``.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence

import torch

from shardfx.ir.graph import Node
from shardfx.ir.rulebook.dims import argument, moves, words
from shardfx.ir.rules.book import Contiguous, RuleEntry, replicated, rule
from shardfx.ir.rules.local import reshaped
from shardfx.ir.rules.sharding_rule import Dim, Linear, ShardingRule

aten = torch.ops.aten


def common_factors(a: Sequence[int], b: Sequence[int]) -> tuple[list[Dim], list[Dim], dict[str, int], set[str]]:
    """The dims of two shapes of one size, as products of common factors; those that don't nest are replicated."""
    sides = (("x", a), ("y", b))
    ends = [list(itertools.accumulate(shape, operator.mul)) for shape in (a, b)]
    dims: list[list[Dim]] = [[(f"{x}{d}",) if size != 1 else () for d, size in enumerate(shape)] for x, shape in sides]
    full = {f"{x}{d}": size for x, shape in sides for d, size in enumerate(shape)}
    sizes: dict[str, int] = {}
    shared = sorted({1, *ends[0]} & {1, *ends[1]}) if 0 not in a else ()
    for low, high in itertools.pairwise(shared):
        inside = sorted({low, high, *(e for e in itertools.chain(*ends) if low < e < high)})
        if any(y % x for x, y in itertools.pairwise(inside)):
            continue
        factors = [(f"f{len(sizes) + i}", x, y) for i, (x, y) in enumerate(itertools.pairwise(inside))]
        sizes.update({f: y // x for f, x, y in factors})
        for shape, stops, made in zip((a, b), ends, dims, strict=True):
            for d, (size, end) in enumerate(zip(shape, stops, strict=True)):
                if size != 1 and low < end <= high:
                    made[d] = tuple(f for f, _, y in factors if end // size < y <= end)
    rest = {f: full[f] for dim in itertools.chain(*dims) for f in dim if f in full}
    return dims[0], dims[1], {**sizes, **rest}, set(rest)


def view(node: Node) -> ShardingRule:
    """The rule of an op that keeps the order of elements."""
    return _view(node.operands[0].shape, node.outs[0].shape)


@functools.lru_cache(maxsize=1024)
def _view(a: tuple[int, ...], b: tuple[int, ...]) -> ShardingRule:
    left, right, sizes, full = common_factors(a, b)
    return ShardingRule(
        (tuple(left),), (tuple(right),), sizes, frozenset(full), (Linear(frozenset({0})),), moves_only=True
    )


def transposed(node: Node) -> str:
    """The transposition of two dims: those that the arguments name, or the two of a matrix."""
    order = list(range(node.operands[0].type.ndim))
    i, j = (argument(node, name) or 0 for name in ("dim0", "dim1")) if len(node.args) > 1 else (0, -1)
    if order:
        order[i], order[j] = order[j], order[i]
    return f"~{words(f'd{d}' for d in sorted(order))} -> {words(f'd{d}' for d in order)}"


def strided(node: Node) -> ShardingRule | None:
    """``as_strided`` of all elements in their order is a view; otherwise it is replicated. With a storage offset its
    result is no function of its operand's values."""
    size, stride, offset = (argument(node, name) for name in ("size", "stride", "storage_offset"))
    if offset is not None:
        return None
    in_order = list(itertools.accumulate([1, *size[:0:-1]], operator.mul))[::-1]
    plain = all(s == 1 or a == b for s, a, b in zip(size, stride, in_order, strict=True))
    return view(node) if plain and math.prod(size) == node.operands[0].type.numel else replicated(node, "0")


def reread(node: Node) -> str:
    """A bitcast to another dtype: several numbers of the last dim become one, or one becomes several."""
    wide, narrow = node.operands[0], node.outs[0]
    if wide.type.dtype.itemsize == narrow.type.dtype.itemsize:
        return "d.. -> d.."
    more = wide.type.dtype.itemsize < narrow.type.dtype.itemsize
    return "d.. (k r!) -> d.. k" if more else "d.. k -> d.. (k r!)"


RULES: tuple[RuleEntry, ...] = (
    rule((aten.view.default, aten._unsafe_view, aten.reshape, aten.view_copy.default), view, shape_arg=1, free=True),
    rule((aten.view.dtype, aten.view_copy.dtype), reread, contiguous=Contiguous.ALIGNED),
    rule((aten.unsqueeze, aten.unsqueeze_copy), view, free=True),
    # A dim of which a rank has one element is no dim of size one.
    rule((aten.squeeze, aten.squeeze_copy), view, local=reshaped, free=True),
    rule((aten.as_strided, aten.as_strided_copy), strided, local=reshaped, contiguous=Contiguous.ALL),
    moves((aten.expand, aten.expand_copy), "d.. -> d..", shape_arg=1),
    moves(torch.ops.prims.broadcast_in_dim, "d.. -> d@broadcast_dimensions r..", shape_arg=1),
    moves((aten.permute, aten.permute_copy), "d@dims -> d..", free=True),
    moves((aten.transpose.int, aten.transpose_copy.int, aten.t, aten.t_copy), transposed, free=True),
    # A complex number and its two parts: what is a sum in the one form is so in the other, a product is not.
    rule(aten.view_as_real, "n.. -> n.. e!", linear="0"),
    rule(aten.view_as_complex, "n.. e! -> n..", linear="0", contiguous=Contiguous.ALIGNED),
)
