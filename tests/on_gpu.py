"""What tests on a GPU share."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_synchronisation() -> Iterator[None]:
    """An error where the host waits for the device."""
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def allocated() -> int:
    """Bytes of CUDA memory that are allocated, once what earlier tests left in cycles is freed."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()
