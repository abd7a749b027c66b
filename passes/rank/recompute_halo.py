"""rematerialize-unpacks: a tile is joined with received halo rows again for the backward, where the tile is live
anyway.

    rows = pack.unpack_rows(x, got, ...)             rows = pack.unpack_rows(x, got, ...)
    y = aten.convolution(rows, w)                    y = aten.convolution(rows, w)         rows are freed behind it
    z = aten.relu(y)                           ->    z = aten.relu(y)
    gw = aten.convolution_backward(gy, rows)         again = pack.unpack_rows(x, got, ...)
    gx = aten.threshold_backward(g, x)               gw = aten.convolution_backward(gy, again)
                                                     gx = aten.threshold_backward(g, x)

An input, or a value that its own gradient needs, would else be stored twice: as a rank's tile, and as that tile with
its halo. Nothing is sent twice; the tile is copied once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from shardfx.ir.graph import Phase
from shardfx.ir.ops import pack
from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.program.aliasing import aliased_inputs
from shardfx.ir.program.loops.loop_regions import regions
from shardfx.ir.program.rank_program import RankProgram, planned_node

from .rank_pass import RankContext, RankPass

LEAST = 2
"""The minimum ratio of the bytes of a tile with halo to the halo's: of smaller ones there is little to save."""


@dataclass(frozen=True)
class RematerializeUnpacks(RankPass):
    """Join tiles with received halos once more for the backward, and the tile itself later."""

    name: ClassVar[str] = "rematerialize-unpacks"
    requires: ClassVar[frozenset[str]] = frozenset({"WAITS_LATE"})

    def run(self, program: RankProgram, context: RankContext) -> bool:
        nodes = list(program.graph.nodes)
        wide = [node for node in nodes if node.target is pack.unpack_rows]
        if not wide:
            return False
        liveness = _TileLiveness(nodes)
        found = [(node, late) for node in wide if _is_worth_it(node, program) and (late := liveness.late(node))]
        for node, late in found:
            with program.graph.inserting_before(late[0]):
                again = program.graph.node_copy(node)
            node.replace_all_uses_with(again, lambda user, late=late: user in late)
        return bool(found)


class _TileLiveness:
    """Positions of a program's calls, and the start of the backward in each of its loops."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self._place = {node: i for i, node in enumerate(nodes)}
        self._inside = regions(nodes)
        self._begin: dict[object, int] = {}
        for node in nodes:
            if _phase(node) is Phase.BACKWARD and any(_phase(x) is Phase.FORWARD for x in node.all_input_nodes):
                self._begin.setdefault(self._inside[node], self._place[node])

    def late(self, wide: fx.Node) -> list[fx.Node]:
        """The uses in the backward of a tile with its halo, in order; none if it is live anyway, or the bare tile is
        not."""
        here = self._inside[wide]
        begin = self._begin.get(here)
        if begin is None or any(self._inside[user] != here for user in wide.users):
            return []
        late = sorted((user for user in wide.users if self._place[user] >= begin), key=self._place.__getitem__)
        early = [user for user in wide.users if self._place[user] < begin]
        if not late or not early or any(self._last(user) >= begin for user in early if _shows(user, wide)):
            return []
        return late if self._is_live(wide, self._place[late[0]]) else []

    def _is_live(self, wide: fx.Node, at: int) -> bool:
        """Whether the bare tile is live up to a position anyway."""
        tile: Any = wide.args[0]
        while len(shared := aliased_inputs(tile, row_of(tile.target))) == 1:
            tile = shared[0]
        return tile.op == "placeholder" or self._last(tile, wide) > at

    def _last(self, value: fx.Node, but: fx.Node | None = None) -> int:
        """The position of the last use of a value, or of a view of it, not counting uses by the call ``but``."""
        places = [self._place[value]]
        for user in value.users:
            if user is not but:
                places.append(self._last(user, but) if _shows(user, value) else self._place[user])
        return max(places)


def _phase(node: fx.Node) -> Phase | None:
    planned = planned_node(node)
    return planned.phase if planned is not None else None


def _shows(call: fx.Node, value: fx.Node) -> bool:
    """Whether a call's result may alias a value."""
    return value in aliased_inputs(call, row_of(call.target))


def _is_worth_it(wide: fx.Node, program: RankProgram) -> bool:
    """Whether the halo is small: by the most that any rank sends, so that all ranks decide alike."""
    planned = planned_node(wide)
    if planned is None:
        return False
    sent: float = planned.op.sends(planned, program.mesh).nbytes
    return LEAST * sent <= planned.outs[0].local_bytes(program.mesh)
