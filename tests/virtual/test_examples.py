"""The demo, the examples and ported training scripts, as somebody runs them."""

from __future__ import annotations

import io
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from rich.console import Console

import shardfx as sx
from shardfx.demo.run_demo import demo
from tests.pages import ROOT
from tests.printed import check_printed, noting_programs
from tests.scripts import STEPS, accelerate_loop

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def one_device(steps: int) -> list[float]:
    """The losses of the example's model, trained alone."""
    model, hints = runpy.run_path(str(ROOT / "examples" / "gpt_megatron.py"))["make"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = hints.loss(model(*hints.args), *hints.targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.long
def test_the_gpt_trains_as_on_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with noting_programs() as ran:
        pm = runpy.run_path(str(ROOT / "examples" / "gpt_megatron.py"), run_name="__main__")["pm"]
    check_printed(pm, ran)
    printed = capsys.readouterr().out
    losses = [float(number) for number in re.findall(r"loss ([\d.]+)$", printed, re.MULTILINE)]
    assert losses == pytest.approx(one_device(len(losses)), abs=2e-5)
    assert losses[-1] < losses[0] - 1
    assert (tmp_path / "out/gpt_megatron/after.svg").exists()
    assert "proven: the ranks compute what the model computes" in printed and "reduce-scatter" in printed


@pytest.mark.long
def test_the_dlrm_trains_and_is_proven(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "dlrm.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "step 9  loss 0." in printed and "proven: the ranks compute what the model computes" in printed


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_fits_on_a_page(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < 60


@pytest.mark.long
def test_the_demo(tmp_path: Path) -> None:
    out = io.StringIO()
    assert demo(Console(file=out, width=120), tmp_path / "out", steps=2) == 0
    text = out.getvalue()
    assert "✗" not in text and "2 steps in float32" in text and "no gradient is off by more than" in text
    assert "Communication of one rank in one step" in text and "the hint 'layers.*.wo.weight'" in text
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"before.svg", "after.svg", "plan.json"}
    assert sx.Plan.load(tmp_path / "out" / "plan.json").mesh == sx.Mesh(dp=2, tp=2)


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    """accelerate keeps its state in classes."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.mark.long
def test_ported_accelerate_loop_trains_as_the_plain_one(tmp_path: Path) -> None:
    """Begun under one plan, gone on with under another, and at last without any."""
    expected = accelerate_loop.plain(3 * STEPS, tmp_path / "plain")
    meshes = accelerate_loop.MESHES
    losses = [loss for mesh in meshes for loss in accelerate_loop.ported(mesh, STEPS, tmp_path / "ported")]
    losses += accelerate_loop.plain(STEPS, tmp_path / "ported")
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-9)
    assert max(expected) - min(expected) > 1e-3
