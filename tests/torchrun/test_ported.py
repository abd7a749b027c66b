"""Ported scripts, and an example, on real processes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate.state import AcceleratorState

from tests.scripts import STEPS, trainer
from tests.torchrun.launch import ROOT, on_ranks, torchrun
from tests.virtual.test_examples import one_device


def test_a_trainer_trains_as_on_one_device(tmp_path: Path) -> None:
    """Begun and gone on with on two ranks, under two plans; then without shardfx."""
    AcceleratorState._reset_state(True)
    losses = trainer.plain(2 * STEPS, tmp_path / "plain")
    later = trainer.plain(STEPS, tmp_path / "plain")
    (tmp_path / "losses.json").write_text(json.dumps(losses))
    on_ranks(2, f"trains_as_the_plain_script:{tmp_path}")
    AcceleratorState._reset_state(True)
    torch.testing.assert_close(trainer.plain(STEPS, tmp_path / "ported"), later, rtol=0, atol=1e-9)
    AcceleratorState._reset_state(True)


def test_the_script_that_porting_shows_trains_the_same(tmp_path: Path) -> None:
    trained = []
    for which in ("0", "1"):
        on_ranks(2, f"runs_the_page:{which},{tmp_path}")
        trained.append(torch.load(tmp_path / "model.pt", weights_only=True))
        (tmp_path / "model.pt").unlink()
    torch.testing.assert_close(*trained, rtol=0, atol=1e-6)


def test_the_example_trains_as_on_one_device(tmp_path: Path) -> None:
    """As somebody starts it."""
    printed = torchrun(4, [str(ROOT / "examples" / "gpt_torchrun.py"), str(tmp_path / "saved")], ROOT, timeout=200)
    losses = [float(number) for number in re.findall(r"loss ([\d.]+)$", printed, re.MULTILINE)]
    assert losses == pytest.approx(one_device(len(losses)), abs=2e-5)
    assert losses[-1] < losses[0] - 1
    saved = dcp.FileSystemReader(tmp_path / "saved").read_metadata().state_dict_metadata
    assert saved["model.layers.0.qkv.weight"].size == (192, 64)
