"""Memory by plan on one real rank, predicted and measured: offload beside its link, recompute, accumulation, chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

import shardfx as sx

from .context import Context
from .device import Device
from .models import FULL, TINY, Size
from .real_rank import real_rank
from .speed import WARM, adamw, plan, predicted_memory

TIMED, LEAST = 3, 1024
"""Steps that are timed; and the elements of the smallest tensor that is offloaded."""
PLANS: dict[str, dict[str, Any]] = {
    "offload optimizer, activations": {"offload": [sx.Offload(("optimizer", "activations"), min_numel=LEAST)]},
    "offload optimizer": {"offload": [sx.Offload("optimizer", min_numel=LEAST)]},
    "recompute layers": {"recompute": "layers.*"},
    "accumulate 4": {"grad_accumulation": 4},
    "chunked loss, 8": {
        "mesh": sx.Mesh(dp=1, chunk=sx.Loop(8)),
        "specs": {"args.0": "dp, -", "head": "dp, chunk, -"},
    },
}
"""Further hints of the plan, by name: a whole step with AdamW in the program."""
LINK = "host link"


def names(rehearse: bool) -> list[str]:
    return [LINK, *PLANS]


def run(context: Context) -> None:
    size = TINY if context.rehearse else FULL
    rates: dict[str, float] = {}
    with real_rank(context.device):
        for cell in context.cells:
            if cell == LINK:
                context.attempt(cell, lambda: link(context.device, context.rehearse, rates))
            else:
                context.attempt(cell, lambda cell=cell: measure(context, cell, size, rates))  # type: ignore[misc]


def link(device: Device, rehearse: bool, rates: dict[str, float]) -> dict[str, Any]:
    """Bytes a second between pinned memory of the host and the device: each way, and both at once."""
    nbytes = 1 << (20 if rehearse else 28)
    host, other = device.host_buffer(nbytes), device.host_buffer(nbytes)
    there, back = torch.empty_like(host, device=device.torch_device), torch.empty_like(host, device=device.torch_device)

    def both() -> None:
        if not device.cuda:
            there.copy_(host), other.copy_(back)
            return
        streams = _streams()
        with torch.cuda.stream(streams[0]):
            there.copy_(host, non_blocking=True)
        with torch.cuda.stream(streams[1]):
            other.copy_(back, non_blocking=True)
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)

    def _streams() -> list[torch.cuda.Stream]:
        for stream in copying:
            stream.wait_stream(torch.cuda.current_stream())
        return copying

    copying = [torch.cuda.Stream() for _ in range(2)] if device.cuda else []
    runs: dict[str, Callable[[], object]] = {
        "to_device": lambda: there.copy_(host, non_blocking=True),
        "to_host": lambda: other.copy_(back, non_blocking=True),
        "both": both,
    }
    for name, copy in runs.items():
        copy()
        rates[name] = nbytes * (2 if name == "both" else 1) / device.milliseconds(copy, 5) * 1e3
    return {f"{name}_rate": rate for name, rate in rates.items()}


def measure(context: Context, cell: str, size: Size, rates: dict[str, float]) -> dict[str, Any]:
    """Steps of a plan: their time, peaks, and what they move between host and device."""
    device = context.device
    before = device.release()
    pm, x, y = plan(size, device, optimizer=adamw, **PLANS[cell])
    loss = [float(pm.step(x, y)) for _ in range(WARM)][-1]
    peak = device.peak_of(lambda: pm.step(x, y), before)
    ms = device.milliseconds(lambda: pm.step(x, y), TIMED)
    context.emit(cell, loss=loss, ms=ms, **asdict(peak))
    row = predicted_memory(pm)
    moved = pm.report().time.cost.copied.get("host")
    if moved is not None and "to_host" in rates:
        one_way = 2 / (1 / rates["to_host"] + 1 / rates["to_device"])
        link_ms = moved.nbytes / one_way * 1e3
        row |= {"moved": moved.nbytes, "link_ms": link_ms, "link_ratio": ms / link_ms}
        row["both_ways_ms"] = moved.nbytes / rates["both"] * 1e3
    return row
