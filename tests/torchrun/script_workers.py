"""Ranks that run ported scripts (see :mod:`.workers`)."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import torch

from tests.scripts import STEPS

from .program_workers import WORKERS
from .workers import worker

__all__ = ["WORKERS"]


@worker
def trains_as_the_plain_script(name: str, folder: str) -> None:
    """Step by step the losses that the plain one wrote down, going on under another plan."""
    script = importlib.import_module(f"tests.scripts.{name}")
    expected = json.loads(Path(folder, "losses.json").read_text())
    losses = [loss for mesh in script.MESHES for loss in script.ported(mesh, STEPS, Path(folder, "ported"))]
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-9)
