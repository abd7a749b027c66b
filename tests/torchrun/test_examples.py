"""The examples on real processes, as somebody starts them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from tests.torchrun.launch import ROOT, example
from tests.virtual.test_examples import losses_in, one_device, printed_of_tiles


@pytest.mark.slow
def test_the_gpt_trains_as_on_one_device(tmp_path: Path) -> None:
    printed = example(4, [str(ROOT / "examples" / "gpt_torchrun.py"), str(tmp_path / "saved")])
    losses = [float(number) for number in re.findall(r"loss ([\d.]+)$", printed, re.MULTILINE)]
    assert losses == pytest.approx(one_device(len(losses)), abs=2e-5)
    assert losses[-1] < losses[0] - 1
    saved = dcp.FileSystemReader(tmp_path / "saved").read_metadata().state_dict_metadata
    assert saved["model.layers.0.qkv.weight"].size == (192, 64)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tiles_train_as_on_virtual_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    virtual, _ = printed_of_tiles(monkeypatch, capsys, "unet")
    printed = example(4, [str(ROOT / "examples" / "large_image.py"), "unet"])
    assert losses_in(printed, "unet") == pytest.approx(losses_in(virtual, "unet"), abs=2e-3)
    right, wanted = (re.findall(r"unet  right at ([\d.]+)", text) for text in (printed, virtual))
    assert float(right[0]) == pytest.approx(float(wanted[0]), abs=0.02)
