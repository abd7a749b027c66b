"""Memory and communication of a rank by memory features: Llama-3-70B's shapes on dp=8 x tp=8, planned without weights.

    python -m benchmarks.memory_table [--layers 80] [--batch 8]

For each row the bytes of a rank at its peak in a whole step of AdamW (by ``pm.memory()``), the optimizer's states and
the activations among them, the bytes offloaded to the host, the bytes that a rank sends in a step, and the seconds of a
step on a machine (``pm.report("h100-dgx")``).
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import shardfx as sx
from shardfx.ir.text.printer import size_text

from .plan_scale import planned

LAYERS = "model.layers.*"
ROWS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "recompute": {"recompute": LAYERS},
    "recompute, products kept": {"recompute": sx.Recompute(LAYERS, save="aten.mm")},
    "recompute, in slices": {"recompute": sx.Recompute(LAYERS, shard_saved="tp")},
    "zero 1": {"zero": 1},
    "zero 2": {"zero": 2},
    "zero 3": {"zero": 3},
    "zero 3, recompute": {"zero": 3, "recompute": LAYERS},
    "zero 3, chosen for 80 GB": {"zero": 3, "recompute": "auto", "memory": "80GB", "machine": "h100-dgx"},
    "states and activations offloaded": {"offload": ("optimizer", "activations")},
    "zero 3, recompute, states offloaded": {"zero": 3, "recompute": LAYERS, "offload": ("optimizer",)},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--machine", default="h100-dgx")
    given = parser.parse_args()
    table = Table("", "peak", "states", "activations", "offloaded", "sent", "a step", box=box.SIMPLE_HEAD)
    for name, hints in ROWS.items():
        pm = planned(given.layers, sx.Mesh(dp=8, tp=8), given.batch, optimizer=torch.optim.AdamW, **hints)
        memory, report = pm.memory(), pm.report(given.machine)
        sizes = memory.by_category
        table.add_row(
            name,
            size_text(memory.peak),
            size_text(sizes.get("optimizer states", 0)),
            size_text(sizes.get("activations", 0)),
            size_text(memory.host),
            size_text(int(report.communication.nbytes)),
            f"{report.time.total:.2f} s",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
