"""Reductions, softmax and scans. A reduced dim that is cut leaves a partial sum (or max, min, product)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..graph import Node
from ..rules import Dim, RuleEntry, ShardingRule, rule

aten = torch.ops.aten


def reduction(kind: str, *, linear: bool = False) -> Callable[[Node], ShardingRule]:
    """Reduce over the dims of the second argument (all, if there is none); ``keepdim`` leaves a dim of one."""

    def make(node: Node) -> ShardingRule:
        shape = node.operands[0].shape
        ndim = len(shape)
        given: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        if given is None or given == [] or isinstance(given, torch.dtype):
            dims = set(range(ndim))
        else:
            dims = {d % max(ndim, 1) for d in (given if isinstance(given, (list, tuple)) else [given])}
        kept = node.outs[0].type.ndim == ndim
        names: list[Dim] = [(f"d{i}",) for i in range(ndim)]
        sizes = {f"d{i}": s for i, s in enumerate(shape)}
        result = [() if i in dims else names[i] for i in range(ndim) if kept or i not in dims]
        return ShardingRule(
            (tuple(names),),
            (tuple(result),),
            sizes,
            linear=(frozenset({0}),) if linear else (),
            reduce=kind,
        )

    make.__name__ = f"reduce_{kind}"
    return make


def along(*, results_keep: bool, linear: tuple[frozenset[int], ...] = (), dim_at: int = 1) -> Callable[[Node], ShardingRule]:
    """Ops that need one dim whole (softmax, cumsum, sort, argmax): the others pass."""

    def make(node: Node) -> ShardingRule:
        shape = node.operands[0].shape
        ndim = len(shape)
        dim = node.args[dim_at] if len(node.args) > dim_at else node.kwargs.get("dim", -1)
        names: list[Dim] = [(f"d{i}",) for i in range(ndim)]
        sizes = {f"d{i}": s for i, s in enumerate(shape)}
        if dim is None:
            return ShardingRule((tuple(names),), ((),) * len(node.results), sizes, frozenset(sizes))
        whole = {f"d{d % ndim}" for d in (dim if isinstance(dim, (list, tuple)) else [dim])} if ndim else set()
        results = []
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
        return ShardingRule(
            tuple(tuple(names) for _ in node.operands), tuple(results), sizes, frozenset(whole), linear
        )

    make.__name__ = "along" if results_keep else "along_dim"
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


KEEP = along(results_keep=True)

RULES: tuple[RuleEntry, ...] = (
    rule((aten.sum.dim_IntList, aten.sum.default), reduction("sum", linear=True)),
    rule((aten.amax, aten.max.default), reduction("max")),
    rule((aten.amin, aten.min.default), reduction("min")),
    rule((aten.prod.default, aten.prod.dim_int), reduction("product")),
    rule((aten.any, aten.all, aten.max.dim, aten.min.dim, aten.argmax, aten.argmin), along(results_keep=False)),
    rule((aten.mean.dim, aten.var.correction, aten.var_mean.correction, aten.logsumexp), along(results_keep=False)),
    rule((aten.cumsum, aten.cumprod, aten.sort, aten.topk, aten.median.dim), KEEP),
    rule(aten._softmax.default, KEEP, expand=_softmax),
    rule(aten._log_softmax.default, KEEP, expand=_log_softmax),
    rule(aten._safe_softmax.default, KEEP, expand=True),
    rule(
        aten._log_softmax_backward_data.default,
        along(results_keep=True, linear=(frozenset({0}),), dim_at=2),
        expand=_log_softmax_backward,
    ),
    rule(
        aten._softmax_backward_data.default,
        along(results_keep=True, linear=(frozenset({0}),), dim_at=2),
        expand=_softmax_backward,
    ),
)
