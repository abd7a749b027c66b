"""What stands behind the backward: gradients scaled back and clipped, and the optimizer's step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from shardfx.ir.capture.forms.loss_scaling import LossScale
from shardfx.ir.graph import Graph
from shardfx.ir.unfolding.regular import Irregular
from shardfx.ir.unfolding.unfold import check_regular, unfold

from .clip import clip_gradients
from .loss_scale import adapt, skip_overflow, unscale_gradients
from .made_groups import Factory
from .stepped import Count, Update
from .written import write_update

APART = "repeated blocks were planned one by one, which takes longer"


@dataclass(frozen=True)
class Behind:
    """What is asked for: by what the loss was multiplied, the norm of all gradients at the most, the optimizer, and
    which of its options may change."""

    scale: float | LossScale | None
    clip: float | None
    optimizer: Factory | None
    scheduled: Sequence[str] = ()

    def write(self, graph: Graph, model: Mapping[str, nn.Parameter]) -> tuple[Graph, Update | None, str]:
        """Write it into a captured graph.

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
        except Irregular as error:
            unfold(bare)
            return bare, self._write(bare, model), f"{APART} ({error.what})"

    def _write(self, graph: Graph, model: Mapping[str, nn.Parameter]) -> Update | None:
        self.write_gradients(graph)
        if self.optimizer is None:
            return None
        update = write_update(graph, self.optimizer, model, self.scheduled)
        return replace(update, counts={**update.counts, **self.skip_and_adapt(graph)})

    def write_gradients(self, graph: Graph) -> None:
        """Write how gradients are scaled back and clipped."""
        if self.scale is not None:
            unscale_gradients(graph, self.scale)
        if self.clip is not None:
            clip_gradients(graph, self.clip)

    def skip_and_adapt(self, graph: Graph) -> Mapping[str, Count]:
        """Write behind an update that a step which overflows is none, and how the scale goes on; gives what the states
        of the scale begin with."""
        if self.scale is None:
            return {}
        finite = skip_overflow(graph)
        return adapt(graph, finite, self.scale) if isinstance(self.scale, LossScale) else {}
