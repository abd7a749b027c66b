"""Ranks that run ported scripts (see :mod:`.workers`)."""

from __future__ import annotations

import importlib
import json
import os
import shutil
from pathlib import Path

import torch
from accelerate.state import AcceleratorState

import shardfx as sx
from shardfx.integrations.trainer import ParallelTrainer
from tests.pages import ports
from tests.scripts import STEPS, on, trainer
from tests.virtual.test_trainer import MORE, close, everything, made

from .program_workers import WORKERS
from .workers import worker

__all__ = ["WORKERS"]


def losses(name: str, folder: Path) -> tuple[list[float], list[float]]:
    """Of the ported script, going on under another plan, and those that the plain one wrote down."""
    script = importlib.import_module(f"tests.scripts.{name}")
    expected = json.loads(Path(folder, "losses.json").read_text())
    return [loss for mesh in script.MESHES for loss in script.ported(mesh, STEPS, folder / "ported")], expected


def prepare(name: str, folder: str) -> None:
    """Make the plans that the ranks inherit: it trains the same on virtual ranks."""
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


@worker
def does_what_a_trainer_does(folder: str) -> None:
    """Evaluated, trained, predicted, the best loaded, saved."""
    hints = sx.Hints(specs=on(sx.Mesh(tp=2), trainer.SPECS))
    ours = made(ParallelTrainer, Path(folder, "ours"), MORE, mesh=sx.Mesh(tp=2), hints=hints)
    close(everything(ours, Path(folder, "our model")), torch.load(Path(folder, "plain.pt"), weights_only=False))
