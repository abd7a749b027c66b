"""``make gpu``: correctness and speed of shardfx on the GPU of this machine, in at most six minutes, whatever fails.

    python -m benchmarks.gpu [--out out/gpu] [--seconds 360] [--parts tests table nccl speed machine memory]
    python -m benchmarks.gpu --rehearse                       # all of it small, on the CPU
    python -m benchmarks.gpu --readme out/gpu/results.json    # its tables into README.md

It needs torch, triton, transformers and pytest. Everything is measured in processes of their own, each part within a
share of the time. Rows are printed as they come, and kept in ``results.json``; at the end the tables are printed, and
the exit status is 1 where a cell is not as it should be.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from .context import ROOT
from .plans import COMPILED
from .processes import Worker, wait_for
from .results import Results
from .speed import GROUPS, drive
from .tables import REHEARSAL, as_text, write_readme


@dataclass(frozen=True)
class Part:
    """A part of the run.

    Args:
        module: of this package, with ``names(rehearse)`` and ``run(context)``.
        until: the share of the whole time at which it ends; what earlier parts leave is left to it.
        alone: measures time, and wants the machine for itself; the others run beside one another before.
        cell: the share of the whole time that one cell may take.
        spread: its cells are shared among several processes: what one compiles, and the rest of each row.
        each: each of its cells has a process of its own.
        threads: that Inductor compiles with, in each process.
        nice: how far its processes stand back behind others.
    """

    module: str
    until: float
    alone: bool = False
    cell: float = 0.12
    spread: bool = False
    each: bool = False
    threads: int = 2
    nice: int = 0

    @property
    def path(self) -> str:
        """The module's name."""
        return f"{__package__}.{self.module}"


PARTS = {
    "tests": Part("gpu_tests", 0.53, nice=5),
    "table": Part("cells", 0.53, spread=True, cell=0.3, nice=10),
    "nccl": Part("nccl", 0.5, nice=10),
    "speed": Part("speed", 0.82, cell=0.5, threads=6, each=True),
    "machine": Part("machine", 0.64, alone=True),
    "memory": Part("offload", 0.97, alone=True),
}
"""In order. ``speed`` is built beside the others (it compiles), and waits until the machine is measured."""
ENDING = 5.0
"""Seconds within which processes that are ended should have gone."""
BUILT = 0.54
"""The share of the time at which ``speed`` stops building and measures what it has."""


def facts(device: str) -> dict[str, Any]:
    """What the tables say of the machine."""
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": date.today().isoformat(),
    }
    if device != "cuda":
        return found | {"card": REHEARSAL}
    found |= {"card": torch.cuda.get_device_name(0), "cuda": torch.version.cuda}
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        said = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
        found |= {"driver": said[0]} if said else {}
    return found


class Run:
    """One run of some parts."""

    def __init__(self, folder: Path, rehearse: bool, seconds: float, parts: list[str]) -> None:
        self.folder, self.rehearse, self.seconds = folder, rehearse, seconds
        self.device = "cpu" if rehearse else "cuda"
        self.began = time.monotonic()
        self.parts = {name: part for name, part in PARTS.items() if name in parts}
        self.results = Results(folder / "results.json", {**facts(self.device), "seconds": seconds})
        self.workers: list[Worker] = []

    def at(self, share: float) -> float:
        """The time at a share of the whole."""
        return self.began + share * self.seconds

    def start(self, name: str) -> list[Worker]:
        """Start the processes of a part."""
        part = self.parts[name]
        cells = self._cells[name]
        groups = [[cell] for cell in cells] if part.each else [cells]
        if part.spread:
            by_row: dict[tuple[bool, str], list[str]] = {}
            for cell in cells:
                row, column = cell.split(" | ")
                by_row.setdefault((column == COMPILED, row), []).append(cell)
            rows, count = list(by_row.values()), min(len(by_row), max(1, (os.cpu_count() or 2) - 2))
            groups = [[cell for row in rows[i::count] for cell in row] for i in range(count)]
        told: dict[str, Any] = {"part": name, "device": self.device, "rehearse": self.rehearse}
        told |= {
            "threads": part.threads,
            "nice": part.nice,
            "until": self.at(part.until),
            "ready_by": self.at(BUILT),
            "cell_seconds": part.cell * self.seconds,
        }
        made = [Worker(self.results, self.folder, part.path, i, cells=group, **told) for i, group in enumerate(groups)]
        self.workers += made
        return made

    def run(self) -> None:
        """All parts: those that go together first, then those that measure time."""
        self._cells = {
            name: importlib.import_module(part.path).names(self.rehearse) for name, part in self.parts.items()
        }
        for name, cells in self._cells.items():
            self.results.expect(name, cells)
        beside = {name: self.start(name) for name, part in self.parts.items() if not part.alone}
        speed = dict(zip(self._cells["speed"], beside["speed"], strict=True)) if "speed" in beside else {}
        first = [speed[name] for name in GROUPS[0] if name in speed]
        others = [worker for name, each in beside.items() if name != "speed" for worker in each]
        wait_for([*others, *first], self.at(BUILT), ready=first)
        for name, part in self.parts.items():
            if part.alone and name != "memory":
                wait_for(self.start(name), self.at(part.until))
        if speed:
            machine = self.folder / "machine.json"
            until = self.at(PARTS["speed"].until)
            drive(speed, self.results, str(machine) if machine.exists() else "", self.rehearse, until)
            wait_for([*speed.values()], until)
        if "memory" in self.parts:
            wait_for(self.start("memory"), self.at(self.parts["memory"].until))

    def end(self) -> None:
        """End what still runs, within seconds: what a process that was killed has started may keep its pipe."""
        for worker in self.workers:
            worker.end("the run ended")
        until = time.monotonic() + ENDING
        for worker in self.workers:
            worker.join(max(0.0, until - time.monotonic()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="small, on the CPU")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu", help="folder of results.json and logs")
    parser.add_argument("--seconds", type=float, help="for all of it: 360, and 900 rehearsed")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--readme", type=Path, nargs="+", metavar="RESULTS", help="write their tables into README.md")
    given = parser.parse_args()
    if given.readme is not None:
        found = Results.load(*given.readme)
        if found.facts.get("card") == REHEARSAL:
            print("these results are of a rehearsal, whose figures are of no GPU")
            return 2
        write_readme(found, ROOT / "README.md")
        return 0
    if not given.rehearse and not torch.cuda.is_available():
        print("torch.cuda is not available: --rehearse runs all of it small on the CPU")
        return 2
    given.out.mkdir(parents=True, exist_ok=True)
    for stale in [*given.out.glob("*.log"), given.out / "machine.json"]:
        stale.unlink(missing_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run = Run(given.out, given.rehearse, given.seconds or (900.0 if given.rehearse else 360.0), given.parts)
    try:
        run.run()
    finally:
        run.end()
        print(as_text(run.results), flush=True)
    return int(bool(run.results.bad))


if __name__ == "__main__":
    sys.exit(main())
