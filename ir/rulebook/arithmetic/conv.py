"""Convolution. Batch and channels may be cut; height and width where windows do not overlap."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardfx.ir.graph import Node
from shardfx.ir.rulebook.dims import argument
from shardfx.ir.rules.binding import Shape
from shardfx.ir.rules.book import RuleEntry, rule
from shardfx.ir.rules.template import Template, template

from .pool import side_by_side, spread

aten = torch.ops.aten


def forms(node: Node, x: Shape, w: Shape, y: Shape, *, bias: bool = False) -> tuple[str, str, str]:
    """The dims of input, weight and output: n, g groups, ci and co channels within a group, kernel and space.

    Height and width are whole, but where windows stand side by side (a kernel of one, the patches of a vision
    transformer): then ``h`` is ``(p s!)``, and p may be cut. With a ``bias`` inside, or groups, ci is whole.
    """
    transposed = argument(node, "transposed")
    space = len(x) - 2
    stride, padding, dilation = (spread(argument(node, name), space, ()) for name in ("stride", "padding", "dilation"))
    large, small = (y, x) if transposed else (x, y)
    wide, narrow = [], []
    for i, each in enumerate(zip(large[2:], small[2:], w[2:], stride, padding, dilation, strict=True)):
        apart = side_by_side(*each)
        wide.append(f"(p{i} s{i}!)" if apart else f"h{i}!")
        narrow.append(f"p{i}" if apart else f"p{i}!")
    if transposed:
        wide, narrow = narrow, wide
    ci = "ci!" if bias or argument(node, "groups") > 1 else "ci"
    channels = f"(g {ci}) co" if transposed else f"(g co) {ci}"
    return f"n (g ci) {' '.join(wide)}", f"{channels} k*{space}!", f"n (g co) {' '.join(narrow)}"


def convolution(node: Node) -> Template:
    """``x[n (g ci) h!..], w[(g co) ci k!..], b[(g co)] -> y[n (g co) p!..]``"""
    bias = len(node.operands) > 2
    x, w, y = forms(node, node.operands[0].shape, node.operands[1].shape, node.outs[0].shape, bias=bias)
    return template(f"{x}, {w}, (g co) -> {y}", "0&2|1&2")


def convolution_backward(node: Node) -> Template:
    """The gradient of x is a sum over co, that of w a sum over n, that of the bias does not know ci.

    The one is linear in w, the other in x.
    """
    y, x, w = (value.shape for value in node.operands)
    xs, ws, ys = forms(node, x, w, y)
    return template(f"{ys}, {xs}, {ws} -> {xs}, {ws}, (g co)", "0|1>1|2>0", unread="ci>2")


def expand_convolution(x: Tensor, w: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    """A convolution and the bias behind it: a cut of the summed channels is then in the way of the sum alone."""
    y: Tensor = aten.convolution(x, w, None, *options)
    return y if bias is None else y + bias.view([1, -1, *[1] * (x.dim() - 2)])


def expand_convolution_backward(
    grad: Tensor, x: Tensor, w: Tensor, bias_sizes: list[int] | None, *options: Any
) -> tuple[Tensor | None, ...]:
    """The gradients of a convolution, that of the bias as a sum over all dims but the channels."""
    *rest, (for_x, for_w, for_bias) = options
    gx, gw, _ = aten.convolution_backward(grad, x, w, None, *rest, [for_x, for_w, False])
    return gx, gw, torch.sum(grad, [d for d in range(grad.dim()) if d != 1]) if for_bias else None


RULES: tuple[RuleEntry, ...] = (
    rule(aten.convolution.default, convolution, sized={"groups": "g"}, expand=expand_convolution),
    rule(
        aten.convolution_backward.default,
        convolution_backward,
        sized={"groups": "g", "bias_sizes": "(g co)"},
        expand=expand_convolution_backward,
    ),
)
