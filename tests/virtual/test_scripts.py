"""Training scripts, ported: step by step the losses of the plain ones on one device, going on under other plans."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

from tests.scripts import SCRIPTS, STEPS


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    """accelerate keeps its state in classes."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


QUICK = ("accelerate_loop", "nano_gpt")
CASES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SCRIPTS]


@pytest.mark.long
@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CASES)
def test_ported_scripts_train_as_the_plain_ones(name: str, tmp_path: Path) -> None:
    """Begun under one plan, gone on with under another, and at last without any."""
    script = importlib.import_module(f"tests.scripts.{name}")
    expected = script.plain(3 * STEPS, tmp_path / "plain")
    losses = [loss for mesh in script.MESHES for loss in script.ported(mesh, STEPS, tmp_path / "ported")]
    losses += script.plain(STEPS, tmp_path / "ported")
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-9)
    assert max(expected) - min(expected) > 1e-3
