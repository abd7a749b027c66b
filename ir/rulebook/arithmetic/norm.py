"""Normalizations: the normalized dims are replicated; if they are to be sharded, the op is decomposed."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardfx.ir.graph import Node, Value
from shardfx.ir.ops.computing.batch_statistics import (
    batch_moments,
    batch_norm_gradient,
    batch_norm_sums,
    joined_moments,
)
from shardfx.ir.rulebook.dims import argument, packed
from shardfx.ir.rules.book import Contiguous, RuleEntry, rule
from shardfx.ir.rules.local import Emit
from shardfx.ir.rules.sharding_rule import SAME
from shardfx.ir.rules.template import Template, template

aten = torch.ops.aten


Given = Tensor | None


def expand_batch_norm(
    x: Tensor,
    weight: Given,
    bias: Given,
    old_mean: Given,
    old_var: Given,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """Batch normalization over the global batch, which may be sharded: statistics are at least float32.

    The statistics are reduced first, and then passed to the kernel of evaluation. In evaluation the op itself can be
    sharded.
    """
    if not training:
        op = aten._native_batch_norm_legit_functional.default
        made: tuple[Tensor, ...] = op(x, weight, bias, old_mean, old_var, training, momentum, eps)
        return made
    count = x.numel() // x.shape[1]
    mean, var = joined_moments(batch_moments(x), count, torch.promote_types(x.dtype, torch.float32))
    y = aten._native_batch_norm_legit_no_training.default(x, weight, bias, mean, var, 0.0, eps)[0]
    results = [y, mean, torch.rsqrt(var + eps)]
    if old_mean is not None and old_var is not None:
        results.append(old_mean * (1 - momentum) + mean * momentum)
        results.append(old_var * (1 - momentum) + var * (momentum * count / max(count - 1, 1)))
    return tuple(results)


def expand_batch_norm_backward(
    grad: Tensor, x: Tensor, weight: Given, mean: Given, var: Given, save_mean: Tensor, save_rstd: Tensor, *options: Any
) -> tuple[Given, ...]:
    """The gradients, from two sums over the batch that may be partial; in evaluation the op itself."""
    train, _, (_, for_weight, for_bias) = options
    if not train:
        op = aten.native_batch_norm_backward.default
        made: tuple[Given, ...] = op(grad, x, weight, mean, var, save_mean, save_rstd, *options)
        return made
    dot, total = batch_norm_sums(grad, x, save_mean, save_rstd)
    count = x.numel() // x.shape[1]
    gx = batch_norm_gradient(grad, x, save_mean, save_rstd, dot, total, weight, count)
    return gx, dot if for_weight else None, total if for_bias else None


def norm_of_slices(node: Node) -> str:
    """The dims of tensors as large as the first, and of those with one number per slice along ``dim``."""
    sizes = node.operands[0].shape
    along = int(argument(node, "dim") or 0) % len(sizes)

    def dims(value: Value) -> str:
        all_ = value.shape == sizes
        return " ".join("k" if d == along else f"d{d}!" if all_ else "1" for d in range(len(sizes)))

    return f"{', '.join(map(dims, node.operands))} -> {', '.join(map(dims, node.outs))}"


def affine(form: str, node: Node, unread: tuple[int, ...] = (), reduce: str = "sum") -> Template:
    """Weight and bias may be partial together: the statistics do not depend on them. A bias alone is added once."""
    scaled = argument(node, "weight") is not None
    training = argument(node, "training") is not False
    linear = ["1&2>0"] * scaled + [f"{i}>" for i in unread if training]
    return template(form, "|".join(linear), reduce)


def batch_backward(form: str, node: Node) -> Template:
    """The gradient does not read the batch's statistics, or the running ones. Gradients of weight and bias are sums."""
    for_x, for_weight, _ = argument(node, "output_mask")
    if not argument(node, "train", "update"):
        return template(form, f"0|2>0|5>|6>|1&3>1{'' if for_x or for_weight else '|4>'}")
    alone = form if for_x else form.replace("!train", "").replace("!update", "")
    return template(alone, f"0|2>0|3>|4>{'' if for_x else '|6>1|1&5>1'}")


def rows_backward(form: str, node: Node, linear: str) -> Template:
    """The gradients of weight and bias alone are sums over elements, so no dim is replicated."""
    if argument(node, "output_mask")[0]:
        return template(form, linear)
    return template(form.replace("!", ""), f"{linear}|3>1|1&2>1")


