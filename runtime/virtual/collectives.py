"""What the members of a group get from a collective, in the order of the group: deterministic."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardfx.ir.errors import Error
from shardfx.runtime.rendezvous import REDUCTIONS, Request

Tensor = torch.Tensor


def perform(requests: Sequence[Request], tensors: Sequence[Tensor], into: Sequence[Tensor | None]) -> list[Tensor]:
    """Do a collective on the tensors of a group's members; each result goes where its rank wants it."""
    made = _results(requests, tensors)
    return [new if at is None else at.copy_(new.view(at.shape)) for new, at in zip(made, into, strict=True)]


def _results(requests: Sequence[Request], tensors: Sequence[Tensor]) -> list[Tensor]:
    made = alike(requests[0], tensors)
    return [made] + [made.clone() for _ in tensors[1:]] if made is not None else own(requests, tensors)


def own(requests: Sequence[Request], tensors: Sequence[Tensor]) -> list[Tensor]:
    """What each member gets for itself, of all their tensors."""
    n = len(tensors)
    if requests[0].op == "reduce_scatter_tensor":
        return [piece.clone() for piece in reduce(tensors, requests[0].args[0]).chunk(n)]
    sent = [t.split(list(r.args[1])) for t, r in zip(tensors, requests, strict=True)]
    return [torch.cat([sent[source][k] for source in range(n)]) for k in range(n)]


def alike(request: Request, tensors: Sequence[Tensor]) -> Tensor | None:
    """What all members get alike, of all their tensors; None where each gets something of its own."""
    if request.op == "all_reduce":
        return reduce(tensors, request.args[0])
    if request.op == "all_gather_into_tensor":
        return torch.cat([t if t.dim() else t.reshape(1) for t in tensors])
    return None


def reduce(tensors: Sequence[Tensor], kind: str) -> Tensor:
    """Reduce in the order of the ranks."""
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
            raise Error(f"unknown reduction {kind!r}", expected=", ".join(REDUCTIONS), got=kind)
    return total / len(tensors) if kind == "avg" else total
