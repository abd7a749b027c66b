"""Work in a process of its own, with a limit of time and memory: a kernel that is given what it does not check may
crash the process that it is run in."""

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
    """The work came to no end: the process crashed, or its time or memory was up."""


def apart(work: Callable[[], T], seconds: float = 60.0, megabytes: int = 4096) -> T:
    """What ``work()`` gives, run in a copy of this process; what it changes in memory stays there.

    Args:
        work: gives what can be pickled, and computes on the CPU alone.
        seconds: by the clock on the wall.
        megabytes: of memory, beside what this process has.

    Raises:
        Lost: the process ended without an answer, or did not end in time.
    """
    reads, writes = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the copy computes with one
        child = os.fork()
    if child == 0:
        os.close(reads)
        _work_and_end(work, writes, megabytes)
    os.close(writes)
    answer, in_time = b"", False
    try:
        answer, in_time = _read(reads, time.monotonic() + seconds)
    finally:
        os.close(reads)
        if not in_time:
            os.kill(child, signal.SIGKILL)
        ended = os.waitpid(child, 0)[1]
    if not in_time:
        raise Lost(f"no answer within {seconds:g} s")
    if ended != 0 or not answer:
        by = f" by {signal.Signals(os.WTERMSIG(ended)).name}" if os.WIFSIGNALED(ended) else ""
        raise Lost(f"the process was ended{by}")
    good, made = pickle.loads(answer)
    if not good:
        raise Lost(made)
    result: T = made
    return result


def _read(reads: int, deadline: float) -> tuple[bytes, bool]:
    """All that comes, and whether its end came in time."""
    found = b""
    while select.select([reads], [], [], max(deadline - time.monotonic(), 0))[0]:
        more = os.read(reads, 1 << 16)
        if not more:
            return found, True
        found += more
    return found, False


def _work_and_end(work: Callable[[], T], writes: int, megabytes: int) -> NoReturn:
    """The copy: it works with one thread, says nothing, and ends without cleaning up what is not its own."""
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
        except Exception as error:  # told to who asked
            answer = pickle.dumps((False, f"{type(error).__name__}: {error}"))
        with os.fdopen(writes, "wb") as file:
            file.write(answer)
        status = 0
    finally:
        os._exit(status)
