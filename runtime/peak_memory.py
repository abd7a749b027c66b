"""Peaks of compiled programs on CUDA, measured: which memory a compiler plans is known when it has run.

The second run of a program is measured, for the first compiles it and tunes kernels. What the process holds beside is
not counted. ``torch.cuda.reset_peak_memory_stats`` is called before that run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch

from shardfx.ir.program.rank_program import RankProgram

MEASURED_RUN = 2


class MeasuredPeaks:
    """By program the bytes that it held at its peak beyond what it was given."""

    def __init__(self) -> None:
        self._runs: WeakKeyDictionary[RankProgram, int] = WeakKeyDictionary()
        self._bytes: WeakKeyDictionary[RankProgram, int] = WeakKeyDictionary()

    def of(self, program: RankProgram | None) -> int | None:
        """The bytes; None where they are not known, or not yet."""
        return self._bytes.get(program) if program is not None else None

    @contextmanager
    def during(self, programs: Collection[RankProgram], device: torch.device) -> Iterator[None]:
        """Within, programs run on a device; one that has it for itself is measured."""
        program = next(iter(programs))
        runs = self._runs[program] = self._runs.get(program, 0) + 1
        if device.type != "cuda" or runs != MEASURED_RUN or len(programs) > 1:
            yield
            return
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield
        self._bytes[program] = torch.cuda.max_memory_allocated(device) - before
