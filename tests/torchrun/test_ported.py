"""Ported scripts on real processes."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

from tests.scripts import SCRIPTS, STEPS
from tests.torchrun.launch import on_ranks


def test_ported_scripts_train_as_the_plain_ones(tmp_path: Path) -> None:
    calls = []
    for name in SCRIPTS:
        folder = tmp_path / name
        losses = importlib.import_module(f"tests.scripts.{name}").plain(2 * STEPS, folder / "plain")
        (folder / "losses.json").write_text(json.dumps(losses))
        calls.append(f"trains_as_the_plain_script:{name},{folder}")
    on_ranks(2, *calls)
