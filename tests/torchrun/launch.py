"""Start the functions of :mod:`tests.torchrun.workers` (by :mod:`.fork`) on real processes, with a time limit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def on_ranks(processes: int, *calls: str, timeout: float = 150) -> str:
    """Let so many ranks make these calls (``worker:argument,argument``), one after the other."""
    return run(["-m", "tests.torchrun.fork", str(processes), *calls], timeout, ROOT)


def torchrun(processes: int, target: Sequence[str], timeout: float = 60, cwd: Path = ROOT) -> str:
    """Run ``torchrun TARGET`` on this machine."""
    return run(["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *target], timeout, cwd)


def run(arguments: Sequence[str], timeout: float, cwd: Path) -> str:
    """What python with these arguments printed; fails with that if it failed, or took too long."""
    more = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(cwd)}
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=cwd,
            env={**os.environ, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"no end after {timeout} s\n{error.output}") from None
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-8000:]}"
    return done.stdout
