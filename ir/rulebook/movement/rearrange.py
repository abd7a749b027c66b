"""More ops that move elements: diagonals, windows, repetition, turns; and lookups in a sorted table."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from shardfx.ir.graph import Node
from shardfx.ir.rulebook.arithmetic.pool import side_by_side
from shardfx.ir.rulebook.dims import FIRST, argument, names
from shardfx.ir.rules.book import RuleEntry, replicated, rule
from shardfx.ir.rules.local import Emit
from shardfx.ir.rules.sharding_rule import Dim, ShardingRule

from .views import view

aten = torch.ops.aten


def diagonal(node: Node) -> ShardingRule:
    """The two dims of the diagonal are whole, the others pass; the diagonal itself is the last dim."""
    x, out = node.operands[0].shape, node.outs[0].shape
    pair = {int(argument(node, "dim1")) % len(x), int(argument(node, "dim2")) % len(x)}
    dims, sizes = names(x)
    sizes["diagonal"] = out[-1]
    result = (*(n for i, n in enumerate(dims) if i not in pair), ("diagonal",))
    whole = frozenset({"diagonal", *(f"d{i}" for i in pair)})
    return ShardingRule((tuple(dims),), (result,), sizes, whole, FIRST, moves_only=True)


def diag_embed(node: Node) -> ShardingRule:
    """The last dim becomes the diagonal of two."""
    x, out = node.operands[0].shape, node.outs[0].shape
    pair = {int(argument(node, "dim1")) % len(out), int(argument(node, "dim2")) % len(out)}
    result, sizes = names(out)
    sizes["diagonal"] = x[-1]
    operand = (*(n for i, n in enumerate(result) if i not in pair), ("diagonal",))
    whole = frozenset({"diagonal", *(f"d{i}" for i in pair)})
    return ShardingRule((operand,), (tuple(result),), sizes, whole, FIRST)


def diagonal_backward(node: Node) -> ShardingRule:
    grad, out = node.operands[0].shape, node.outs[0].shape
    pair = {int(argument(node, "dim1")) % len(out), int(argument(node, "dim2")) % len(out)}
    result, sizes = names(out)
    sizes["diagonal"] = grad[-1]
    operand = (*(n for i, n in enumerate(result) if i not in pair), ("diagonal",))
    whole = frozenset({"diagonal", *(f"d{i}" for i in pair)})
    return ShardingRule((operand,), (tuple(result),), sizes, whole, FIRST)


def unfold(node: Node) -> ShardingRule:
    """The dim that is cut into windows is whole, if they do not stand side by side, and so is the new last one; the
    others pass."""
    backward = node.op.overloadpacket is aten.unfold_backward
    wide = node.operands[0].shape if backward else node.outs[0].shape
    plain = node.outs[0].shape if backward else node.operands[0].shape
    if not plain:
        return replicated(node)
    dim = int(argument(node, "dim", "dimension")) % len(plain)
    dims, sizes = names(plain)
    sizes.update(windows=wide[dim], size=wide[-1])
    windows: list[Dim] = [*dims, ("size",)]
    windows[dim] = ("windows",)
    step = int(argument(node, "step"))
    if side_by_side(plain[dim], wide[dim], wide[-1], step, 0):
        sizes["step"] = step
        dims[dim] = ("windows", "step")
        whole = frozenset({"step", "size"})
    else:
        whole = frozenset({f"d{dim}", "windows", "size"})
    tensors = (tuple(windows), tuple(dims)) if backward else (tuple(dims), tuple(windows))
    return ShardingRule(tensors[:1], tensors[1:], sizes, whole, FIRST)


def repeat(node: Node) -> ShardingRule:
    """``d -> (r d)``: what is repeated may be cut, and so may the repetitions."""
    x, out = node.operands[0].shape, node.outs[0].shape
    dims, sizes = names(out)
    lead = len(out) - len(x)
    result: list[Dim] = list(dims)
    for i, size in enumerate(x):
        d = lead + i
        sizes[f"d{d}"] = size
        sizes[f"r{d}"] = out[d] // size if size else 1
        result[d] = (f"r{d}", f"d{d}")
    return ShardingRule((tuple(dims[lead:]),), (tuple(result),), sizes, linear=FIRST, moves_only=True)


def repeat_local(emit: Emit) -> Any:
    out, x = emit.result_shape(0), emit.operand_shape(0)
    lead = len(out) - len(x)
    counts = [*out[:lead], *(a // b if b else 1 for a, b in zip(out[lead:], x, strict=True))]
    return emit.call(aten.repeat.default, emit.args[0], counts)


def rot90(node: Node) -> ShardingRule:
    """Of the two dims of the plane one is turned round, and whole; in a quarter turn the other takes its place."""
    x = node.operands[0].shape
    turns, plane = argument(node, "k"), [d % len(x) for d in argument(node, "dims")]
    dims, sizes = names(x)
    result = list(dims)
    if turns % 2:
        result[plane[0]], result[plane[1]] = dims[plane[1]], dims[plane[0]]
    turned = {0: [], 1: plane[1:], 2: plane, 3: plane[:1]}[turns % 4]
    return ShardingRule(
        (tuple(dims),), (tuple(result),), sizes, frozenset(f"d{d}" for d in turned), FIRST, moves_only=True
    )


def narrow_copy(node: Node) -> ShardingRule:
    x, out = node.operands[0].shape, node.outs[0].shape
    dim = int(argument(node, "dim")) % len(x)
    dims, sizes = names(x)
    result = list(dims)
    sizes["o"], result[dim] = out[dim], ("o",)
    return ShardingRule((tuple(dims),), (tuple(result),), sizes, frozenset({f"d{dim}", "o"}), FIRST, moves_only=True)


def lookup(node: Node) -> ShardingRule:
    """``isin``, ``bucketize``: the first operand is looked up element by element in the other.

    What is in any part of a table is in it; a place among sorted numbers needs all of them.
    """
    dims, sizes = names(node.operands[0].shape)
    table, more = names(node.operands[1].shape, "t")
    found = node.op.overloadpacket is aten.isin
    word = "min" if argument(node, "invert") else "max"
    whole = frozenset() if found else frozenset(more)
    return ShardingRule((tuple(dims), tuple(table)), (tuple(dims),), {**sizes, **more}, whole, reduce=word)


def searchsorted(node: Node) -> ShardingRule:
    """One table for all, or one for each row."""
    table, x = (value.shape for value in node.operands[:2])
    if len(table) == 1 and len(x) != 1:
        return ShardingRule(*_in_one_table(x, table, len(node.operands) > 2))
    dims, sizes = names(x)
    sizes["table"] = table[-1]
    row = (*dims[:-1], ("table",))
    operands = (row, tuple(dims), *((row,) if len(node.operands) > 2 else ()))
    return ShardingRule(operands, (tuple(dims),), sizes, frozenset({"table"}))


def _in_one_table(x: tuple[int, ...], table: tuple[int, ...], sorter: bool) -> Any:
    dims, sizes = names(x)
    sizes["table"] = table[0]
    row: tuple[Dim, ...] = (("table",),)
    return (row, tuple(dims), *((row,) if sorter else ())), (tuple(dims),), sizes, frozenset({"table"})


def histc(node: Node) -> ShardingRule:
    """Counts add up, if the bins do not depend on the values."""
    dims, sizes = names(node.operands[0].shape)
    sizes["bins"] = node.outs[0].shape[0]
    fixed = argument(node, "min") != argument(node, "max")
    whole = {"bins"} if fixed else set(sizes)
    return ShardingRule((tuple(dims),), ((("bins",),),), sizes, frozenset(whole))


def embedding_bag(node: Node) -> ShardingRule:
    """``w[v!, d], ... -> y[b!, d]`` and what the bags are, which every rank has; d may be cut."""
    weight = node.operands[0].shape
    base = replicated(node)
    sizes = {**base.sizes, "d": weight[1]}
    (first, *rest), results = base.operands, list(base.results)
    for i, value in enumerate(node.results):
        if value is not None and value.type.ndim == 2 and value.shape[1] == weight[1]:
            results[i] = (results[i][0], ("d",))  # type: ignore[index]
    whole = frozenset(base.sizes)
    return ShardingRule(((first[0], ("d",)), *rest), tuple(results), sizes, whole, reduce="same")


def embedding_bag_backward(node: Node) -> ShardingRule:
    """The gradient of the table, by what bag each index is in: the indices may be cut, as counts and maxima may not."""
    d = node.operands[0].shape[1]
    base = replicated(node)
    bags: tuple[Dim, ...] = (("b",), ("d",))
    index: tuple[Dim, ...] = (("i",),)
    operands = [bags, index, base.operands[2], index, *base.operands[4:]]
    if node.operands[5].shape == node.operands[0].shape:
        operands[5] = bags
    if len(operands) > 6:
        operands[6] = index
    sizes = {**base.sizes, "b": node.operands[0].shape[0], "d": d, "i": node.operands[1].type.numel}
    summed = argument(node, "mode") in (0, 1) and not argument(node, "scale_grad_by_freq")
    whole = frozenset({*base.sizes, "b"} if summed else {*base.sizes, "b", "i"})
    linear = FIRST if len(operands) < 7 else (frozenset({0}), frozenset({6}))
    return ShardingRule(tuple(operands), ((base.results[0][0], ("d",)),), sizes, whole, linear)  # type: ignore[index]


def broadcast_in_dim(node: Node) -> ShardingRule:
    """Operand dim i becomes result dim ``dims[i]``."""
    out = node.outs[0].shape
    result, sizes = names(out)
    at = node.args[2]
    x = node.operands[0].shape
    operand = tuple(() if s == 1 and out[d] != 1 else result[d] for d, s in zip(at, x, strict=True))
    return ShardingRule((operand,), (tuple(result),), sizes, linear=FIRST, moves_only=True)


def renorm(node: Node) -> ShardingRule:
    """Slices along one dim are scaled, each by its own norm."""
    x = node.operands[0].shape
    dim = int(argument(node, "dim")) % len(x)
    dims, sizes = names(x)
    return ShardingRule((tuple(dims),), (tuple(dims),), sizes, frozenset(sizes) - {f"d{dim}"})


def strided(node: Node) -> ShardingRule:
    """``as_strided`` of all elements in their order is a view; else nothing is cut."""
    size, stride, offset = (argument(node, name) for name in ("size", "stride", "storage_offset"))
    in_order = list(itertools.accumulate([1, *size[:0:-1]], lambda a, b: a * b))[::-1]
    plain = all(s == 1 or a == b for s, a, b in zip(size, stride, in_order, strict=True)) and not offset
    if plain and math.prod(size) == node.operands[0].type.numel:
        return view(node)
    return as_given(node)


def strided_local(emit: Emit) -> Any:
    return emit.call(aten.reshape.default, emit.args[0], list(emit.result_shape(0)))


def chunk_cat(node: Node) -> ShardingRule:
    """Tensors are padded and cut into chunks from one dim on; the dims before it pass."""
    base = replicated(node)
    lead = int(argument(node, "dim")) % node.operands[0].type.ndim
    dims, sizes = names(node.operands[0].shape[:lead])
    operands = tuple((*dims, *own[lead:]) for own in base.operands)
    results = tuple((*dims, *own[lead:]) for own in base.results if own is not None)
    together = (frozenset(range(len(operands))),)
    return ShardingRule(operands, results, {**base.sizes, **sizes}, base.whole, together)


def as_given(node: Node) -> ShardingRule:
    """Nothing is cut; a partial sum of all operands together passes (``block_diag``)."""
    base = replicated(node)
    together = (frozenset(range(len(node.operands))),)
    return ShardingRule(base.operands, base.results, base.sizes, base.whole, together)


RULES: tuple[RuleEntry, ...] = (
    rule((aten.diagonal, aten.diagonal_copy), diagonal),
    rule(aten.diagonal_backward, diagonal_backward, shape_arg=1),
    rule(aten.diag_embed, diag_embed),
    rule((aten.unfold, aten.unfold_copy), unfold),
    rule(aten.unfold_backward, unfold, shape_arg=1),
    rule(aten.repeat, repeat, local=repeat_local),
    rule(aten.rot90, rot90),
    rule(aten.narrow_copy, narrow_copy),
    rule(aten.view_as_real, "n.. -> n.. e!", linear="0", moves_only=True),
    rule(aten.view_as_complex, "n.. e! -> n..", linear="0"),
    rule((aten.isin.Tensor_Tensor, aten.bucketize.Tensor), lookup),
    rule(aten.searchsorted.Tensor, searchsorted),
    rule(aten.histc, histc),
    rule((aten._embedding_bag, aten._embedding_bag_forward_only), embedding_bag),
    rule(aten._embedding_bag_per_sample_weights_backward, "b! d, v! d, i, o!, i -> i", linear="0|1"),
    rule(aten._embedding_bag_backward, embedding_bag_backward),
    rule(aten.renorm, renorm),
    rule(torch.ops.prims.broadcast_in_dim, broadcast_in_dim, shape_arg=1),
    rule((aten.as_strided, aten.as_strided_copy), strided, local=strided_local),
    rule(aten._chunk_cat, chunk_cat),
    rule(aten.block_diag, as_given),
)
