"""A captured model before and after its passes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shardfx.ir.capture.trace import Captured
from shardfx.ir.graph import Graph, OutputKind
from shardfx.ir.unfolding.unfold import unfolded
from shardfx.passes import Pass, PassContext
from shardfx.runtime.distributed.peers import Subjects, subjects

from .hints import Hints


@dataclass(frozen=True)
class Compiled:
    """A captured model before and after its passes."""

    hints: Hints
    captured: Captured
    after: Graph
    context: PassContext
    passes: tuple[Pass, ...]

    def subjects(self) -> Subjects:
        """What all ranks must have planned alike, as lines by subject."""
        update = self.captured.update
        groups = update.groups if update is not None else ()
        return subjects(self.captured.graph, self.after, {"the optimizer": [str(group.options) for group in groups]})

    @property
    def trains(self) -> bool:
        """Whether there is a loss."""
        return any(output.kind is OutputKind.LOSS for output in self.after.outputs)

    @property
    def has_gradients(self) -> bool:
        """Whether the plan is for training."""
        return any(output.kind is OutputKind.GRADIENT for output in self.after.outputs)

    @cached_property
    def before(self) -> Graph:
        """The captured graph with all its blocks."""
        return unfolded(self.captured.graph)
