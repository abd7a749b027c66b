"""Convolution. Batch and channels may be cut; height and width where windows do not overlap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardfx.ir.graph import Node
from shardfx.ir.rules.book import RuleEntry, rule
from shardfx.ir.rules.local import Emit
from shardfx.ir.rules.sharding_rule import Dim, ShardingRule

from .pool import side_by_side, spread

aten = torch.ops.aten


def _conv_dims(x: tuple[int, ...], w: tuple[int, ...], y: tuple[int, ...], options: Sequence[Any]) -> Any:
    """Input, weight, bias and output dims in factors: n, g groups, ci and co channels within a group.

    Height and width are whole, but where windows stand side by side (a kernel of one, the patches of a vision
    transformer): then ``h`` is ``(p s!)``, and p may be cut.
    """
    stride, padding, dilation, transposed, _, groups = options
    space = len(x) - 2
    sizes = {"n": x[0], "g": groups, **{f"k{i}": s for i, s in enumerate(w[2:])}}
    whole = {f"k{i}" for i in range(space)}
    wide: list[Dim] = []
    narrow: list[Dim] = []
    stride, padding, dilation = (spread(each, space, ()) for each in (stride, padding, dilation))
    for i, (a, b) in enumerate(zip(*((y[2:], x[2:]) if transposed else (x[2:], y[2:])), strict=True)):
        if side_by_side(a, b, w[2 + i], stride[i], padding[i], dilation[i]):
            sizes.update({f"p{i}": b, f"s{i}": stride[i]})
            whole.add(f"s{i}")
            wide.append((f"p{i}", f"s{i}") if stride[i] > 1 else (f"p{i}",))
        else:
            sizes.update({f"h{i}": a, f"p{i}": b})
            whole |= {f"h{i}", f"p{i}"}
            wide.append((f"h{i}",))
        narrow.append((f"p{i}",))
    if transposed:
        sizes["ci"], sizes["co"] = w[0] // groups, w[1]
        channels: tuple[Dim, Dim] = (("g", "ci"), ("co",))
    else:
        sizes["co"], sizes["ci"] = w[0] // groups, w[1]
        channels = (("g", "co"), ("ci",))
    if groups == 1:
        sizes.pop("g")
        channels = tuple(tuple(f for f in c if f != "g") for c in channels)  # type: ignore[assignment]
    lead: Dim = ("g",) if groups > 1 else ()
    if groups > 1:
        whole |= {"ci"}
    kernel = tuple((f"k{i}",) for i in range(space))
    x_space, y_space = (narrow, wide) if transposed else (wide, narrow)
    x_dims = (("n",), (*lead, "ci"), *x_space)
    y_dims = (("n",), (*lead, "co"), *y_space)
    return sizes, whole, x_dims, (*channels, *kernel), ((*lead, "co"),), y_dims


def convolution(node: Node) -> ShardingRule:
    """``x[n (g ci) h!..], w[(g co) ci k!..], b[(g co)] -> y[n (g co) p!..]``: with a bias inside, ci is whole."""
    x, w = node.operands[0].shape, node.operands[1].shape
    sizes, whole, x_dims, w_dims, b_dims, y_dims = _conv_dims(x, w, node.outs[0].shape, node.args[3:9])
    operands = [x_dims, w_dims]
    linear = [frozenset({0}), frozenset({1})]
    if len(node.operands) > 2:
        operands.append(b_dims)
        whole.add("ci")
        linear = [frozenset({0, 2}), frozenset({1, 2})]
    return ShardingRule(tuple(operands), (y_dims,), sizes, frozenset(whole), tuple(linear))


def convolution_local(emit: Emit) -> Any:
    args = list(emit.args)
    args[8] = _local_groups(emit.node.args[8], emit.node.operands[0].shape[1], emit.operand_shape(0)[1])
    return emit.call(emit.node.op, *args)


def _local_groups(groups: int, channels: int, local: int) -> int:
    return max(groups * local // channels, 1) if groups > 1 else groups


def convolution_backward(node: Node) -> ShardingRule:
    """The gradient of x is a sum over co, that of w a sum over n, that of the bias does not know ci.

    The one is linear in w, the other in x; with that of the bias none is linear in them.
    """
    y, x, w = (v.shape for v in node.operands[:3])
    sizes, whole, x_dims, w_dims, b_dims, y_dims = _conv_dims(x, w, y, node.args[4:10])
    if len(node.results) > 2 and node.results[2] is not None:
        whole.add("ci")
    results = [x_dims, w_dims, b_dims]
    kept = tuple(r if v is not None else None for r, v in zip(results, node.results, strict=False))
    linear = [frozenset({0})]
    if not any(v is not None for v in node.results[2:]):
        linear.append(frozenset(i for i, v in ((2, node.results[0]), (1, node.results[1])) if v is not None))
    return ShardingRule((y_dims, x_dims, w_dims), kept, sizes, frozenset(whole), tuple(linear))


def convolution_backward_local(emit: Emit) -> Any:
    args = list(emit.args)
    args[9] = _local_groups(emit.node.args[9], emit.node.operands[1].shape[1], emit.operand_shape(1)[1])
    if args[3] is not None:
        args[3] = [emit.operand_shape(0)[1]]
    return emit.call(emit.node.op, *args)


def expand_convolution(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> torch.Tensor:
    y: torch.Tensor = torch.ops.aten.convolution(
        x, w, None, stride, padding, dilation, transposed, output_padding, groups
    )
    return y if bias is None else y + bias.view([1, -1, *[1] * (x.dim() - 2)])


def expand_convolution_backward(
    grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias_sizes: list[int] | None, *args: Any
) -> tuple[torch.Tensor | None, ...]:
    mask = list(args[-1])
    gx, gw, _ = torch.ops.aten.convolution_backward(grad, x, w, None, *args[:-1], [mask[0], mask[1], False])
    gb = torch.sum(grad, [d for d in range(grad.dim()) if d != 1]) if mask[2] else None
    return gx, gw, gb


RULES: tuple[RuleEntry, ...] = (
    rule(aten.convolution.default, convolution, local=convolution_local, expand=expand_convolution),
    rule(
        aten.convolution_backward.default,
        convolution_backward,
        local=convolution_backward_local,
        expand=expand_convolution_backward,
    ),
)
