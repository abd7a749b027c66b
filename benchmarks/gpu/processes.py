"""Isolated measuring processes: a crash, hang or kill of one does not end the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from .context import READY, ROOT, ROW
from .results import RUNNING, Results

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class Worker:
    """A process that measures cells of one part; it is started again behind a cell that ended it."""

    def __init__(
        self,
        results: Results,
        folder: Path,
        module: str,
        number: int,
        until: float,
        ready_by: float,
        threads: int = 2,
        nice: int = 0,
        **told: Any,
    ) -> None:
        """``told`` are the fields of :class:`.context.Context`, without times; ``until`` and ``ready_by`` are moments
        of ``time.monotonic()``, and ``nice`` is the priority of the process."""
        self.results, self.part, self.cells = results, str(told["part"]), list(told["cells"])
        self.ready = threading.Event()
        self._told = {**told, "module": module, "folder": str(folder)}
        self._until, self._ready_by, self._threads, self._nice = until, ready_by, threads, nice
        self._log = folder / f"{self.part}-{number}.log"
        self._process: subprocess.Popen[str] | None = None
        self._killed = ""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def tell(self, **what: Any) -> None:
        """Send it a line, which it waits for; an empty one ends it."""
        if self._process is not None and self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.write((json.dumps(what) if what else "") + "\n")
            self._process.stdin.flush()

    def ask(self, **what: Any) -> None:
        """Send it a line; it is ready again when it has done what that says."""
        if not self.done:
            self.ready.clear()
        self.tell(**what)

    def check(self) -> None:
        """End it if its time is over."""
        if time.monotonic() > self._until and not self.done:
            self.end("its time was over")

    def end(self, why: str) -> None:
        """Kill it, and all that it started."""
        if not self.done and not self._killed:
            self._killed = why
            self.results.note(f"{self.part}: {why}")
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def join(self, seconds: float = 10.0) -> None:
        self._thread.join(seconds)

    # ---- in the thread

    def _run(self) -> None:
        left = self.cells
        while left and not self._killed:
            code = self._once(left)
            reached = [cell for cell in left if self.results.status(self.part, cell) != "not reached"]
            for cell in reached:
                if self.results.status(self.part, cell) == RUNNING:
                    why = self._killed or f"the process ended with {_name(code)}"
                    self.results.add(self.part, cell, {"status": "died", "why": why, "traceback": self._end_of_log()})
            left = [cell for cell in left if cell not in reached]
            if not reached and left and not self._killed:
                why = f"the process ended with {_name(code)} before it began"
                self.results.add(self.part, left[0], {"status": "died", "why": why, "traceback": self._end_of_log()})
                break
        self.ready.set()

    def _once(self, cells: list[str]) -> int:
        told = {**self._told, "cells": cells, "seconds": self._until - time.monotonic()}
        told["build_seconds"] = self._ready_by - time.monotonic()
        command = ["nice", "-n", str(self._nice), sys.executable, "-m", f"{__package__}.worker", json.dumps(told)]
        threads = {"TORCHINDUCTOR_COMPILE_THREADS": str(self._threads)}
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, **ENVIRONMENT, **threads, "PYTHONPATH": path}
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}
        with (
            self._log.open("a", encoding="utf-8") as log,
            subprocess.Popen(command, cwd=ROOT, env=env, stderr=log, **pipes) as process,
        ):
            self._process = process
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(ROW):
                    row = json.loads(line.removeprefix(ROW))
                    self.results.add(row.pop("part"), row.pop("cell"), row)
                elif line.strip() == READY:
                    self.ready.set()
                else:
                    log.write(line)
                    log.flush()
        return int(process.returncode)

    def _end_of_log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-4000:]


def _name(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"


def wait_for(workers: list[Worker], until: float, ready: Collection[Worker] = ()) -> None:
    """Wait until workers are done (some of them: until they are ready), or their time is over."""
    while time.monotonic() < until + 2 and not all(w.done or (w in ready and w.ready.is_set()) for w in workers):
        for worker in workers:
            if worker not in ready:
                worker.check()
        time.sleep(0.1)
