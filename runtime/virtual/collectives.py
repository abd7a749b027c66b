"""What the members of a group get from a collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardfx.ir.errors import Error

from .coroutine import Request

Tensor = torch.Tensor
c10d = torch.ops._c10d_functional


def perform(request: Request, requests: Sequence[Request], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Do a collective on the tensors of a group's members, in the group's order."""
    n = len(tensors)
    if request.op is c10d.all_reduce.default:
        total = reduce(tensors, request.args[0])
        return [total] + [total.clone() for _ in range(n - 1)]
    if request.op is c10d.all_gather_into_tensor.default:
        joined = torch.cat([t if t.dim() else t.reshape(1) for t in tensors])
        return [joined] + [joined.clone() for _ in range(n - 1)]
    if request.op is c10d.reduce_scatter_tensor.default:
        return [piece.clone() for piece in reduce(tensors, request.args[0]).chunk(n)]
    sent = [t.split(list(r.args[1])) for t, r in zip(tensors, requests, strict=True)]
    return [torch.cat([sent[source][k] for source in range(n)]) for k in range(n)]


def reduce(tensors: Sequence[Tensor], kind: str) -> Tensor:
    """Reduce in the order of the ranks: deterministic."""
    total = tensors[0].clone()
    for other in tensors[1:]:
        if kind in ("sum", "avg"):
            total += other
        elif kind == "max":
            total = torch.maximum(total, other)
        elif kind == "min":
            total = torch.minimum(total, other)
        elif kind == "product":
            total *= other
        else:
            raise Error(f"unknown reduction {kind!r}", expected="sum, avg, max, min or product", got=kind)
    return total / len(tensors) if kind == "avg" else total
