"""The context of a measuring process, and its reports: one line of JSON per row, as soon as it is known."""

from __future__ import annotations

import json
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .device import Device

ROOT = Path(__file__).parents[2]
"""Of the repository."""
ROW, READY = "@row ", "@ready"
"""Beginnings of lines on stdout that the parent process reads; it logs all others."""


class NotApplicable(Exception):
    """A cell that has no meaning; says why."""


class Wrong(Exception):
    """A cell that ran, and gave other numbers than it should."""

    def __init__(self, why: str, row: dict[str, Any]) -> None:
        super().__init__(why)
        self.row = row


class OverTime(Exception):
    """A cell that took too long."""


@dataclass
class Context:
    """Of one process: the part and the cells that it measures, and with what.

    Args:
        seconds: until this process should be done.
        build_seconds: until a process that others wait for should be ready (:meth:`wait`).
        cell_seconds: that one cell may take.
        rehearse: small, on the CPU.
        folder: where files of this run lie.
    """

    part: str
    cells: Sequence[str]
    device: Device
    rehearse: bool
    seconds: float
    build_seconds: float
    cell_seconds: float
    folder: Path
    began: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds until this process should be done."""
        return self.seconds - (time.monotonic() - self.began)

    @property
    def build_left(self) -> float:
        """Seconds until others wait for this process."""
        return self.build_seconds - (time.monotonic() - self.began)

    def emit(self, cell: str, **fields: Any) -> None:
        """Report fields of a row; later ones are added to earlier ones."""
        print(ROW + json.dumps({"part": self.part, "cell": cell, **fields}), flush=True)

    def attempt(self, cell: str, measure: Callable[[], dict[str, Any]], seconds: float | None = None) -> bool:
        """Measure one cell, and report it whatever happens; gives whether it is as it should be. It is not begun
        where no time is left."""
        limit = min(self.cell_seconds if seconds is None else seconds, self.left)
        if limit < 1:
            return False
        self.emit(cell, status="running")
        start, fields = time.monotonic(), {}
        status, why, trace = "ok", "", ""
        try:
            with time_limit(limit):
                fields = measure()
        except NotApplicable as reason:
            status, why = "n/a", str(reason)
        except Wrong as wrong:
            status, why, fields = "wrong", str(wrong), wrong.row
        except Exception as error:  # a row says what happened, and the next cell is measured
            status, why, trace = "error", one_line(error), traceback.format_exc()
        taken = time.monotonic() - start
        self.emit(
            cell, status=status, why=why, seconds=round(taken, 2), **fields, **({"traceback": trace} if trace else {})
        )
        return status == "ok"

    def wait(self) -> dict[str, Any]:
        """Say that all is built, and wait until the machine is idle; gives what the parent says then."""
        print(READY, flush=True)
        line = sys.stdin.readline()
        return json.loads(line) if line.strip() else {}


def one_line(error: BaseException) -> str:
    """The kind of an error and the first lines of what it says."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:240]


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise :class:`OverTime` in the main thread after so many seconds."""

    def over(*_: Any) -> None:
        raise OverTime(f"took more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
