"""Work in a process of its own, with a limit of time and memory: a kernel that does not check what it is given may
crash the process that runs it."""

from __future__ import annotations

import faulthandler
import os
import pickle
import resource
import select
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

import torch

T = TypeVar("T")
MEMORY = Path("/proc/self/statm")
"""Where Linux says how many pages a process has; elsewhere there is no limit of memory."""


class Lost(Exception):
    """The work gave no result: the process crashed, or its time or memory was up."""


def isolated(work: Callable[[], T], seconds: float = 60.0, megabytes: int = 4096) -> T:
    """The result of ``work()``, run in a fork of this process.

    Args:
        work: its result can be pickled, and it computes on the CPU alone.
        seconds: by the clock on the wall.
        megabytes: of memory, beyond what this process has.

    Raises:
        Lost: the process ended without a result, or did not end in time.
    """
    reads, writes = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the fork computes with one
        child = os.fork()
    if child == 0:
        os.close(reads)
        _work_and_exit(work, writes, megabytes)
    os.close(writes)
    answer: bytes | None = None
    try:
        answer = _read(reads, time.monotonic() + seconds)
    finally:
        os.close(reads)
        if answer is None:
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    if answer is None:
        raise Lost(f"no answer within {seconds:g} s")
    if status != 0 or not answer:
        by = f" by {signal.Signals(os.WTERMSIG(status)).name}" if os.WIFSIGNALED(status) else ""
        raise Lost(f"the process was ended{by}")
    good, made = pickle.loads(answer)
    if not good:
        raise Lost(made)
    result: T = made
    return result


def _read(reads: int, deadline: float) -> bytes | None:
    """All that comes; None where its end does not come in time."""
    found = b""
    while select.select([reads], [], [], max(deadline - time.monotonic(), 0))[0]:
        more = os.read(reads, 1 << 16)
        if not more:
            return found
        found += more
    return None


def _work_and_exit(work: Callable[[], T], writes: int, megabytes: int) -> NoReturn:
    """The fork: it works with one thread, prints nothing, and exits without cleaning up what is not its own."""
    status = 1
    try:
        faulthandler.disable()
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if MEMORY.exists():
            has = int(MEMORY.read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (has + (megabytes << 20), resource.RLIM_INFINITY))
        torch.set_num_threads(1)
        try:
            answer = pickle.dumps((True, work()))
        except Exception as error:  # told to the caller
            answer = pickle.dumps((False, f"{type(error).__name__}: {error}"))
        with os.fdopen(writes, "wb") as file:
            file.write(answer)
        status = 0
    finally:
        os._exit(status)
