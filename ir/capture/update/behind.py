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
from .stepped import Update
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
        if self.scale is not None:
            unscale_gradients(graph, self.scale)
        if self.clip is not None:
            clip_gradients(graph, self.clip)
        update = None
        if self.optimizer is not None:
            update = write_update(graph, self.optimizer, model, self.scheduled)
        if update is not None and self.scale is not None:
            finite = skip_overflow(graph)
            if isinstance(self.scale, LossScale):
                update = replace(update, counts={**update.counts, **adapt(graph, finite, self.scale)})
        return update
