"""Ranks that run ported scripts (see :mod:`.workers`)."""

from __future__ import annotations

import importlib
import json
import os
import shutil
from pathlib import Path

import torch
from accelerate.state import AcceleratorState

from tests.pages import ports
from tests.scripts import STEPS

from .workers import WORKERS, worker

__all__ = ["WORKERS"]


def losses(name: str, folder: Path) -> tuple[list[float], list[float]]:
    """Of the ported script, going on under another plan, and those that the plain one wrote down."""
    script = importlib.import_module(f"tests.scripts.{name}")
    expected = json.loads(Path(folder, "losses.json").read_text())
    return [loss for mesh in script.MESHES for loss in script.ported(mesh, STEPS, folder / "ported")], expected


def prepare(calls: list[str]) -> None:
    """Make the plans that the ranks inherit: scripts train the same on virtual ranks."""
    for call in calls:
        worker, _, given = call.partition(":")
        if worker == trains_as_the_plain_script.__name__:
            name, folder = given.split(",")
            torch.testing.assert_close(*losses(name, Path(folder)), rtol=0, atol=1e-9)
            shutil.rmtree(Path(folder, "ported"))
            AcceleratorState._reset_state(True)


@worker
def trains_as_the_plain_script(name: str, folder: str) -> None:
    """Step by step."""
    torch.testing.assert_close(*losses(name, Path(folder)), rtol=0, atol=1e-9)


@worker
def runs_the_page(which: str, folder: str) -> None:
    """The script for DistributedDataParallel, or what docs/porting.md makes of it."""
    os.chdir(folder)
    exec(ports("docs/porting.md")[0][int(which)], {})
