"""rematerialize-unpacks: received rows are laid beside a tile once more for the backward, where the tile waits for it
anyway.

    rows = pack.unpack_rows(x, got, ...)             rows = pack.unpack_rows(x, got, ...)
    y = aten.convolution(rows, w)                    y = aten.convolution(rows, w)         rows are gone behind it
    z = aten.relu(y)                           ->    z = aten.relu(y)
    gw = aten.convolution_backward(gy, rows)         again = pack.unpack_rows(x, got, ...)
    gx = aten.threshold_backward(g, x)               gw = aten.convolution_backward(gy, again)
                                                     gx = aten.threshold_backward(g, x)

An input, or a value that its own gradient needs, would else be held twice: as a rank's tile, and as that tile with the
rows of others. What waits now is the tile and those rows. Nothing is sent twice; the tile is copied once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from shardfx.ir.graph import Node, Phase
from shardfx.ir.ops import pack
from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.program.aliasing import aliased_inputs
from shardfx.ir.program.loops.loop_regions import regions
from shardfx.ir.program.rank_program import RankProgram

from .rank_pass import RankContext, RankPass

LEAST = 2
"""A tile with the rows beside it is to have so many times their bytes: of smaller ones there is little to win."""


@dataclass(frozen=True)
class RematerializeUnpacks(RankPass):
    """Lay received rows beside a tile once more where the backward needs them, and the tile itself later."""

    name: ClassVar[str] = "rematerialize-unpacks"
    requires: ClassVar[frozenset[str]] = frozenset({"WAITS_LATE"})

    def run(self, program: RankProgram, context: RankContext) -> bool:
        """Make the copies."""
        nodes = list(program.graph.nodes)
        wide = [node for node in nodes if node.target is pack.unpack_rows]
        if not wide:
            return False
        course = _Course(nodes)
        found = [(node, late) for node in wide if _is_worth_it(node, program) and (late := course.late(node))]
        for node, late in found:
            with program.graph.inserting_before(late[0]):
                again = program.graph.node_copy(node)
            node.replace_all_uses_with(again, lambda user, late=late: user in late)
        return bool(found)


class _Course:
    """Where the calls of a program stand, and where the backward begins in each of its loops."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self._place = {node: i for i, node in enumerate(nodes)}
        self._inside = regions(nodes)
        self._begin: dict[object, int] = {}
        for node in nodes:
            if _phase(node) is Phase.BACKWARD and any(_phase(x) is Phase.FORWARD for x in node.all_input_nodes):
                self._begin.setdefault(self._inside[node], self._place[node])

    def late(self, wide: fx.Node) -> list[fx.Node]:
        """What the backward needs a tile with the rows beside it for, first things first; nothing where it would be
        held in any case, or its tile would not."""
        here = self._inside[wide]
        begin = self._begin.get(here)
        if begin is None or any(self._inside[user] != here for user in wide.users):
            return []
        late = sorted((user for user in wide.users if self._place[user] >= begin), key=self._place.__getitem__)
        early = [user for user in wide.users if self._place[user] < begin]
        if not late or not early or any(self._last(user) >= begin for user in early if _shows(user, wide)):
            return []
        return late if self._stays(wide, self._place[late[0]]) else []

    def _stays(self, wide: fx.Node, at: int) -> bool:
        """Whether the tile is held up to a place, also where nothing lies beside it."""
        tile: Any = wide.args[0]
        while (seen := _seen(tile)) is not None:
            tile = seen
        return tile.op == "placeholder" or self._last(tile, wide) > at

    def _last(self, value: fx.Node, but: fx.Node | None = None) -> int:
        """The place of the last use of a value, or of what shows it; but for what another call gives of it."""
        places = [self._place[value]]
        for user in value.users:
            if user is not but:
                places.append(self._last(user, but) if _shows(user, value) else self._place[user])
        return max(places)


def _phase(node: fx.Node) -> Phase | None:
    made = node.meta.get("shardfx")
    return made.phase if isinstance(made, Node) else None


def _shows(call: fx.Node, value: fx.Node) -> bool:
    """Whether the result of a call may lie in the memory of a value."""
    return value in aliased_inputs(call, row_of(call.target) if call.op == "call_function" else None)


def _seen(value: fx.Node) -> fx.Node | None:
    """The one value whose memory this one may lie in, if there is one."""
    shared = aliased_inputs(value, row_of(value.target) if value.op == "call_function" else None)
    return shared[0] if len(shared) == 1 else None


def _is_worth_it(wide: fx.Node, program: RankProgram) -> bool:
    """Whether the rows beside a tile are few: by the most that any rank sends, which is the same on all of them."""
    made = wide.meta.get("shardfx")
    if not isinstance(made, Node):
        return False
    sent: float = made.op.sends(made, program.mesh).nbytes
    return LEAST * sent <= made.outs[0].local_bytes(program.mesh)
