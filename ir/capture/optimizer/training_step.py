"""The step behind the backward: gradients unscaled and clipped, and the optimizer's update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from shardfx.ir.capture.canonical.mixed_precision import LossScale
from shardfx.ir.graph import Graph
from shardfx.ir.unfolding.regular import IrregularBlocks
from shardfx.ir.unfolding.unfold import check_regular, unfold

from .emit_update import write_update
from .gradient_scaling import adapt, clip_gradients, skip_overflow, unscale_gradients
from .optimizer_groups import Factory
from .update_spec import CounterState, UpdateSpec

APART = "repeated blocks were planned one by one, which takes longer"


@dataclass(frozen=True)
class TrainingStep:
    """The part of a step after the backward: the loss scale, the maximum norm of all gradients, the optimizer, and its
    scheduled options."""

    scale: float | LossScale | None
    clip: float | None
    optimizer: Factory | None
    scheduled: Sequence[str] = ()

    def write(self, graph: Graph, model: Mapping[str, nn.Parameter]) -> tuple[Graph, UpdateSpec | None, str]:
        """Emit it into a captured graph.

        Gives the graph, what it has of an optimizer, and a note. It is another graph, with all blocks, where some were
        left out that are not alike in this.

        Raises:
            Error: the optimizer cannot be traced, or does something else than its trace.
        """
        bare = graph.copy() if graph.repeats else graph
        try:
            update = self._write(graph, model)
            check_regular(graph)
            return graph, update, ""
        except IrregularBlocks as error:
            unfold(bare)
            return bare, self._write(bare, model), f"{APART} ({error.what})"

    def _write(self, graph: Graph, model: Mapping[str, nn.Parameter]) -> UpdateSpec | None:
        self.write_gradients(graph)
        if self.optimizer is None:
            return None
        update = write_update(graph, self.optimizer, model, self.scheduled)
        return replace(update, counts={**update.counts, **self.skip_and_adapt(graph)})

    def write_gradients(self, graph: Graph) -> None:
        """Emit the unscaling and clipping of gradients."""
        if self.scale is not None:
            unscale_gradients(graph, self.scale)
        if self.clip is not None:
            clip_gradients(graph, self.clip)

    def skip_and_adapt(self, graph: Graph) -> Mapping[str, CounterState]:
        """Emit, behind an update, that a step which overflows is skipped, and the update of the scale; returns its
        initial states."""
        if self.scale is None:
            return {}
        finite = skip_overflow(graph)
        return adapt(graph, finite, self.scale) if isinstance(self.scale, LossScale) else {}
