"""Ported scripts on real processes."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import Trainer

from tests.scripts import SCRIPTS, STEPS
from tests.torchrun.launch import on_ranks
from tests.virtual.test_trainer import MORE, everything, made


def run(names: list[str], folder: Path) -> None:
    """Begun and gone on with on two ranks, under two plans; then without shardfx."""
    scripts = {name: importlib.import_module(f"tests.scripts.{name}") for name in names}
    calls, later = [], {}
    for name, script in scripts.items():
        AcceleratorState._reset_state(True)
        losses = script.plain(2 * STEPS, folder / name / "plain")
        later[name] = script.plain(STEPS, folder / name / "plain")
        (folder / name / "losses.json").write_text(json.dumps(losses))
        calls.append(f"trains_as_the_plain_script:{name},{folder / name}")
    on_ranks(2, *calls)
    for name, script in scripts.items():
        AcceleratorState._reset_state(True)
        torch.testing.assert_close(script.plain(STEPS, folder / name / "ported"), later[name], rtol=0, atol=1e-9)
    AcceleratorState._reset_state(True)


@pytest.mark.slow
def test_a_trainer_and_a_loop_of_accelerate_train_as_on_one_device(tmp_path: Path) -> None:
    run(["accelerate_loop", "trainer"], tmp_path)


@pytest.mark.long
def test_the_script_that_porting_shows_trains_the_same(tmp_path: Path) -> None:
    trained = []
    for which in ("0", "1"):
        on_ranks(2, f"runs_the_page:{which},{tmp_path}")
        trained.append(torch.load(tmp_path / "model.pt", weights_only=True))
        (tmp_path / "model.pt").unlink()
    torch.testing.assert_close(*trained, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_what_a_trainer_does(tmp_path: Path) -> None:
    AcceleratorState._reset_state(True)
    plain = everything(made(Trainer, tmp_path / "plain", MORE), tmp_path / "plain model")
    torch.save(plain, tmp_path / "plain.pt")
    AcceleratorState._reset_state(True)
    on_ranks(2, f"does_what_a_trainer_does:{tmp_path}")


@pytest.mark.slow
def test_ported_scripts_train_as_the_plain_ones(tmp_path: Path) -> None:
    run([name for name in SCRIPTS if name not in ("accelerate_loop", "trainer")], tmp_path)
