"""Start real processes, with a time limit: forked by a server (:mod:`.server`), one for each pytest process."""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
MORE = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}


class Server:
    """A process that has imported what ranks need, and forks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.torchrun.server"],
            cwd=ROOT,
            env={**os.environ, **MORE},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self.close)

    def run(self, module: str, arguments: Sequence[str], timeout: float, cwd: Path = ROOT) -> str:
        """What ``main(arguments)`` of a module printed; fails with that if it failed, or took too long."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "output"
            job = {"module": module, "arguments": list(arguments), "folder": str(cwd), "output": str(output)}
            print(json.dumps(job), file=self._process.stdin, flush=True)
            started = int(self._process.stdout.readline())
            late = threading.Timer(timeout, os.killpg, (started, signal.SIGKILL))
            late.start()
            code = int(self._process.stdout.readline())
            in_time = late.is_alive()
            late.cancel()
            printed = output.read_text()
        assert in_time, f"no end after {timeout} s\n{printed[-8000:]}"
        assert code == 0, f"exit code {code}\n{printed[-8000:]}"
        return printed

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


@functools.cache
def server() -> Server:
    """The one of this process."""
    return Server()


def on_ranks(processes: int, *calls: str, timeout: float = 150) -> str:
    """Let so many ranks call functions of :mod:`.workers` (``worker:argument,argument``), one after the other."""
    return server().run("fork", [str(processes), *calls], timeout)


def ended(*modes: str, timeout: float = 200) -> str:
    """How ranks end that fail on purpose (:mod:`.lost`)."""
    return server().run("lost", modes, timeout)


def torchrun(processes: int, target: Sequence[str], cwd: Path, timeout: float = 60) -> str:
    """Run ``torchrun TARGET`` as somebody does: in processes that have imported nothing."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *target]
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **MORE, "PYTHONPATH": str(cwd)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-8000:]}"
    return done.stdout
