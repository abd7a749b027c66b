"""Batch norms of numbers of 16 bits have their statistics in float32, whatever their parameters and buffers are in.

    batch_norm(x: bf16, weight: bf16, ..., mean: bf16)   ->   batch_norm(x, weight: f32, ..., mean: f32), mean cast back

Torch's kernels differ there by device (on CPUs the statistics of such a batch norm are rounded to 16 bits, elsewhere
not), and its types say float32. With parameters in float32 all of them are one function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
NARROW = (torch.bfloat16, torch.float16)


class WideStatistics:
    """A batch norm in training, in this form where its numbers are of 16 bits."""

    def __init__(self, normalise: Any) -> None:
        self.normalise, self.__name__ = normalise, "batch_norm_with_wide_statistics"

    def __call__(self, x: Tensor, *given: Any) -> Tensor:
        """What the op gives."""
        tensors, (training, *how) = given[:4], given[4:]
        if not training or x.dtype not in NARROW:
            made: Tensor = self.normalise(x, *given)
            return made
        wide = [None if each is None else each.float() for each in tensors]
        if wide == [None] * 4:
            wide[0] = x.new_ones(x.shape[1], dtype=torch.float32)  # what says in which dtype the statistics are
        out: Tensor = self.normalise(x, *wide, training, *how)
        for kept, new in zip(tensors[2:], wide[2:], strict=True):
            if kept is not new and kept is not None and new is not None:
                kept.copy_(new)
        return out


def take_wide_statistics(exported: torch.fx.GraphModule) -> None:
    """Have the batch norms of an exported program do so."""
    for node in exported.graph.nodes:
        target = node.target
        if target is aten.batch_norm.default or getattr(target, "__name__", "") == "batch_norm_by_parts":
            node.target = WideStatistics(target)
    exported.recompile()
