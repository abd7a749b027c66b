"""The command line: what it prints, what it writes, and how it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import shardfx as sx
from shardfx.cli import main, parse_mesh
from shardfx.passes import BUILT_IN, ON_REQUEST

TARGET = """
import torch
import torch.nn.functional as F
from torch import nn

import shardfx as sx


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    specs = {"args.0": "dp, -", "targets.0": "dp", "0.weight": "tp, -", "0.bias": "tp", "2.weight": "-, tp"}
    batch = torch.randn(4, 8), torch.randint(0, 4, (4,))
    return model, sx.Hints(args=batch[:1], loss=F.cross_entropy, targets=batch[1:], specs=specs)


def fails():
    return 1 / 0


def wrong():
    return 3

"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small_target.py").write_text(TARGET)
    return "small_target.py"


@pytest.mark.long
def test_plan_reports_draws_and_saves(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--mesh", "dp=2,tp=2", "--draw", "pictures", "--every-pass", "--save", "plan.json"]
    options += ["--machine", "h100-dgx"]
    assert main(["plan", f"{target}:make", *options]) == 0
    out = capsys.readouterr().out
    assert "dp 2 x tp 2: 4 ranks" in out and "Communication of one rank" in out
    names = sorted(path.name for path in (tmp_path / "pictures").iterdir())
    passes = [name for name in BUILT_IN if name not in ON_REQUEST]
    assert names == [*(f"{i:02}-{name}.svg" for i, name in enumerate(passes, 1)), "after.svg", "before.svg"]
    assert sx.Plan.load(tmp_path / "plan.json").inputs["0.weight"] == "[16{tp}, 8]"


def test_explain(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{target}:make", "--mesh", "dp=2,tp=2", "0.weight"]) == 0
    assert "the hint '0.weight'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "TARGET:make", "--mesh", "dp:2"], "the mesh cannot be read"),
        (["plan", "TARGET:make", "--mesh", "ep=2"], "unknown mesh axis 'dp'"),
        (["plan", "TARGET", "--mesh", "dp=2"], "does not name a function"),
        (["plan", "TARGET:made", "--mesh", "dp=2"], "no function 'made'"),
        (["plan", "TARGET:fails", "--mesh", "dp=2"], "ZeroDivisionError: division by zero"),
        (["plan", "TARGET:wrong", "--mesh", "dp=2"], "returns something else"),
        (["plan", "not_there.py:make", "--mesh", "dp=2"], "cannot be imported"),
        (["explain", "TARGET:make", "--mesh", "dp=2,tp=2", "0.wait"], "did you mean '0.weight'"),
    ],
)
def test_mistakes_are_text_and_code_2(
    target: str, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([a.replace("TARGET", target) for a in arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error


def test_meshes_as_text() -> None:
    assert parse_mesh("dp=2, tp=4") == sx.Mesh(dp=2, tp=4)
    assert parse_mesh("pp=2,mb=Loop(8)") == sx.Mesh(pp=2, mb=sx.Loop(8))
    assert parse_mesh("mb=Loop(2, interleave=True),tp=2") == sx.Mesh(mb=sx.Loop(2, interleave=True), tp=2)


@pytest.mark.long
def test_the_module_runs_as_a_program(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shardfx", "passes"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0 and "bucket-comm" in run.stdout and not run.stderr
