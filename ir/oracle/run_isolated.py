"""Work in a process of its own, with a limit of time and memory: a kernel that does not check what it is given may
crash the process that runs it."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import resource
import signal
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch

T = TypeVar("T")
MEMORY = Path("/proc/self/statm")
"""Where Linux says how many pages a process has; elsewhere there is no limit of memory."""


class Lost(Exception):
    """The work gave no result: the process crashed, or its time or memory was up."""


def isolated(work: Callable[[], T], seconds: float = 60.0, megabytes: int = 4096, cpu_seconds: int | None = None) -> T:
    """The result of ``work()``, run in a fork of this process.

    Args:
        work: its result can be pickled, and it computes on the CPU alone.
        seconds: by the clock on the wall.
        megabytes: of memory, beyond what this process has.
        cpu_seconds: of computing: a busy machine does as much in them as an idle one.

    Raises:
        Lost: the process ended without a result, or did not end in time.
    """
    reads, writes = multiprocessing.Pipe(duplex=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the fork computes with one
        child = os.fork()
    if child == 0:
        reads.close()
        _work_and_exit(work, writes, megabytes, cpu_seconds)
    writes.close()
    answer: tuple[bool, Any] | None = (False, f"no answer within {seconds:g} s")
    try:
        answer = reads.recv() if reads.poll(seconds) else answer
    except (EOFError, OSError):  # it crashed
        answer = None
    reads.close()
    if answer is not None:
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    by = f" by {signal.Signals(os.WTERMSIG(status)).name}" if os.WIFSIGNALED(status) else ""
    good, made = answer or (False, f"the process was ended{by}")
    if not good:
        raise Lost(made)
    return made  # type: ignore[no-any-return]


def _work_and_exit(work: Callable[[], T], writes: Connection, megabytes: int, cpu_seconds: int | None) -> NoReturn:
    """The fork: it works with one thread, prints nothing, and exits without cleaning up what is not its own."""
    try:
        faulthandler.disable()
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if cpu_seconds is not None:
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, resource.RLIM_INFINITY))
        if MEMORY.exists():
            has = int(MEMORY.read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (has + (megabytes << 20), resource.RLIM_INFINITY))
        torch.set_num_threads(1)
        try:
            writes.send((True, work()))
        except Exception as error:  # told to the caller
            writes.send((False, f"{type(error).__name__}: {error}"))
    finally:
        os._exit(0)
