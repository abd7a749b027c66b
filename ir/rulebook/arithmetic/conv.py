"""Convolution: batch, channels and space may be sharded; a rank's tile of a spatially sharded input includes the halo
that its windows read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardfx.ir.graph import Node
from shardfx.ir.rulebook.dims import argument
from shardfx.ir.rules.book import RuleEntry, rule
from shardfx.ir.rules.local import Emit
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.rules.template import Shape
from shardfx.ir.rules.windows import RowRange, fitted, grows

from .spatial_dims import Slide, SpatialDim, spatial, spread

aten = torch.ops.aten


def geometry(node: Node, x: Shape, w: Shape, y: Shape) -> list[Slide]:
    """The spatial dims of a convolution from x to y; in a transposed one y is the image that windows slide over."""
    large, small = (y, x) if argument(node, "transposed") else (x, y)
    options = (spread(argument(node, name), len(x) - 2) for name in ("stride", "padding", "dilation"))
    return [Slide(*each) for each in zip(large[2:], small[2:], w[2:], *options, strict=True)]


def forms(node: Node, space: int, *, bias: bool = False) -> tuple[str, str, str]:
    """The factors of input, weight and output: n, g groups, ci and co channels within a group, kernel and space: ``X``
    of the image, ``Y`` of the windows over it. With a fused ``bias``, or groups, ci is replicated."""
    ci = "ci!" if bias or argument(node, "groups") > 1 else "ci"
    transposed = argument(node, "transposed")
    channels = f"(g {ci}) co" if transposed else f"(g co) {ci}"
    wide, narrow = ("Y", "X") if transposed else ("X", "Y")
    return f"n (g ci) {wide}", f"{channels} k*{space}!", f"n (g co) {narrow}"


def convolution(node: Node) -> ShardingRule:
    """``x[n (g ci) h..], w[(g co) ci k!..], b[(g co)] -> y[n (g co) p..]``, h seen through windows of p, or p through h
    if transposed. A partial bias is added by each rank to its own partial sum over ci."""
    bias = len(node.operands) > 2
    space = geometry(node, node.operands[0].shape, node.operands[1].shape, node.outs[0].shape)
    x, w, y = forms(node, len(space), bias=bias)
    joined = "|2*ci" if bias and argument(node, "groups") == 1 else ""
    return spatial(node, space, f"{x}, {w}, (g co) -> {y}", f"0&2|1&2{joined}", back=argument(node, "transposed"))


def convolution_backward(node: Node) -> ShardingRule:
    """The gradient of x is a sum over co, that of w a sum over n, that of the bias is independent of ci.

    The first is linear in w, the second in x. The gradient of w alone is a sum over the windows, which may be sharded;
    if another gradient is wanted too, space is replicated. The gradient of a bias alone is a sum over all windows.
    """
    y, x, w = (value.shape for value in node.operands)
    slides, wanted = geometry(node, x, w, y), list(argument(node, "output_mask"))
    alone = wanted == [False, True, False]
    space = [each if alone or each.apart else SpatialDim(each.size, each.places) for each in slides]
    xs, ws, ys = forms(node, len(space))
    ys = f"n (g co) o*{len(space)}" if wanted == [False, False, True] else ys  # the one sum of the gradient
    return spatial(node, space, f"{ys}, {xs}, {ws} -> {xs}, {ws}, (g co)", "0|1>1|2>0", unread="ci>2")


def expand_convolution(x: Tensor, w: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    """A convolution with its bias added behind it: only the convolution is then a partial sum over sharded channels."""
    y: Tensor = aten.convolution(x, w, None, *options)
    return y if bias is None else y + bias.view([1, -1, *[1] * (x.dim() - 2)])


def expand_convolution_backward(
    grad: Tensor, x: Tensor, w: Tensor, bias_sizes: list[int] | None, *options: Any
) -> tuple[Tensor | None, ...]:
    """The gradients of a convolution as separate ops: that of x is a transposed convolution of the gradient (for a
    transposed one a plain one), that of the bias a sum over all dims but the channels."""
    stride, padding, dilation, transposed, _, groups, (for_x, for_w, for_bias) = options
    gx = gw = gb = None
    if for_x:
        space = x.dim() - 2
        per = [spread(each, space) for each in (stride, padding, dilation)]
        pairs = zip(x.shape[2:], grad.shape[2:], w.shape[2:], *per, strict=True)
        left = [large - ((small - 1) * s - 2 * p + d * (k - 1) + 1) for large, small, k, s, p, d in pairs]
        more = [0] * space if transposed else left
        gx = aten.convolution(grad, w, None, stride, padding, dilation, not transposed, more, groups)
        for dim in range(2, x.dim()):  # places of a transposed one's padding at the end, which x does not have
            gx = gx if gx.shape[dim] == x.shape[dim] else gx.narrow(dim, 0, x.shape[dim])
    if for_w:
        _, gw, _ = aten.convolution_backward(grad, x, w, None, *options[:-1], [False, True, False])
    if for_bias:
        gb = torch.sum(grad, [d for d in range(grad.dim()) if d != 1])
    return gx, gw, gb


def convolution_rows(emit: Emit, args: tuple[Any, ...], leaders: frozenset[str]) -> Any:
    """A convolution, padded at the global border; the output of a transposed one is cropped to the rank's rows."""
    x, w, bias, stride, padding, dilation, transposed, more, groups = args
    space, sharding, padding, more = _space(emit, leaders, padding, more)
    ranges = []
    for i in sharding:
        (start, length), (first, count) = emit.operand_bounds(0, 2 + i), emit.result_bounds(0, 2 + i)
        if transposed:  # what the kernel writes from the places that are there, of which some rows are wanted
            begin, end = start * space[i].stride - space[i].padding, (length - 1) * space[i].stride
            end += begin + space[i].dilation * (space[i].kernel - 1) + 1
            ranges.append(RowRange(2 + i, begin, end, first, first + count))
        else:
            ranges.append(space[i].read(2 + i, (start, length), (first, count)))
    if not transposed:
        x = fitted(emit, x, ranges)
        return emit.call(aten.convolution.default, x, w, bias, stride, padding, dilation, False, more, groups)
    apart = bias is not None and grows(ranges)
    inside = None if apart else bias
    y = emit.call(aten.convolution.default, x, w, inside, stride, padding, dilation, True, more, groups)
    y = fitted(emit, y, ranges)
    if not apart:
        return y
    return emit.call(aten.add.Tensor, y, emit.call(aten.reshape.default, bias, [-1, *[1] * len(space)]))


