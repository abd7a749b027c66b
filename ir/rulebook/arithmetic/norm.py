"""Normalisations. The normalised dims are whole; where a cut of them is wanted the op is taken apart."""

from __future__ import annotations

from typing import Any

import torch

from shardfx.ir.graph import Node
from shardfx.ir.rulebook.dims import argument
from shardfx.ir.rules.book import Contiguous, RuleEntry, rule
from shardfx.ir.rules.local import Emit
from shardfx.ir.rules.sharding_rule import SAME, Dim, ShardingRule

aten = torch.ops.aten


def layer_norm(node: Node) -> ShardingRule:
    """``x[n.. d!], w[d!], b[d!] -> y[n.. d!], mean[n.. 1], rstd[n.. 1]``"""
    shape = node.operands[0].shape
    inner = len(node.args[1])
    names, sizes = _names(shape)
    lead, tail = names[: len(shape) - inner], names[len(shape) - inner :]
    stats = (*lead, *((),) * inner)
    operands = [tuple(names), *[tuple(tail)] * (len(node.operands) - 1)]
    results: list[tuple[Dim, ...] | None] = [tuple(names), stats, stats]
    return ShardingRule(tuple(operands), tuple(results[: len(node.results)]), sizes, frozenset(n[0] for n in tail))


def layer_norm_backward(node: Node) -> ShardingRule:
    """The gradients of weight and bias are sums over ``n..``: partial where that is cut."""
    shape = node.operands[0].shape
    inner = len(node.args[2])
    names, sizes = _names(shape)
    lead, tail = names[: len(shape) - inner], names[len(shape) - inner :]
    stats = (*lead, *((),) * inner)
    fused = node.op.overloadpacket is not aten.native_layer_norm_backward
    count = 1 if fused else 2
    operands = [tuple(names), tuple(names), *[stats] * count]
    operands += [tuple(tail)] * (len(node.operands) - len(operands))
    results: list[tuple[Dim, ...] | None] = [tuple(names), tuple(tail), tuple(tail)]
    kept = tuple(r if v is not None else None for r, v in zip(results, node.results, strict=False))
    return ShardingRule(tuple(operands), kept, sizes, frozenset(n[0] for n in tail), linear=(frozenset({0}),))


def _names(shape: tuple[int, ...]) -> tuple[list[Dim], dict[str, int]]:
    return [(f"d{i}",) for i in range(len(shape))], {f"d{i}": s for i, s in enumerate(shape)}


