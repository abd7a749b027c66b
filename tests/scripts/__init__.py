"""Training scripts as people have them, plain and ported: what changes between the two is all that porting asks.

Each module has ``plain(steps, folder)``, for one device, and ``ported(mesh, steps, folder)``. Both go on where the last
checkpoint in the folder is, if there is one, leave one, and give the losses of the steps that they made. ``MESHES`` are
two plans, one to begin under and one to go on under.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardfx as sx

STEPS = 4
"""Calls in a run."""
SCRIPTS = ["accelerate_loop", "nano_gpt", "trainer"]


def on(mesh: sx.Mesh, specs: Mapping[str, str]) -> dict[str, str]:
    """The specs that a mesh has the axes for."""
    names = {axis.name for axis in mesh.axes}
    return {name: spec for name, spec in specs.items() if set(spec.replace(",", " ").split()) <= names | {"-"}}


def is_first() -> bool:
    """Whether this process is the one that writes."""
    return int(os.environ.get("RANK", "0")) == 0


def save(state: dict[str, Any], folder: Path) -> None:
    if is_first():
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(state, folder / "checkpoint.pt")
    if dist.is_initialized():
        dist.barrier()


def saved(folder: Path) -> dict[str, Any]:
    """The checkpoint; nothing, if there is none."""
    path = folder / "checkpoint.pt"
    found: dict[str, Any] = torch.load(path, weights_only=True) if path.exists() else {}
    return found
