"""One real rank: a process group of this process alone."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .device import Device


@contextmanager
def real_rank(device: Device) -> Iterator[None]:
    """A process group of one rank, of NCCL on a GPU."""
    with tempfile.TemporaryDirectory() as folder:
        if device.cuda:
            torch.cuda.set_device(0)
        where: dict[str, Any] = {"device_id": device.torch_device} if device.cuda else {}
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        dist.init_process_group(device.backend, store=store, rank=0, world_size=1, **where)
        try:
            yield
        finally:
            dist.destroy_process_group()
