"""Batch norms that ask beside their input: ``SyncBatchNorm`` other processes for their rows, where what is captured has
all rows there are; and ``momentum=None`` its own buffer how many batches there were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

OWN, USUAL = nn.SyncBatchNorm.forward, _BatchNorm.forward


@contextmanager
def alone() -> Iterator[None]:
    """Within, a synchronised batch norm is a batch norm of what it is given, on any device; and one that keeps the mean
    of all batches (``momentum=None``) computes with their number, and does not ask what it is."""
    nn.SyncBatchNorm.forward = _BatchNorm.forward = _batch_norm  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.SyncBatchNorm.forward, _BatchNorm.forward = OWN, USUAL  # type: ignore[method-assign]


def _batch_norm(self: _BatchNorm, input: torch.Tensor) -> torch.Tensor:
    """What a batch norm does; the factor of its running statistics is a tensor where it follows from their number."""
    mean, variance, count = self.running_mean, self.running_var, self.num_batches_tracked
    if self.momentum is not None or not self.training or mean is None or variance is None or count is None:
        return USUAL(self, input)
    self._check_input_dim(input)
    count.add_(1)
    of_batch = torch.zeros_like(mean), torch.zeros_like(variance)
    made = F.batch_norm(input, *of_batch, self.weight, self.bias, True, 1.0, self.eps)
    with torch.no_grad():
        for kept, new in zip((mean, variance), of_batch, strict=True):
            factor = 1.0 / count.to(kept.dtype)
            kept.copy_(new * factor + kept * (1.0 - factor))
    return made
