"""Reductions, softmax and scans. A reduced dim that is cut leaves a partial sum (or max, min, product)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from shardfx.ir.graph import Node
from shardfx.ir.rules.book import RuleEntry, rule
from shardfx.ir.rules.sharding_rule import Dim, ShardingRule

prims = torch.ops.prims
aten = torch.ops.aten


def reduction(kind: str, *, linear: bool = False) -> Callable[[Node], ShardingRule]:
    """Reduce over the dims of the second argument (all, if there is none); ``keepdim`` leaves a dim of one."""

    def make(node: Node) -> ShardingRule:
        shape = node.operands[0].shape
        ndim = len(shape)
        given = dim_argument(node)
        if given is None or given == []:
            dims = set(range(ndim))
        else:
            dims = {d % max(ndim, 1) for d in (given if isinstance(given, (list, tuple)) else [given])}
        kept = node.outs[0].type.ndim == ndim
        names: list[Dim] = [(f"d{i}",) for i in range(ndim)]
        sizes = {f"d{i}": s for i, s in enumerate(shape)}
        result = [() if i in dims else names[i] for i in range(ndim) if kept or i not in dims]
        return ShardingRule(
            (tuple(names),),
            (tuple(result),) * len(node.results),
            sizes,
            linear=(frozenset({0}),) if linear else (),
            reduce=kind,
        )

    make.__name__ = f"reduce_{kind}"
    return make


def dim_argument(node: Node) -> Any:
    """The value of the argument that the op's schema calls ``dim``: None where it has none, or none is given."""
    for i, argument in enumerate(node.op._schema.arguments):
        if argument.name in ("dim", "dims"):
            return node.args[i] if i < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
    return None


def along(*, linear: tuple[frozenset[int], ...] = ()) -> Callable[[Node], ShardingRule]:
    """Ops that need one dim whole (softmax, cumsum, sort, argmax): the others pass."""

    def make(node: Node) -> ShardingRule:
        shape = node.operands[0].shape
        ndim = len(shape)
        dim = dim_argument(node)
        names: list[Dim] = [(f"d{i}",) for i in range(ndim)]
        sizes = {f"d{i}": s for i, s in enumerate(shape)}
        if dim is None or dim == []:
            results_of_all = tuple(((),) * v.type.ndim if v is not None else None for v in node.results)
            return ShardingRule((tuple(names),), results_of_all, sizes, frozenset(sizes), linear)
        whole = {f"d{d % ndim}" for d in (dim if isinstance(dim, (list, tuple)) else [dim])} if ndim else set()
        results: list[tuple[Dim, ...] | None] = []
        for value in node.results:
            if value is None:
                results.append(None)
            elif value.shape == shape:
                results.append(tuple(names))
            elif value.type.ndim == ndim:
                out: list[Dim] = []
                for i, size in enumerate(value.shape):
                    if f"d{i}" in whole:
                        sizes[f"k{i}"] = size
                        whole = whole | {f"k{i}"}
                        out.append((f"k{i}",))
                    else:
                        out.append(names[i])
                results.append(tuple(out))
            else:
                results.append(tuple(n for n in names if n[0] not in whole))
        return ShardingRule(tuple(tuple(names) for _ in node.operands), tuple(results), sizes, frozenset(whole), linear)

    make.__name__ = "along"
    return make


def _log_softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    shifted = x - torch.amax(x, [dim], keepdim=True)
    return shifted - torch.log(torch.sum(torch.exp(shifted), [dim], keepdim=True))


def _softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    e = torch.exp(x - torch.amax(x, [dim], keepdim=True))
    return e / torch.sum(e, [dim], keepdim=True)


def _log_softmax_backward(grad: torch.Tensor, out: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    return grad - torch.exp(out) * torch.sum(grad, [dim], keepdim=True)


def _softmax_backward(grad: torch.Tensor, out: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    return out * (grad - torch.sum(grad * out, [dim], keepdim=True))


def _mean(x: torch.Tensor, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> torch.Tensor:
    dims = list(range(x.dim())) if not dim and dim != 0 else [dim] if isinstance(dim, int) else list(dim)
    return torch.sum(x, dims, keepdim, dtype=dtype) / math.prod(x.shape[d] for d in dims)


def _mean_all(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _mean(x, dtype=dtype)


def _var(x: torch.Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> torch.Tensor:
    return _var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def _var_mean(
    x: torch.Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """In two passes: the mean, then the centred squares; both are sums, that may be partial."""
    dims = list(range(x.dim())) if not dim else list(dim)
    count = math.prod(x.shape[d] for d in dims)
    mean = torch.sum(x, dims, True) / count
    centred = x - mean
    var = torch.sum(centred * centred, dims, keepdim) / max(count - (1 if correction is None else correction), 0)
    return var, mean if keepdim else mean.reshape(var.shape)


KEEP = along()
KEEP_LINEAR = along(linear=(frozenset({0}),))

RULES: tuple[RuleEntry, ...] = (
    rule((aten.sum.dim_IntList, aten.sum.default, prims.sum), reduction("sum", linear=True)),
    rule((aten.nansum, aten.count_nonzero), reduction("sum")),
    rule(aten.any, reduction("max")),
    rule(aten.all, reduction("min")),
    rule(aten.aminmax, reduction("min, max")),
    rule((aten.amax, aten.max.default), reduction("max")),
    rule((aten.amin, aten.min.default), reduction("min")),
    rule((aten.prod.default, aten.prod.dim_int), reduction("product")),
    rule((aten.max.dim, aten.min.dim, aten.argmax, aten.argmin), KEEP),
    rule(aten.mean.dim, KEEP_LINEAR, expand=_mean),
    rule(aten.var.correction, KEEP, expand=_var),
    rule(aten.var_mean.correction, KEEP, expand=_var_mean),
    rule(prims.var, KEEP),
    rule(aten.mean.default, KEEP_LINEAR, expand=_mean_all),
    rule(aten.cumsum, KEEP_LINEAR),
    rule((aten.cumprod, aten.cummax, aten.cummin, aten.logcumsumexp), KEEP),
    rule((aten.sort, aten.topk, aten.median, aten.nanmedian, aten.kthvalue, aten.mode, aten.norm), KEEP),
    rule(aten.hash_tensor, KEEP),
    rule((aten._fft_r2c, aten._fft_c2r, aten._fft_c2c), KEEP_LINEAR),
    rule(aten._softmax.default, KEEP, expand=_softmax),
    rule(aten._log_softmax.default, KEEP, expand=_log_softmax),
    rule(aten._safe_softmax.default, KEEP, expand=True),
    rule(aten._log_softmax_backward_data.default, KEEP_LINEAR, expand=_log_softmax_backward),
    rule(aten._softmax_backward_data.default, KEEP_LINEAR, expand=_softmax_backward),
)
