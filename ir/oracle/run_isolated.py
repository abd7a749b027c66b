"""Isolated runs in a subprocess with a time limit, since a kernel that does not check its arguments may crash."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import resource
import signal
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn, TypeVar

import torch

T = TypeVar("T")


class Lost(Exception):
    """The subprocess crashed or timed out."""


def isolated(work: Callable[[], T], seconds: float = 60.0, cpu_seconds: int | None = None) -> T:
    """The result of ``work()``, run in a forked subprocess.

    Args:
        work: computes on the CPU alone; its result must be picklable.
        seconds: wall-clock limit.
        cpu_seconds: limit of CPU time, independent of the load of the machine.

    Raises:
        Lost: the process ended without a result, or did not end in time.
    """
    reads, writes = multiprocessing.Pipe(duplex=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the fork computes with one
        child = os.fork()
    if child == 0:
        reads.close()
        _work_and_exit(work, writes, cpu_seconds)
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
    return made  # type: ignore[return-value]


def _work_and_exit(work: Callable[[], T], writes: Connection, cpu_seconds: int | None) -> NoReturn:
    """Run ``work`` in the fork: one thread, no output, and an exit without cleanup of the parent's resources."""
    try:
        faulthandler.disable()
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if cpu_seconds is not None:
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, resource.RLIM_INFINITY))
        torch.set_num_threads(1)
        try:
            writes.send((True, work()))
        except Exception as error:  # told to the caller
            writes.send((False, f"{type(error).__name__}: {error}"))
    finally:
        os._exit(0)
