"""Pooling, and other ops on images, whose last dims are spatial.

Where windows are adjacent blocks, ``h`` is ``(p a)`` of the input, and ``p`` may be sharded. Where they overlap, a
rank's tile includes the halo that its windows read. Otherwise spatial dims are replicated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shardfx.ir.graph import Node
from shardfx.ir.ops.computing.tiles import max_pool_tile, max_pool_tile_backward
from shardfx.ir.rulebook.dims import argument, ops
from shardfx.ir.rules.book import Contiguous, RuleEntry, rule
from shardfx.ir.rules.local import Emit
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.rules.windows import RowRange, fitted

from .spatial_dims import Slide, Tile, ends, slides, spatial, tiles

aten = torch.ops.aten

X, Y = "n.. h*#!", "n.. p*#!"


def largest(node: Node) -> ShardingRule:
    """Max pooling: the maximum of each window, and its index."""
    return spatial(node, slides(node, *ends(node)), "n.. X -> n.. Y, n.. Y")


def largest_backward(node: Node) -> ShardingRule:
    """The gradient of max pooling: a row is a sum over the windows that read it, and linear in each."""
    return spatial(
        node, slides(node, *ends(node, back=True)), "n.. Y, n.. X, n.. Y -> n.. X", "0|1>", back=True, alone=True
    )


def largest_rows(emit: Emit, args: tuple[Any, ...], leaders: frozenset[str]) -> Any:
    """Max pooling of a rank's tile with halo; indices are those of the global image."""
    dims = slides(emit.node, *ends(emit.node))
    ranges = read_rows(emit, dims, *tiles(emit))
    dtype = emit.node.operands[0].type.dtype
    x = fitted(emit, args[0], ranges, -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min)
    options = (_each(dims, name) for name in ("kernel", "stride", "dilation"))
    return emit.call(max_pool_tile, x, *options, [each.first for each in ranges], _each(dims, "size"))


def largest_backward_rows(emit: Emit, args: tuple[Any, ...], leaders: frozenset[str]) -> Any:
    """A rank's rows of the gradient of max pooling, from the windows that read them, by their indices."""
    size = list(ends(emit.node, back=True)[0])
    return emit.call(max_pool_tile_backward, *args[:2], args[-1], tiles(emit)[1].at, size)


def averaged(node: Node) -> ShardingRule:
    """Average pooling, or its gradient, whose rows are sums over the windows that include them."""
    back = len(node.operands) > 1
    dims = slides(node, *ends(node, back), blockwise=True)
    return spatial(
        node, dims, "n.. Y, n.. X -> n.. X" if back else "n.. X -> n.. Y", "0|1>" if back else "0", back=back
    )


def averaged_rows(emit: Emit, args: tuple[Any, ...], leaders: frozenset[str]) -> Any:
    """Average pooling of a rank's tile with halo, or a rank's rows of its gradient: sums without padding, divided at
    the border by the number of rows that the window has in the full image."""
    node, (tile, made), back = emit.node, tiles(emit), len(emit.node.operands) > 1
    dims, lead = slides(node, *ends(node, back)), node.operands[0].type.ndim - len(tile.at)
    ranges = read_rows(emit, dims, made, tile) if back else read_rows(emit, dims, tile, made)
    divisor, windows = argument(node, "divisor_override"), (_each(dims, "kernel"), _each(dims, "stride"))
    options = (*windows, [0] * len(dims), False, True)
    counts = _counts(emit, dims, ranges, options) if divisor is None else None
    if not back:
        y = emit.call(node.op, fitted(emit, args[0], ranges), *options, divisor or 1)
        return y if counts is None else emit.call(aten.div.Tensor, y, counts)
    grad = args[0] if counts is None else emit.call(aten.div.Tensor, args[0], counts)
    shape = [*emit.operand_shape(0)[:lead], *(each.last - each.first for each in ranges)]
    like = emit.call(aten.new_empty.default, args[1], shape)
    x = emit.call(node.op, grad, like, *options, divisor or 1)
    return fitted(emit, x, [each.reverse for each in ranges])


def _counts(emit: Emit, dims: Sequence[Slide], ranges: Sequence[RowRange], options: tuple[Any, ...]) -> Any:
    """The number of rows of each window within the image, and within counted padding: a sum over ones"""
    more = argument(emit.node, "count_include_pad")
    pads = [each.padding * more for each in dims]
    inside = [
        RowRange(each.dim, max(-pad, each.first), min(dim.size + pad, each.last), each.first, each.last)
        for each, dim, pad in zip(ranges, dims, pads, strict=True)
    ]
    shape = [1] * inside[0].dim + [each.end - each.start for each in inside]
    ones = fitted(emit, emit.call(aten.new_ones.default, emit.args[0], shape), inside)
    op = aten.avg_pool2d.default if len(dims) == 2 else aten.avg_pool3d.default
    return emit.call(op, ones, *options, 1)


def _each(dims: Sequence[Slide], name: str) -> list[int]:
    return [getattr(each, name) for each in dims]


def read_rows(emit: Emit, dims: Sequence[Slide], stored: Tile, places: Tile) -> list[RowRange]:
    """The rows of the image that a rank's windows read, beside the rows that it has."""
    lead = emit.node.operands[0].type.ndim - len(dims)
    pairs = zip(dims, zip(*stored, strict=True), zip(*places, strict=True), strict=True)
    return [each.read(lead + i, *bounds) for i, (each, *bounds) in enumerate(pairs)]


def both(names: str, form: Any, **options: Any) -> Iterator[RuleEntry]:
    """The rules of the 2d and 3d version of an op: ``#`` in names, form and options stands for the number of dims."""
    for space in "23":
        yield rule(
            ops(names.replace("#", space)), form.replace("#", space) if isinstance(form, str) else form, **options
        )


RULES: tuple[RuleEntry, ...] = (
    *both("max_pool#d_with_indices", largest, rows=largest_rows),
    *both("max_pool#d_with_indices_backward", largest_backward, rows=largest_backward_rows, contiguous=Contiguous.ALL),
    *both("adaptive_max_pool#d", f"{X} -> {Y}, {Y}"),
    *both("adaptive_max_pool#d_backward", f"n.. p*#, {X}, n.. p*# -> {X}", linear="0|1>", contiguous=Contiguous.ALL),
    *both("max_unpool#d", f"{X}, {X} -> {Y}", linear="0"),
    *both("avg_pool#d avg_pool#d_backward", averaged, rows=averaged_rows),
    *both("grid_sampler_#d", "n c h*#!, n p*# e! -> n c p*#", linear="0"),
    *both("grid_sampler_#d_backward", "n c p*#, n c h*#!, n p*# e! -> n c h*#, n p*# e", linear="0|1>1"),
    rule(aten.pixel_shuffle, "n.. (c r! s!) h w -> n.. c (h r!) (w s!)", linear="0", moves_only=True),
    rule(aten.pixel_unshuffle, "n.. c (h r!) (w s!) -> n.. (c r! s!) h w", linear="0", moves_only=True),
    rule(aten.channel_shuffle, "n c! s.. -> n c! s..", linear="0", moves_only=True),
    # Each rank has the same part of both halves.
    rule(aten.glu, "d.. (two! k)@dim -> d.. k@dim"),
    rule(aten.glu_backward, "d.. k@dim, d.. (two! k)@dim -> d.. (two k)@dim", linear="0"),
)
