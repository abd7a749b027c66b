"""``make gpu`` runs on the CPU, small: every part measures all of its cells, and what is wrong in a cell is said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import cells as table
from benchmarks.gpu.__main__ import PARTS
from benchmarks.gpu.results import Results
from benchmarks.gpu.tables import BEGIN, END, write_readme

ROOT = Path(__file__).parents[2]


def rehearse(folder: Path, *more: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--out", str(folder), *more]
    run = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert "Cells: " in run.stdout, run.stdout + run.stderr
    return run.returncode, json.loads((folder / "results.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_rehearsal_of_all_parts_is_right(tmp_path: Path) -> None:
    status, found = rehearse(tmp_path)
    rows = {(part, cell): row for part, each in found["parts"].items() for cell, row in each.items()}
    bad = {key: (row["status"], row.get("why")) for key, row in rows.items() if row["status"] not in ("ok", "n/a")}
    assert not bad and status == 0
    assert set(found["parts"]) == set(PARTS)
    cells = found["parts"]["table"]
    assert list(cells) == table.names(rehearse=True)
    right = [row for row in cells.values() if row["status"] == "ok"]
    assert len(right) == len(cells) - 2  # the perceptron has neither images nor tokens
    assert all(row["error"] < 1e-9 and row["proven"] == "proven" for row in right)
    assert {cell for cell, row in cells.items() if row["status"] == "n/a"} == {
        "MLP | chunked loss",
        "MLP | 2 x 2 tiles",
    }
    assert all(row["ms"] > 0 and row["ratio"] > 0 for row in found["parts"]["speed"].values())
    ours = [row for name, row in found["parts"]["speed"].items() if "pm.step" in name]
    assert all(row["ms_predicted"] > 0 and row["peak_predicted"] > 0 for row in ours)
    memory = found["parts"]["memory"]
    assert all(row["moved"] > 0 and row["link_ratio"] > 0 for name, row in memory.items() if "offload" in name)
    assert all(row["error"] < 1e-9 for row in found["parts"]["nccl"].values() if "error" in row)
    assert found["parts"]["machine"]["Machine.measure()"]["flops"]["float32"] > 0
    page = tmp_path / "README.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_readme(Results.load(tmp_path / "results.json"), page)
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n") and text.endswith(f"{END}\nafter\n") and "old" not in text
    assert "| dp2 x tp2 |" in text
