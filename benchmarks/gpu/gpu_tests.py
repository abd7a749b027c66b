"""The tests that need a GPU, by pytest in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from typing import Any

from .context import ROOT, Context, Wrong

CELL = "pytest -m gpu"
WORKERS = min(8, os.cpu_count() or 1)
OUTCOME = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
LINE = re.compile(r"(?:\[gw\d+\].*)?(tests/\S+::\S+)")


def names(rehearse: bool) -> list[str]:
    return [CELL]


def run(context: Context) -> None:
    context.attempt(CELL, lambda: measure(context), context.left)


def command(files: list[str]) -> list[str]:
    """pytest without what a machine may lack (pytest-timeout) or that gets in the way (pytest-benchmark)."""
    parallel = ["-n", str(WORKERS)] if importlib.util.find_spec("xdist") else []
    options = ["-m", "gpu", "-v", "--tb=short", "-p", "no:benchmark", "-p", "no:cacheprovider", "-o", "addopts=-rfE"]
    options += ["-W", "ignore::pytest.PytestConfigWarning"]
    return [sys.executable, "-m", "pytest", *options, *parallel, *files]


def measure(context: Context) -> dict[str, Any]:
    """Counts of outcomes, and the names of failures; reported as they come.

    Raises:
        Wrong: a test failed, or none ran.
    """
    files = [
        str(p.relative_to(ROOT)) for p in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in p.read_text()
    ]
    counts: Counter[str] = Counter()
    failures: list[str] = []
    tail: list[str] = []
    with subprocess.Popen(
        command(files), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            tail = [*tail[-40:], line]
            test, outcome = LINE.match(line), OUTCOME.search(line)
            if test and outcome:
                counts[outcome[1].lower()] += 1
                if outcome[1] in ("FAILED", "ERROR"):
                    failures.append(test[1])
                context.emit(CELL, counts=dict(counts), failures=failures)
    row = {"counts": dict(counts), "failures": failures, "tail": "".join(tail)}
    if process.returncode != 0 or not counts:
        raise Wrong(f"pytest exited with {process.returncode}; failed: {', '.join(failures)[:200] or 'none'}", row)
    return row
