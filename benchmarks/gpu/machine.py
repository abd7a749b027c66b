"""The machine as ``sx.Machine.measure()`` finds it: what predicted times are computed from."""

from __future__ import annotations

from typing import Any

import shardfx as sx

from .context import Context

CELL, FILE = "Machine.measure()", "machine.json"


def names(rehearse: bool) -> list[str]:
    return [CELL]


def run(context: Context) -> None:
    context.attempt(CELL, lambda: measure(context))


def measure(context: Context) -> dict[str, Any]:
    """Rates of the device, kept as a file for the parts that predict."""
    machine = sx.Machine.measure(context.device.torch_device)
    path = context.folder / FILE
    machine.save(path)
    host = machine.pool("host")
    return {
        "flops": dict(machine.flops),
        "bandwidth": machine.bandwidth,
        "overhead": machine.overhead,
        "host_rate": host.bandwidth,
        "memory": machine.memory,
        "source": machine.source,
        "curves": sorted(machine.curves),
        "file": str(path),
    }
