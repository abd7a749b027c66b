"""The device on which the ranks of this process run.

==========================================  ===========================================================================
``Hints(device="cuda:1")``                  that one
``Hints(device="cuda")``, without launcher  torch's current CUDA device
``Hints(device="cuda")``, under torchrun    that of the local rank: ``cuda:$LOCAL_RANK``
no hint                                     where the weights of the model are; the CPU for those on ``meta``; under
                                            torchrun that of the local rank for those on any CUDA device
==========================================  ===========================================================================

A plan without weights may name a device that this machine lacks: its report, memory and timeline need none.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def local_device(asked: str | torch.device | None, weights: torch.device, real: bool) -> torch.device:
    """The device of the ranks of this process.

    Args:
        asked: ``Hints(device=...)``.
        weights: where the model's weights are.
        real: this process is one rank of a job, of which each has a device of its own.
    """
    device = torch.device(asked) if asked is not None else weights
    if device.type in ("cpu", "meta"):
        return torch.device("cpu")
    if real and (asked is None or ":" not in str(asked)):
        module: Any = torch.get_device_module(device.type)
        index = os.environ.get("LOCAL_RANK") or (module.current_device() if module.is_available() else 0)
        return torch.device(device.type, int(index))
    return device


def as_current(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which ``device`` is the current one: programs name device types alone when they allocate."""
    if device.type == "cpu":
        return nullcontext()
    context: AbstractContextManager[Any] = torch.get_device_module(device).device(device)
    return context
