"""The examples on real processes, as somebody starts them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from tests.torchrun.launch import ROOT, example
from tests.virtual.test_examples import one_device


@pytest.mark.slow
def test_the_gpt_trains_as_on_one_device(tmp_path: Path) -> None:
    printed = example(4, [str(ROOT / "examples" / "gpt_torchrun.py"), str(tmp_path / "saved")])
    losses = [float(number) for number in re.findall(r"loss ([\d.]+)$", printed, re.MULTILINE)]
    assert losses == pytest.approx(one_device(len(losses)), abs=2e-5)
    assert losses[-1] < losses[0] - 1
    saved = dcp.FileSystemReader(tmp_path / "saved").read_metadata().state_dict_metadata
    assert saved["model.layers.0.qkv.weight"].size == (192, 64)
