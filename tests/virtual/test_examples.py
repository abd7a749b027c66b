"""The examples, as somebody runs them."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

from tests.pages import ROOT
from tests.printed import check_printed, noting_programs

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


@pytest.mark.slow
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


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_fits_on_a_page(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < 60
