"""spatial: halo exchanges of images sharded by height and width are merged, and small maps sharded otherwise.

    halo of 64{h} exchanged before each convolution   ->   once for two of them, and its border is recomputed

*merge* decides whether consecutive convolutions share one wider halo exchange (:mod:`.merge_halos`), *leave* from which
layer on small maps are sharded by samples or channels instead (:mod:`.small_maps`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from shardfx.ir.graph import Graph
from shardfx.passes.base import SHARDED, Pass, PassContext
from shardfx.passes.pass_text import check_options
from shardfx.passes.replicated_spatial_ops import space_axes

from .merge_halos import merged
from .small_maps import left
from .trial_placement import PlacementCosts, TrialPlacement


@dataclass(frozen=True)
class Spatial(Pass):
    """Choose where tiles of an image exchange halos.

    Args:
        merge: one wider halo exchange for several convolutions, whose borders ranks then recompute: ``"cost"`` where
            that takes less time by the mesh's links and the machine, ``"always"`` where it saves an exchange, or
            ``"never"``.
        leave: the layer from which on maps that are no larger than its input are sharded by samples or channels, or
            not at all, whichever takes least time: the path of a module; or ``"cost"``, for the maps for which that
            takes less time than to stay.

    Example::

        Hints(args=(x,), specs={"args.0": "-, -, h, w"}, passes=[sx.images.Spatial(merge="never")])
    """

    name: ClassVar[str] = "spatial"
    requires: ClassVar[frozenset[str]] = frozenset({SHARDED})

    merge: Literal["cost", "always", "never"] = "cost"
    leave: str | None = None

    def __post_init__(self) -> None:
        check_options(self)

    def run(self, graph: Graph, context: PassContext) -> bool:
        never = TrialPlacement(PlacementCosts(graph, context))
        if self.leave is not None:
            never, said = left(never, self.leave, space_axes(graph))
            graph.notes += [said] if said else []
        before, chosen = _exchanges(never), never
        if before and self.merge != "never":
            always = merged(never, at_any_cost=True)
            options = (never, always, merged(never, at_any_cost=False)) if self.merge == "cost" else (always,)
            chosen = min(options, key=TrialPlacement.total)
        after = _exchanges(chosen)
        if after != before:
            graph.notes.append(f"{before} halo exchanges became {after}: their borders are recomputed")
        return chosen.write()


def _exchanges(placement: TrialPlacement) -> int:
    return sum(len(placement.exchanges(value)) for value in placement.costs.graph.values())