def group_norm(node: Node) -> ShardingRule:
    """``x[n (g c!) s!..], w[(g c!)], b -> y, mean[n g], rstd[n g]``"""
    shape = node.operands[0].shape
    groups = node.args[6]
    names, sizes = _names(shape)
    sizes.update(g=groups, c=shape[1] // groups)
    names[1] = ("g", "c")
    operands = [tuple(names)] + [(names[1],)] * (len(node.operands) - 1)
    stats = (names[0], ("g",))
    whole = frozenset({"c", *(n[0] for n in names[2:])})
    return ShardingRule(tuple(operands), (tuple(names), stats, stats), sizes, whole)


def group_norm_local(emit: Emit) -> Any:
    args = list(emit.args)
    shape, stats = emit.operand_shape(0), emit.result_shape(1)
    args[3], args[4], args[6] = shape[0], shape[1], stats[1]
    return emit.call(emit.node.op, *args)


def group_norm_backward(node: Node) -> ShardingRule:
    shape = node.operands[1].shape
    groups = node.args[8]
    names, sizes = _names(shape)
    sizes.update(g=groups, c=shape[1] // groups)
    names[1] = ("g", "c")
    stats = (names[0], ("g",))
    operands = [tuple(names), tuple(names), stats, stats] + [(names[1],)] * (len(node.operands) - 4)
    results = [tuple(names), (names[1],), (names[1],)]
    whole = frozenset({"c", *(n[0] for n in names[2:])})
    kept = tuple(r if v is not None else None for r, v in zip(results, node.results, strict=False))
    return ShardingRule(tuple(operands), kept, sizes, whole, linear=(frozenset({0}),))


def group_norm_backward_local(emit: Emit) -> Any:
    args = list(emit.args)
    shape, stats = emit.operand_shape(1), emit.operand_shape(2)
    args[5], args[6], args[8] = shape[0], shape[1], stats[1]
    return emit.call(emit.node.op, *args)


def batch_norm(node: Node) -> ShardingRule:
    """In training all of n and space is one statistic, and whole; by running statistics, which stay, it is pointwise.

    ``x[n! c s!..], w[c], b[c], mean[c], var[c] -> y, save_mean[c], save_rstd[c], new_mean[c], new_var[c]``
    """
    names, sizes = _names(node.operands[0].shape)
    operands = [tuple(names)] + [(names[1],)] * (len(node.operands) - 1)
    whole = frozenset(n[0] for i, n in enumerate(names) if i != 1) if _training(node) else frozenset()
    results: list[tuple[Dim, ...] | None] = [tuple(names)]
    for value in node.results[1:]:
        channels = value is not None and value.shape == (sizes["d1"],)
        results.append(None if value is None else (names[1],) if channels else ((),) * value.type.ndim)
    if any(v is not None and v.shape == (0,) for v in node.results):
        sizes["none"] = 0
        whole |= {"none"}
        results = [
            (("none",),) if v is not None and v.shape == (0,) else r for v, r in zip(node.results, results, strict=True)
        ]
    return ShardingRule(tuple(operands), tuple(results), sizes, whole, reduce=SAME)


def _training(node: Node) -> bool:
    return bool(argument(node, "training"))


def batch_norm_backward(node: Node) -> ShardingRule:
    """``grad, x -> gx[n c s..], gw[c], gb[c]``; in training gx needs the sums over n and space."""
    names, sizes = _names(node.operands[1].shape)
    sizes["none"] = 0
    full = tuple(names)
    operands = (full, full, *((names[1],) if v.shape == (sizes["d1"],) else (("none",),) for v in node.operands[2:]))
    results: list[tuple[Dim, ...]] = [full, (names[1],), (names[1],)]
    training = bool(node.args[7])
    whole = frozenset({"none", *(n[0] for i, n in enumerate(names) if i != 1 and training)})
    kept = tuple(r if v is not None else None for r, v in zip(results, node.results, strict=False))
    return ShardingRule(operands, kept, sizes, whole, linear=(frozenset({0}),))


def _shape_of_channels(x: torch.Tensor) -> list[int]:
    return [1, x.shape[1], *[1] * (x.dim() - 2)]


def expand_batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """Batch normalisation over the whole batch in two passes: mean, then centred squares; sums that may be partial."""
    dims = [d for d in range(x.dim()) if d != 1]
    count = x.numel() // x.shape[1]
    shape = _shape_of_channels(x)
    mean = torch.sum(x, dims) / count
    centred = x - mean.view(shape)
    var = torch.sum(centred * centred, dims) / count
    rstd = torch.rsqrt(var + eps)
    y = centred * rstd.view(shape)
    if weight is not None:
        y = y * weight.view(shape)
    if bias is not None:
        y = y + bias.view(shape)
    results = [y, mean, rstd]
    if running_mean is not None and running_var is not None:
        results.append(running_mean * (1 - momentum) + mean * momentum)
        results.append(running_var * (1 - momentum) + var * (momentum * count / max(count - 1, 1)))
    return tuple(results)


def expand_batch_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    save_mean: torch.Tensor,
    save_rstd: torch.Tensor,
    train: bool,
    eps: float,
    mask: list[bool],
) -> tuple[torch.Tensor | None, ...]:
    dims = [d for d in range(x.dim()) if d != 1]
    count = x.numel() // x.shape[1]
    shape = _shape_of_channels(x)
    rstd = save_rstd.view(shape)
    normal = (x - save_mean.view(shape)) * rstd
    sum_grad = torch.sum(grad, dims)
    sum_dot = torch.sum(grad * normal, dims)
    scale = rstd if weight is None else rstd * weight.view(shape)
    gx = (grad - sum_grad.view(shape) / count - normal * (sum_dot.view(shape) / count)) * scale
    return gx, sum_dot if mask[1] else None, sum_grad if mask[2] else None


RULES: tuple[RuleEntry, ...] = (
    rule(aten.native_layer_norm.default, layer_norm, expand=True),
    rule(
        aten.native_layer_norm_backward.default,
        layer_norm_backward,
        expand=True,
        contiguous=Contiguous.ALL,
    ),
    rule(aten.native_group_norm.default, group_norm, local=group_norm_local, expand=True, contiguous=Contiguous.ALL),
    rule(
        aten.native_group_norm_backward.default,
        group_norm_backward,
        local=group_norm_backward_local,
        expand=True,
        contiguous=Contiguous.ALL,
    ),
    rule(
        aten._native_batch_norm_legit_functional.default,
        batch_norm,
        expand=expand_batch_norm,
        contiguous=Contiguous.ALL,
    ),
    rule(
        (aten._native_batch_norm_legit_no_training.default, aten.native_batch_norm.default),
        batch_norm,
        contiguous=Contiguous.ALL,
    ),
    rule(
        aten.native_batch_norm_backward.default,
        batch_norm_backward,
        expand=expand_batch_norm_backward,
        contiguous=Contiguous.ALL,
    ),
    rule(aten.batch_norm_backward.default, batch_norm_backward, contiguous=Contiguous.ALL),
)

if hasattr(aten, "_fused_rms_norm"):
    RULES += (
        rule(aten._fused_rms_norm.default, layer_norm, expand=True),
        rule(aten._fused_rms_norm_backward.default, layer_norm_backward, expand=True),
    )
