"""Pooling, resampling, padding and what else works on the last dims as a picture.

Those dims are whole, but where the picture falls into blocks of its own: windows that stand side by side, and
nearest neighbours. Then ``h`` is ``(g a)`` of the input and ``(g b)`` of the result, and ``g`` may be cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardfx.ir.graph import Node
from shardfx.ir.rulebook.dims import FIRST, argument, names
from shardfx.ir.rules.book import Contiguous, RuleEntry, rule
from shardfx.ir.rules.local import Emit
from shardfx.ir.rules.sharding_rule import ShardingRule

aten = torch.ops.aten

MakeRule = Callable[[Node], ShardingRule]

IN = {1: "n.. h!", 2: "n.. h! w!", 3: "n.. d! h! w!"}
OUT = {1: "n.. p!", 2: "n.. p! q!", 3: "n.. o! p! q!"}


def side_by_side(size: int, out: int, kernel: int, stride: int, padding: int, dilation: int = 1) -> bool:
    """Whether every window lies in its own block of ``stride`` elements, and the blocks are all there is."""
    return padding == 0 and dilation * (kernel - 1) + 1 <= stride and size == out * stride


def blocks(x: Sequence[int], y: Sequence[int], own: Sequence[bool], space: int) -> ShardingRule:
    """The rule of ``x -> y`` where the leading dims pass, and of the ``space`` last ones those that fall into
    blocks."""
    lead = len(x) - space
    dims, sizes = names(x[:lead], "n")
    left, right = list(dims), list(dims)
    whole = set()
    for i, (a, b, parted) in enumerate(zip(x[lead:], y[lead:], own, strict=True)):
        g = math.gcd(a, b) if parted else 1
        sizes.update({f"g{i}": g, f"a{i}": a // g, f"b{i}": b // g})
        whole |= {f"a{i}", f"b{i}"}
        left.append((f"g{i}", f"a{i}"))
        right.append((f"g{i}", f"b{i}"))
    return ShardingRule((tuple(left),), (tuple(right),), sizes, frozenset(whole), FIRST)


def turned(rule: ShardingRule, like: Sequence[int] | None = None) -> ShardingRule:
    """The rule of the gradient: of y, and (with ``like``) of x, whose values do not matter."""
    (x,), (y,) = rule.operands, rule.results
    assert y is not None
    operands = (y, x) if like is not None else (y,)
    return ShardingRule(operands, (x,), rule.sizes, rule.whole, FIRST)


def spread(given: Any, space: int, default: Sequence[int]) -> list[int]:
    """An argument such as a stride: one number for all dims, a list, or an empty list for the default."""
    found = list(given) if isinstance(given, (list, tuple)) else [given]
    return found * space if len(found) == 1 else found or list(default)


def avg_pool(space: int, backward: bool = False) -> MakeRule:
    """``n.. (g s!) -> n.. g`` where windows stand side by side."""

    def make(node: Node) -> ShardingRule:
        x = node.operands[1 if backward else 0].shape
        y = node.operands[0].shape if backward else node.outs[0].shape
        kernel = spread(argument(node, "kernel_size"), space, ())
        stride = spread(argument(node, "stride"), space, kernel)
        padding = spread(argument(node, "padding"), space, [0] * space)
        own = [side_by_side(*each) for each in zip(x[-space:], y[-space:], kernel, stride, padding, strict=True)]
        made = blocks(x, y, own, space)
        return turned(made, x) if backward else made

    make.__name__ = "avg_pool"
    return make


def adaptive_avg_pool(space: int, backward: bool = False) -> MakeRule:
    """The windows of each block of ``h / gcd(h, p)`` elements lie in it."""

    def make(node: Node) -> ShardingRule:
        x = node.operands[1 if backward else 0].shape
        y = node.operands[0].shape if backward else node.outs[0].shape
        made = blocks(x, y, [True] * space, space)
        return turned(made, x) if backward else made

    make.__name__ = "adaptive_avg_pool"
    return make


def nearest(space: int, backward: bool = False) -> MakeRule:
    """A nearest neighbour lies in the same block, if the scale is that of the sizes."""

    def make(node: Node) -> ShardingRule:
        x = node.outs[0].shape if backward else node.operands[0].shape
        y = node.operands[0].shape if backward else node.outs[0].shape
        scales = [
            argument(node, name) for name in (("scales",) if space == 1 else ("scales_d", "scales_h", "scales_w"))
        ]
        scales = scales[-space:]
        own = [s is None or a * s == b for a, b, s in zip(x[-space:], y[-space:], scales, strict=True)]
        made = blocks(x, y, own, space)
        return turned(made) if backward else made

    make.__name__ = "nearest"
    return make


def sized_local(space: int) -> Callable[[Emit], Any]:
    """The local call of an op whose second argument is the size of the picture that it makes."""

    def local(emit: Emit) -> Any:
        return emit.call(emit.node.op, emit.args[0], list(emit.result_shape(0)[-space:]), *emit.args[2:], **emit.kwargs)

    return local


def sized_backward_local(space: int) -> Callable[[Emit], Any]:
    """The same of its gradient: the size of the picture that was made, and the shape of what it was made of."""

    def local(emit: Emit) -> Any:
        made = list(emit.operand_shape(0)[-space:])
        return emit.call(emit.node.op, emit.args[0], made, list(emit.result_shape(0)), *emit.args[3:], **emit.kwargs)

    return local


def padded(node: Node) -> ShardingRule:
    """``x -> y`` or ``gy, x -> gx``: dims that are not padded pass."""
    x, out = node.operands[-1].shape, node.outs[0].shape
    given = argument(node, "pad", "padding")
    touched = {len(x) - 1 - i // 2 for i, amount in enumerate(given) if amount != 0}
    dims, sizes = names(x)
    other = list(dims)
    y = node.operands[0].shape if len(node.operands) > 1 else out
    for d in touched:
        sizes[f"o{d}"] = y[d]
        other[d] = (f"o{d}",)
    whole = frozenset({*(f"d{d}" for d in touched), *(f"o{d}" for d in touched)})
    if len(node.operands) > 1:
        return ShardingRule((tuple(other), tuple(dims)), (tuple(dims),), sizes, whole, FIRST)
    value = argument(node, "value")
    return ShardingRule((tuple(dims),), (tuple(other),), sizes, whole, FIRST if not value else ())


def halves(node: Node) -> ShardingRule:
    """``glu``: ``(two! n) -> n``, each rank holding the same part of both halves; and its gradient."""
    x = node.operands[-1].shape
    dim = int(argument(node, "dim")) % len(x)
    dims, sizes = names(x)
    sizes[f"d{dim}"] = x[dim] // 2
    sizes["two"] = 2
    both = (*dims[:dim], ("two", f"d{dim}"), *dims[dim + 1 :])
    if len(node.operands) > 1:
        return ShardingRule((tuple(dims), both), (both,), sizes, frozenset({"two"}), FIRST)
    return ShardingRule((both,), (tuple(dims),), sizes, frozenset({"two"}))


def _by_space(form: str, **options: Any) -> Callable[[int, Any], RuleEntry]:
    """A rule for ops of pictures of one, two or three dims: ``x`` and ``y`` in the form stand for theirs."""

    def make(space: int, ops: Any) -> RuleEntry:
        return rule(ops, form.replace("x", IN[space]).replace("y", OUT[space]), **options)

    return make


MAX = _by_space("x -> y, y")
MAX_BACKWARD = _by_space("y, x, y -> x", linear="0", contiguous=Contiguous.ALL)
RANDOM_MAX = _by_space("x, n.. e! -> y, y")
UNPOOL = _by_space("x, x -> y", linear="0")
RESIZE = _by_space("x -> y", linear="0")

RULES: tuple[RuleEntry, ...] = (
    MAX(2, (aten.max_pool2d_with_indices, aten.adaptive_max_pool2d)),
    MAX(3, (aten.max_pool3d_with_indices, aten.adaptive_max_pool3d)),
    MAX_BACKWARD(
        2,
        (
            aten.max_pool2d_with_indices_backward,
            aten.adaptive_max_pool2d_backward,
            aten.fractional_max_pool2d_backward,
        ),
    ),
    MAX_BACKWARD(
        3,
        (
            aten.max_pool3d_with_indices_backward,
            aten.adaptive_max_pool3d_backward,
            aten.fractional_max_pool3d_backward,
        ),
    ),
    RANDOM_MAX(2, aten.fractional_max_pool2d),
    RANDOM_MAX(3, aten.fractional_max_pool3d),
    UNPOOL(2, aten.max_unpool2d),
    UNPOOL(3, aten.max_unpool3d),
    rule(aten.avg_pool2d, avg_pool(2)),
    rule(aten.avg_pool3d, avg_pool(3)),
    rule(aten.avg_pool2d_backward, avg_pool(2, backward=True)),
    rule(aten.avg_pool3d_backward, avg_pool(3, backward=True)),
    rule(aten._adaptive_avg_pool2d, adaptive_avg_pool(2), local=sized_local(2)),
    rule(aten._adaptive_avg_pool3d, adaptive_avg_pool(3), local=sized_local(3)),
    rule(aten._adaptive_avg_pool2d_backward, adaptive_avg_pool(2, backward=True)),
    rule(aten._adaptive_avg_pool3d_backward, adaptive_avg_pool(3, backward=True)),
    *(
        rule(ops, nearest(space), local=sized_local(space))
        for space, ops in (
            (1, (aten.upsample_nearest1d.default, aten._upsample_nearest_exact1d.default)),
            (2, (aten.upsample_nearest2d.default, aten._upsample_nearest_exact2d.default)),
            (3, (aten.upsample_nearest3d.default, aten._upsample_nearest_exact3d.default)),
        )
    ),
    *(
        rule(ops, nearest(space, backward=True), local=sized_backward_local(space))
        for space, ops in (
            (1, (aten.upsample_nearest1d_backward.default, aten._upsample_nearest_exact1d_backward.default)),
            (2, (aten.upsample_nearest2d_backward.default, aten._upsample_nearest_exact2d_backward.default)),
            (3, (aten.upsample_nearest3d_backward.default, aten._upsample_nearest_exact3d_backward.default)),
        )
    ),
    RESIZE(1, aten.upsample_linear1d.default),
    RESIZE(
        2, (aten.upsample_bilinear2d.default, aten.upsample_bicubic2d.default, aten._upsample_bilinear2d_aa.default)
    ),
    RESIZE(3, aten.upsample_trilinear3d.default),
    rule(aten.upsample_linear1d_backward, "n.. p! -> n.. h!", linear="0", shape_arg=2),
    rule(
        (aten.upsample_bilinear2d_backward, aten.upsample_bicubic2d_backward, aten._upsample_bilinear2d_aa_backward),
        "n.. p! q! -> n.. h! w!",
        linear="0",
        shape_arg=2,
    ),
    rule(aten.upsample_trilinear3d_backward, "n.. o! p! q! -> n.. d! h! w!", linear="0", shape_arg=2),
    rule(
        (
            aten.constant_pad_nd,
            *(aten.reflection_pad1d, aten.reflection_pad2d, aten.reflection_pad3d),
            *(aten.reflection_pad1d_backward, aten.reflection_pad2d_backward, aten.reflection_pad3d_backward),
            *(aten.replication_pad1d, aten.replication_pad2d, aten.replication_pad3d),
            *(aten.replication_pad1d_backward, aten.replication_pad2d_backward, aten.replication_pad3d_backward),
        ),
        padded,
    ),
    rule(aten.grid_sampler_2d, "n c h! w!, n p q e! -> n c p q", linear="0"),
    rule(aten.grid_sampler_3d, "n c d! h! w!, n o p q e! -> n c o p q", linear="0"),
    rule(
        aten.grid_sampler_2d_backward,
        "n c p q, n c h! w!, n p q e! -> n c h! w!, n p q e!",
        linear="0",
    ),
    rule(
        aten.grid_sampler_3d_backward,
        "n c o p q, n c d! h! w!, n o p q e! -> n c d! h! w!, n o p q e!",
        linear="0",
    ),
    rule(aten.im2col, "n.. c h! w! -> n.. (c k!) l!", linear="0"),
    rule(aten.col2im, "n.. (c k!) l! -> n.. c h! w!", linear="0"),
    rule(aten.pixel_shuffle, "n.. (c r! s!) h w -> n.. c (h r!) (w s!)", linear="0", moves_only=True),
    rule(aten.pixel_unshuffle, "n.. c (h r!) (w s!) -> n.. (c r! s!) h w", linear="0", moves_only=True),
    rule(aten.channel_shuffle, "n c! s.. -> n c! s..", linear="0", moves_only=True),
    rule((aten.glu, aten.glu_backward), halves),
)
