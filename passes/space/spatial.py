"""spatial: how an image that is sharded by height and width is computed, beyond the sharding itself.

    64{h} of a map is exchanged before each convolution   ->   once for two of them, and a rim is computed twice

*merge* decides whether convolutions behind one another share one wider exchange (:mod:`.merge`), *leave* from which
layer on small maps are shared by samples or channels instead (:mod:`.leave`), *overlap* whether inner rows are computed
by themselves while others are exchanged (:mod:`.overlap`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph
from shardfx.passes.base import SHARDED, Context, Pass
from shardfx.passes.gathered_space import space_axes

from .leave import left
from .merge import merged
from .overlap import overlapped
from .placing import Costs, Placing

MERGE, OVERLAP = ("cost", "always", "never"), (False, True, "cost")


@dataclass(frozen=True)
class Spatial(Pass):
    """Where tiles of an image exchange rows.

    Args:
        merge: one wider exchange for several convolutions, whose rims ranks then compute twice: ``"cost"`` where that
            takes less time by the mesh's links and the machine, ``"always"`` where it saves an exchange, or
            ``"never"``.
        leave: the layer from which on maps that are no larger than what goes into it are sharded by samples or
            channels, or not at all, whichever takes least time: the path of a module; or ``"cost"``, for the maps for
            which that takes less time than to stay.
        overlap: an exchange under way while a convolution computes the rows that need nothing of it. Its result is made
            in pieces, which are joined: that is worth it where a link takes longer than to copy the result once more.
            ``"cost"``: for the convolutions for which it is, by the mesh's links and the machine.

    Example::

        Hints(args=(x,), specs={"args.0": "-, -, h, w"}, passes=[sx.images.Spatial(merge="never")])
    """

    name: ClassVar[str] = "spatial"
    requires: ClassVar[frozenset[str]] = frozenset({SHARDED})

    merge: str = "cost"
    leave: str | None = None
    overlap: bool | str = False

    def __post_init__(self) -> None:
        for name, known in (("merge", MERGE), ("overlap", OVERLAP)):
            if getattr(self, name) not in known:
                raise Error(
                    f"spatial cannot {name} so",
                    where=f"Spatial({name}=...)",
                    expected=" or ".join(map(repr, known)),
                    got=repr(getattr(self, name)),
                )

    def run(self, graph: Graph, context: Context) -> bool:
        never = Placing(Costs.of(graph, context.cache, context.planner, context.machine))
        if self.leave is not None:
            never, said = left(never, self.leave, space_axes(graph))
            graph.notes += [said] if said else []
        before, chosen = exchanges(never), never
        if before and self.merge != "never":
            always = merged(never, at_any_price=True)
            chosen = always if self.merge == "always" else min(never, always, merged(never, False), key=Placing.total)
        after = exchanges(chosen)
        if after != before:
            graph.notes.append(f"{before} exchanges of rows between tiles became {after}: rims are computed twice")
        changed = chosen.write()
        split = overlapped(Placing(chosen.costs), self.overlap == "cost") if self.overlap and after else 0
        if split:
            said = "1 op computes" if split == 1 else f"{split} ops compute"
            graph.notes.append(f"{said} the inner rows of tiles while those at their borders are exchanged")
        return changed or bool(split)


def exchanges(placing: Placing) -> int:
    """How many exchanges of rows there are."""
    return sum(len(placing.exchanges(value)) for value in placing.costs.graph.values())