def layer_norm_share(emit: Emit) -> Any:
    """The backward with the local sizes of the normalized dims, which may be sharded."""
    grad, x, dims, *rest = emit.args
    own = list(emit.operand_shape(1)[-len(dims) :])
    return emit.call(emit.node.op, grad, x, own, *rest)


def group_norm_share(emit: Emit) -> Any:
    """The backward with the local numbers of samples, channels, positions and groups."""
    (n, c, *places), groups = emit.operand_shape(1), emit.operand_shape(2)[1]
    return emit.call(emit.node.op, *emit.args[:5], n, c, math.prod(places), groups, emit.args[-1])


ROWS = "n.. d*normalized_shape!"
GROUPS = "n (g c!) s..!"
BATCH = "n!training c s..!training, c, ... -> n c s.., c, ..."
GROUPED = {"N": "n", "C": "(g c)", "group": "g"}

RULES: tuple[RuleEntry, ...] = (
    packed(batch_moments, "n c s.. -> m! c"),
    packed(joined_moments, "m! c -> c, c"),
    packed(batch_norm_sums, "n c s.., n c s.., c, c -> c, c", linear="0"),
    packed(batch_norm_gradient, "n c s.., n c s.., c, c, c, c, c -> n c s..", linear="0&4&5"),
    rule(
        aten.native_layer_norm.default, partial(affine, f"{ROWS}, d.., d.. -> n.. d.., n.. 1*d, n.. 1*d"), expand=True
    ),
    # The gradients of weight and bias are sums over n: partial where that is sharded.
    packed(
        aten.native_layer_norm_backward.default,
        partial(rows_backward, f"{ROWS}, n.. d.., n.. 1*d, n.. 1*d, d.., d.. -> n.. d.., d.., d..", linear="0|4>0|5>"),
        local=layer_norm_share,
        expand=True,
    ),
    packed(
        aten.native_group_norm.default,
        partial(affine, f"{GROUPS}, (g c), (g c) -> n (g c) s.., n g, n g"),
        sized=GROUPED,
        expand=True,
    ),
    packed(
        aten.native_group_norm_backward.default,
        partial(rows_backward, f"{GROUPS}, n (g c) s.., n g, n g, (g c) -> n (g c) s.., (g c), (g c)", linear="0|4>0"),
        local=group_norm_share,
        expand=True,
    ),
    # In training all of n and space is one statistic, and replicated; by running statistics it is pointwise.
    packed(
        aten._native_batch_norm_legit_functional.default,
        partial(affine, BATCH, reduce=SAME),
        expand=expand_batch_norm,
    ),
    packed(
        aten._native_batch_norm_legit.no_stats,
        partial(affine, "n! c s..!, c, ... -> n c s.., c, ...", reduce=SAME),
        expand=lambda x, weight, bias, _, *how: expand_batch_norm(x, weight, bias, None, None, True, *how),
    ),
    packed(aten.native_batch_norm.default, partial(affine, BATCH, unread=(3, 4), reduce=SAME)),
    packed(
        aten._native_batch_norm_legit_no_training.default,
        partial(affine, "n c s.., c, ... -> n c s.., c, ...", reduce=SAME),
    ),
    # In training the gradient of x needs the sums over n and space.
    packed(
        aten.native_batch_norm_backward.default,
        partial(batch_backward, "n!train c s..!train, n c s.., c, ... -> n c s.., c, c"),
        expand=expand_batch_norm_backward,
    ),
    packed(
        aten.batch_norm_backward.default,
        partial(batch_backward, "n!update c s..!update, n c s.., c, ... -> n c s.., c, c"),
    ),
    rule(aten._weight_norm_interface.default, norm_of_slices, linear="1>0", contiguous=Contiguous.ALL),
    rule(aten._weight_norm_interface_backward.default, norm_of_slices, linear="0", contiguous=Contiguous.ALL),
    rule(aten._fused_rms_norm.default, f"{ROWS}, d.. -> n.. d.., n.. 1*d", linear="1>0", expand=True),
    rule(
        aten._fused_rms_norm_backward.default,
        f"{ROWS}, n.. d.., n.. 1*d, d.. -> n.. d.., d..",
        linear="0|3>0",
        expand=True,
    ),
)
