"""``SyncBatchNorm`` asks other processes for their rows; what is captured has all rows there are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

OWN = nn.SyncBatchNorm.forward


@contextmanager
def alone() -> Iterator[None]:
    """Within, a synchronised batch norm is a batch norm of what it is given, on any device."""
    nn.SyncBatchNorm.forward = _BatchNorm.forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.SyncBatchNorm.forward = OWN  # type: ignore[method-assign]
