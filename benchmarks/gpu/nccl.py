"""One real rank under NCCL: steps of a plan equal those of one device; and what ``torchrun`` does."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import shardfx as sx

from .cells import TOLERANCE, one_device, parallel
from .context import Context, Wrong
from .device import Device
from .models import table_model
from .plans import BY_NAME, hints_of
from .real_rank import real_rank

MESHES = {"dp=1": {"dp": 1}, "dp=1, tp=1": {"dp": 1, "tp": 1}}
MODEL, UNDER_TORCHRUN = "GPT, fused qkv", "torchrun"
PROGRAM = """
import torch, shardfx as sx
from torch import nn
device = torch.device("{device}")
model, x = nn.Linear(8, 8, device=device), torch.randn(4, 8, device=device)
hints = sx.Hints(args=(x,), loss=nn.functional.mse_loss, targets=(x,))
pm = sx.parallelize(model, sx.Mesh(dp=1), hints)
pm(x, x).backward()
print("virtual" if pm._this_rank is None else "real")
"""


def names(rehearse: bool) -> list[str]:
    plans = ("dp2 x tp2", "update")
    return [*(f"{plan} as {mesh}" for plan in plans for mesh in MESHES), UNDER_TORCHRUN]


def run(context: Context) -> None:
    with real_rank(context.device):
        for cell in context.cells:
            if cell != UNDER_TORCHRUN:
                plan, mesh = cell.split(" as ")
                context.attempt(cell, lambda plan=plan, mesh=mesh: check(plan, mesh, context.device))  # type: ignore[misc]
    if UNDER_TORCHRUN in context.cells:
        context.attempt(UNDER_TORCHRUN, lambda: under_torchrun(context.device))


def check(plan_name: str, mesh: str, device: Device) -> dict[str, Any]:
    """A step on one real rank, compared with one device."""
    plan = replace(BY_NAME[plan_name], axes=MESHES[mesh], weights="tp" in MESHES[mesh])
    model = table_model(MODEL, device.torch_device)
    alone = one_device(model, plan)
    pm = sx.parallelize(
        model.case.model, sx.Mesh(**plan.axes), hints_of(plan, model, device.torch_device), virtual=False
    )
    row = {"error": parallel(pm, model, plan).error(alone)}
    if not row["error"] <= TOLERANCE:
        raise Wrong(f"off by {row['error']:.1e}", row)
    return row | {"backend": torch.distributed.get_backend()}


def under_torchrun(device: Device) -> dict[str, Any]:
    """Whether one process of ``torchrun`` is a real rank or goes on virtual ones."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "one_rank.py"
        script.write_text(PROGRAM.format(device=device.kind), encoding="utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", str(script)]
        run = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ), timeout=60)
    if run.returncode:
        raise RuntimeError(run.stderr[-2000:])
    return {"ranks": run.stdout.split()[-1]}
