"""Measured steps as a trace: ``with pm.record("step.json"): ...``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from shardfx.runtime.debug.recording import Recording
from shardfx.runtime.distributed.groups import is_dry_run
from shardfx.runtime.engine import Watch

from .timeline import rank_tracks, trace_event, write_trace


class Watched(Protocol):
    """What runs programs, and shows them to a watch."""

    _watch: Watch | None
    _measured: Recording | None

    @property
    def this_rank(self) -> int | None:
        """The rank of this process; None where all ranks are here."""


@contextmanager
def recorded(module: Watched, path: str | Path) -> Iterator[Recording]:
    """Measure what a module runs within; ranks come together at the end, and the first one writes the trace."""
    before, recording = module._watch, Recording()
    module._watch = recording
    try:
        yield recording
    finally:
        module._watch = before
    everybody: list[Any] = [recording.rows()]
    if module.this_rank is not None and not is_dry_run():
        mine, everybody = everybody[0], [None] * dist.get_world_size()
        dist.all_gather_object(everybody, mine)
    recording.close(everybody)
    if recording.steps:
        module._measured = recording
    if not module.this_rank or is_dry_run():
        ranks, done = trace_of(recording)
        write_trace(path, rank_tracks(ranks), done)


def trace_of(recording: Recording) -> tuple[Sequence[int], list[dict[str, Any]]]:
    """The ranks, and what each did in all steps."""
    ranks = sorted({rank for step in recording.steps for rank in step.rows})
    done = [
        trace_event(action, span, rank)
        for step in recording.steps
        for rank, row in step.rows.items()
        for action, span in row
    ]
    return ranks, done
