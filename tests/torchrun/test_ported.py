"""Ported scripts, and an example, on real processes."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate.state import AcceleratorState

from tests.scripts import STEPS
from tests.torchrun.launch import ROOT, example, on_ranks
from tests.virtual.test_examples import one_device


def test_a_trainer_and_a_loop_of_accelerate_train_as_on_one_device(tmp_path: Path) -> None:
    """Begun and gone on with on two ranks, under two plans; then without shardfx."""
    scripts = {name: importlib.import_module(f"tests.scripts.{name}") for name in ("accelerate_loop", "trainer")}
    calls, later = [], {}
    for name, script in scripts.items():
        AcceleratorState._reset_state(True)
        losses = script.plain(2 * STEPS, tmp_path / name / "plain")
        later[name] = script.plain(STEPS, tmp_path / name / "plain")
        (tmp_path / name / "losses.json").write_text(json.dumps(losses))
        calls.append(f"trains_as_the_plain_script:{name},{tmp_path / name}")
    on_ranks(2, *calls)
    for name, script in scripts.items():
        AcceleratorState._reset_state(True)
        torch.testing.assert_close(script.plain(STEPS, tmp_path / name / "ported"), later[name], rtol=0, atol=1e-9)
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
    printed = example(4, [str(ROOT / "examples" / "gpt_torchrun.py"), str(tmp_path / "saved")])
    losses = [float(number) for number in re.findall(r"loss ([\d.]+)$", printed, re.MULTILINE)]
    assert losses == pytest.approx(one_device(len(losses)), abs=2e-5)
    assert losses[-1] < losses[0] - 1
    saved = dcp.FileSystemReader(tmp_path / "saved").read_metadata().state_dict_metadata
    assert saved["model.layers.0.qkv.weight"].size == (192, 64)
