"""Ranks that run ported scripts (see :mod:`.workers`)."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from accelerate.state import AcceleratorState

from tests.pages import ports
from tests.scripts import STEPS, trainer

from .workers import WORKERS, worker

__all__ = ["WORKERS"]


def check_losses(folder: str) -> None:
    """Of the ported script, going on under another plan: those that the plain one wrote down, step by step."""
    expected = json.loads(Path(folder, "losses.json").read_text())
    found = [loss for mesh in trainer.MESHES for loss in trainer.ported(mesh, STEPS, Path(folder, "ported"))]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def prepare(calls: list[str]) -> None:
    """Make the plans that the ranks inherit: the script trains the same on virtual ranks."""
    for call in calls:
        worker, _, folder = call.partition(":")
        if worker == trains_as_the_plain_script.__name__:
            check_losses(folder)
            shutil.rmtree(Path(folder, "ported"))
            AcceleratorState._reset_state(True)


@worker
def trains_as_the_plain_script(folder: str) -> None:
    check_losses(folder)


@worker
def runs_the_page(which: str, folder: str) -> None:
    """The script for DistributedDataParallel, or what docs/porting.md makes of it."""
    os.chdir(folder)
    exec(ports("docs/porting.md")[0][int(which)], {})