def convolution_backward_rows(emit: Emit, args: tuple[Any, ...], leaders: frozenset[str]) -> Any:
    """A rank's term of the gradient of w: of its own windows, and the rows that they read."""
    tensors, (bias_sizes, stride, padding, dilation, transposed, more, groups, wanted) = list(args[:3]), args[3:]
    space, sharding, padding, more = _space(emit, leaders, padding, more)
    large, small = (0, 1) if transposed else (1, 0)
    pairs = [(i, emit.operand_bounds(large, 2 + i), emit.operand_bounds(small, 2 + i)) for i in sharding]
    tensors[large] = fitted(emit, tensors[large], [space[i].read(2 + i, *each) for i, *each in pairs])
    rest = (bias_sizes, stride, padding, dilation, transposed, more, groups, wanted)
    return emit.call(aten.convolution_backward.default, *tensors, *rest)


def _space(
    emit: Emit, leaders: frozenset[str], padding: Any, more: Any
) -> tuple[list[Slide], list[int], list[int], list[int]]:
    """The spatial dims, the indices of the sharded ones, and both paddings, with 0 for these (:func:`fitted` pads
    them)."""
    node = emit.node
    y, x, w = (node.outs[0], *node.operands[:2]) if node.op is aten.convolution.default else node.operands
    space, sharding = geometry(node, x.shape, w.shape, y.shape), sorted(int(leader[1:]) for leader in leaders)
    both = [[0 if i in sharding else n for i, n in enumerate(spread(each, len(space)))] for each in (padding, more)]
    return space, sharding, both[0], both[1]


RULES: tuple[RuleEntry, ...] = (
    rule(aten.im2col, "n.. c h! w! -> n.. (c k!) l!", linear="0"),
    rule(aten.col2im, "n.. (c k!) l! -> n.. c h! w!", linear="0"),
    rule(
        aten.convolution.default, convolution, sized={"groups": "g"}, expand=expand_convolution, rows=convolution_rows
    ),
    rule(
        aten.convolution_backward.default,
        convolution_backward,
        sized={"groups": "g", "bias_sizes": "(g co)"},
        expand=expand_convolution_backward,
        rows=convolution_backward_rows,
    ),
)
