"""Looking at a parallel module while it runs: for what is not finite, and at the clock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from shardfx.runtime.engine import Probe
from shardfx.runtime.nan_debug import NanDebug
from shardfx.runtime.recording import Recording
from shardfx.schedules.timeline import recorded

from .planned_module import PlannedModule


class WatchedModule(PlannedModule):
    """A model whose programs show what they do while they run."""

    _watch: Probe | None
    """What looks at each call; nothing does by default, and that costs nothing."""

    @contextmanager
    def debug_nan(self, *, inf: bool = True) -> Iterator[None]:
        """Stop at the first node that makes a NaN or an inf from finite numbers, in forward or backward, on any rank::

            with pm.debug_nan():
                loss = pm(x, y)

        The error names the rank, the node, module path and source line, and what went into it (shapes, smallest and
        largest number). "First" is by the order of the program, over all ranks. Parameters, buffers and inputs that
        hold NaN already are named as such; infinities that the model writes down itself, as in a mask, are let
        through. Every result is looked at, so a step takes some times longer; outside of the context it costs nothing.

        Under ``torchrun`` all ranks open it; the rank that finds something raises that, and the others end with it.

        Args:
            inf: whether an infinity counts, too.

        Raises:
            Error: when something is found.
        """
        before, self._watch = self._watch, NanDebug(inf)
        try:
            yield
        finally:
            self._watch = before

    def record(self, path: str | Path) -> AbstractContextManager[Recording]:
        """Measure steps: a trace for ui.perfetto.dev of what each rank does when, as :meth:`timeline` foresees it::

            with pm.record("measured.json") as recording:
                pm(x, y).backward()
            print(recording.step, recording.bubble)

        The report then says both. Every call is looked at, which takes some microseconds each. Under ``torchrun`` all
        ranks open it, and rank 0 writes.
        """
        return recorded(self, path)
