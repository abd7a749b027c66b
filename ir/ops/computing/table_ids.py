"""Ids of a table in 32 bits, which are sent in half the bytes.

    %5 = aten.embedding(%w, %ids)        ->    %4 = shardfx.narrow_ids(%ids, 8000)
                                               %5 = aten.embedding(%w, %4)

An id beyond the table stays beyond it, whatever it was, so that its lookup is the same error. So of a table of at most
as many rows a lookup by narrow ids is that by the ids themselves, and its gradient is, too: ``wide_ids`` says so to the
proof (:mod:`shardfx.ir.rulebook.movement.narrow_ids`). Needs torch alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .library import define

aten = torch.ops.aten
LOOKUP, GRADIENT = aten.embedding.default, aten.embedding_dense_backward.default
LARGEST = 2**31 - 1


@define(
    "narrow_ids(Tensor ids, int size) -> Tensor",
    shapes=lambda ids, size: ids.new_empty(ids.shape, dtype=torch.int32),
)
def narrow_ids(ids: Tensor, size: int) -> Tensor:
    """Ids of a table of ``size`` rows in 32 bits; those beyond it as -1, or ``size``."""
    return ids.clamp(-1, size).to(torch.int32)
