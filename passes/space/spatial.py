"""spatial: how an image that is cut by height and width is computed, beyond the cut itself.

    64{h} of a map is exchanged before each convolution   ->   once for two of them, and a rim is computed twice

*merge* decides whether convolutions behind one another share one wider exchange (:mod:`.merge`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph
from shardfx.passes.base import SHARDED, Context, Pass

from .merge import merged
from .placing import Costs, Placing

MERGE = ("cost", "always", "never")


@dataclass(frozen=True)
class Spatial(Pass):
    """Where tiles of an image exchange rows.

    Args:
        merge: one wider exchange for several convolutions, whose rims ranks then compute twice: ``"cost"`` where that
            takes less time by the mesh's links and the machine, ``"always"`` where it saves an exchange, or
            ``"never"``.

    Example::

        Hints(args=(x,), specs={"args.0": "-, -, h, w"}, passes=[sx.Spatial(merge="never")])
    """

    name: ClassVar[str] = "spatial"
    requires: ClassVar[frozenset[str]] = frozenset({SHARDED})

    merge: str = "cost"

    def __post_init__(self) -> None:
        if self.merge not in MERGE:
            raise Error(
                "spatial cannot merge exchanges so",
                where="Spatial(merge=...)",
                expected=" or ".join(map(repr, MERGE)),
                got=repr(self.merge),
            )

    def run(self, graph: Graph, context: Context) -> bool:
        costs = Costs.of(graph, context.cache, context.planner, context.machine)
        never = Placing(costs)
        before = exchanges(never)
        if not before or self.merge == "never":
            return False
        always = merged(costs, at_any_price=True)
        chosen = always if self.merge == "always" else min(never, always, merged(costs, False), key=Placing.total)
        after = exchanges(chosen)
        if after != before:
            graph.notes.append(f"{before} exchanges of rows between tiles became {after}: rims are computed twice")
        return chosen.write()


def exchanges(placing: Placing) -> int:
    """How many exchanges of rows there are."""
    return sum(len(placing.exchanges(value)) for value in placing.costs.graph.values())
