"""Reductions, softmax and scans. Sharding a reduced dim leaves a partial sum (or max, min, product)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from shardfx.ir.graph import Node
from shardfx.ir.rulebook.dims import argument, packed
from shardfx.ir.rules.book import RuleEntry, rule
from shardfx.ir.rules.local import Emit
from shardfx.ir.rules.template import Template, template

prims = torch.ops.prims
aten = torch.ops.aten
NARROW = (torch.bfloat16, torch.float16)


def _mean(x: torch.Tensor, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A mean as a sum and a quotient, accumulated in float32 as kernels do: a 16-bit sum may overflow."""
    dims = list(range(x.dim())) if not dim and dim != 0 else [dim] if isinstance(dim, int) else list(dim)
    made = x.dtype if dtype is None else dtype
    summed = torch.sum(x, dims, keepdim, dtype=torch.float32 if made in NARROW else made)
    return (summed / math.prod(x.shape[d] for d in dims)).to(made)


def _first(function: Callable[..., tuple[torch.Tensor, ...]]) -> Callable[..., torch.Tensor]:
    """A decomposition that returns the first result alone."""
    return lambda *args, **kwargs: function(*args, **kwargs)[0]


def _var_mean(
    x: torch.Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.float() if x.dtype in NARROW else x
    var, mean = _two_passes(wide, dim, correction, keepdim)
    return (var.to(x.dtype), mean.to(x.dtype)) if wide is not x else (var, mean)


def _std_mean(
    x: torch.Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Standard deviation and mean in float64, as squares of numbers within the dtype's range may overflow it."""
    wide = x if x.dtype == torch.float64 else x.to(torch.complex128 if x.is_complex() else torch.float64)
    var, mean = _two_passes(wide, dim, correction, keepdim)
    std = torch.sqrt(var)
    return (std.to(x.real.dtype if x.is_complex() else x.dtype), mean.to(x.dtype)) if wide is not x else (std, mean)


def _two_passes(
    x: torch.Tensor, dim: Any, correction: float | None, keepdim: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean, then the sum of centred squares: both sums may be partial. Kernels take one pass, and give NaN for the
    mean of infinite numbers."""
    dims = list(range(x.dim())) if not dim else list(dim)
    count = math.prod(x.shape[d] for d in dims)
    mean = torch.sum(x, dims, True) / count
    centred = x - mean
    squares = torch.view_as_real(centred).square().sum(-1) if x.is_complex() else centred * centred
    degrees = max(count - (1 if correction is None else correction), 0)
    var = torch.sum(squares, dims, keepdim) / degrees
    mean = mean if keepdim else mean.reshape(var.shape)
    return var, torch.where(torch.isnan(var), var, mean) if degrees and not x.is_complex() else mean


def mean_share(emit: Emit) -> Any:
    """A rank's term of a mean: its local mean weighted by its share of the elements."""
    made = emit.call(emit.node.op, *emit.args, **emit.kwargs)
    x, dim = emit.node.operands[0], argument(emit.node, "dim") if emit.node.op is aten.mean.dim else None
    dims = range(x.type.ndim) if not dim else [d % x.type.ndim for d in dim]
    local, full = (math.prod(shape[d] for d in dims) for shape in (emit.operand_shape(0), x.shape))
    return made if local == full else emit.call(aten.mul.Tensor, made, local / full)


def resized(node: Node) -> str:
    """The template by whether the op changes the sizes."""
    return ALONG if node.outs[0].shape == node.operands[0].shape else RESIZED


def vector_norm(node: Node) -> Template:
    """In the norms 0 and 1 a sum, in those of infinite order a maximum or a minimum; in others replicated."""
    kind = {0: "sum", 1: "sum", math.inf: "max", -math.inf: "min"}.get(argument(node, "ord"))
    return template(DOWN_WHOLE) if kind is None else template(DOWN, reduce=kind)


DOWN = "d.. k@dim -> d.. 1@dim, ..."
"""A reduction over the dims that an argument names, or over all; ``keepdim`` leaves dims of size one."""
DOWN_WHOLE = "d.. k@dim! -> d.. 1@dim, ..."
"""A reduction whose reduced dims must be replicated."""
ALONG = "d.. k@dim!, ... -> d.. k@dim, ..."
"""An op along the dims that an argument names, which are replicated; other dims are batch dims."""
RESIZED = "d.. k@dim! -> d.. o@dim!, ..."
"""An op along replicated dims that changes their sizes."""

RULES: tuple[RuleEntry, ...] = (
    rule((aten.sum.dim_IntList, aten.sum.default), DOWN, linear="0", identity="k"),
    rule(prims.sum, "d.. k@dims -> d..", linear="0", identity="k"),
    rule((aten.nansum, aten.count_nonzero), DOWN),
    rule(aten.any, DOWN, reduce="max"),
    rule(aten.all, DOWN, reduce="min"),
    rule((aten.amax, aten.max.default), DOWN, reduce="max", identity="k"),
    rule((aten.amin, aten.min.default), DOWN, reduce="min", identity="k"),
    rule(aten.aminmax, DOWN, reduce="min, max"),
    rule((aten.prod.default, aten.prod.dim_int), DOWN, reduce="product", identity="k"),
    rule((aten.argmax, aten.argmin, aten.norm, aten.hash_tensor), DOWN_WHOLE),
    rule((aten.max.dim, aten.min.dim, aten.median, aten.nanmedian, aten.kthvalue, aten.mode), DOWN_WHOLE, identity="k"),
    rule((aten.mean.dim, aten.mean.default), DOWN_WHOLE, linear="0|*k", identity="k", expand=_mean, local=mean_share),
    rule(aten.linalg_vector_norm, vector_norm),
    rule(aten.logsumexp, DOWN_WHOLE, identity="k"),
    rule(aten.var.correction, DOWN_WHOLE, expand=_first(_var_mean)),
    rule(aten.var_mean.correction, DOWN_WHOLE, expand=_var_mean),
    rule(aten.std.correction, DOWN_WHOLE, expand=_first(_std_mean)),
    rule(aten.std_mean.correction, DOWN_WHOLE, expand=_std_mean),
    rule(prims.var, "d.. k@dims! -> d.."),
    rule(aten.cumsum, ALONG, linear="0", identity="k"),
    rule((aten.cumprod, aten.cummax, aten.cummin, aten.logcumsumexp, aten.sort), ALONG, identity="k"),
    packed(
        aten._segment_reduce_backward,
        "b*axis q! d.., b*axis q! d.., b*axis n! d.., b*axis s!, b*axis s! -> b*axis n! d..",
        linear="0",
    ),
    rule(aten.topk, RESIZED, identity="k"),
    rule((aten._fft_r2c, aten._fft_c2r), resized, linear="0"),
    rule(aten._fft_c2c, ALONG, linear="0"),
    rule((aten._softmax.default, aten._log_softmax.default, aten._safe_softmax.default), ALONG, expand=True),
    rule(
        (aten._log_softmax_backward_data.default, aten._softmax_backward_data.default), ALONG, linear="0", expand=True
    ),
)
