"""The demo runs, agrees with one device, and writes what it says."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

import shardfx as sx
from shardfx.demo.run_demo import demo


@pytest.mark.long
def test_the_demo(tmp_path: Path) -> None:
    out = io.StringIO()
    assert demo(Console(file=out, width=120), tmp_path / "out", steps=2) == 0
    text = out.getvalue()
    assert "✗" not in text and "2 steps in float32" in text and "no gradient is off by more than" in text
    assert "Communication of one rank in one step" in text and "the hint 'layers.*.wo.weight'" in text
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"before.svg", "after.svg", "plan.json"}
    assert sx.Plan.load(tmp_path / "out" / "plan.json").mesh == sx.Mesh(dp=2, tp=2)
