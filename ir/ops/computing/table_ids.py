"""Ids of a table in 32 bits, which are sent in half the bytes.

    %5 = aten.embedding(%w, %ids)        ->    %4 = shardfx.narrow_ids(%ids, 8000)
                                               %5 = aten.embedding(%w, %4)

An id beyond the table stays beyond it, whatever it was, so that its lookup is the same error. So of a table of at most
as many rows a lookup by narrow ids is that by the ids themselves, and its gradient is, too (:func:`wide_ids`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardfx.ir.graph import Node, Value
from shardfx.ir.ops.table import OwnOp

from .library import define

aten = torch.ops.aten
LOOKUP, GRADIENT = aten.embedding.default, aten.embedding_dense_backward.default
LARGEST = 2**31 - 1
Made = TypeVar("Made")


@define(
    "narrow_ids(Tensor ids, int size) -> Tensor",
    shapes=lambda ids, size: ids.new_empty(ids.shape, dtype=torch.int32),
)
def narrow_ids(ids: Tensor, size: int) -> Tensor:
    """Ids of a table of ``size`` rows in 32 bits; those beyond it as -1, or ``size``."""
    return ids.clamp(-1, size).to(torch.int32)


def wide_ids(node: Node, of: Callable[[Value], Made]) -> Callable[[Value], Made]:
    """What is ``of`` the operands of a node, where that is a lookup by narrow ids, or its gradient: of the ids
    themselves."""
    if node.op not in (LOOKUP, GRADIENT):
        return of
    rows: Any = node.operands[0].shape[0] if node.op is LOOKUP else node.args[2]

    def wide(value: Value) -> Made:
        source = value
        while source.node is not None and isinstance(source.node.op, OwnOp):
            source = source.node.operands[source.index]
        if value is node.operands[1] and source.node is not None and source.node.op is narrow_ids:
            ids, size = source.node.args
            return of(ids if size >= rows else value)
        return of(value)

    return wide
