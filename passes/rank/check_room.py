"""check-room: a step looks whether all rows of experts had room before it writes anything.

    new = aten._fused_adamw_(w, ...)                room = experts.check_room(lost)
                                          ->        new = aten._fused_adamw_(w, ...)
    return (loss, lost, new)                        return (loss, room, new)

That is the one read of the device by the host in a step. A step that writes nothing is looked at when it is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from shardfx.ir.graph import OutputKind
from shardfx.ir.ops.experts.dispatch import check_room
from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.program.loops.loop_regions import loop_role
from shardfx.ir.program.rank_program import RankProgram

from .rank_pass import RankContext, RankPass, call_before, is_update, waits


@dataclass(frozen=True)
class CheckRoom(RankPass):
    """Check before the optimizer's step that experts had room for all rows."""

    name: ClassVar[str] = "check-room"

    def run(self, program: RankProgram, context: RankContext) -> bool:
        end = program.result()
        results: list[Any] = list(end.args[0])  # type: ignore[arg-type]
        counted = next((i for i, each in enumerate(program.outputs) if each.kind is OutputKind.OVERFLOW), None)
        if counted is None:
            return False
        lost = results[counted]
        calls = _behind_loops(program.graph, lost)
        first = next((node for node in calls if node.op == "call_function" and is_update(node)), None)
        if first is None:
            return False
        _move_before(lost, first)
        results[counted] = call_before(first, check_room, lost, like=lost)
        end.args = (tuple(results),)
        return True


def _behind_loops(graph: fx.Graph, lost: fx.Node) -> list[fx.Node]:
    """The nodes behind the loops that count what is lost: in and before them, an update makes values of its own."""
    nodes = [*graph.nodes]
    counted = nodes.index(lost.args[0] if waits(lost) else lost)
    ends = (at for at in range(counted, -1, -1) if loop_role(nodes[at]) == "closes")
    return nodes[next(ends, -1) + 1 :]


def _move_before(node: fx.Node, anchor: fx.Node) -> None:
    """Move a node, and what it is computed of, before another one; a wait may always be earlier."""
    place = {each: i for i, each in enumerate(anchor.graph.nodes)}
    late, found = [node], set[fx.Node]()
    while late:
        each = late.pop()
        if place[each] > place[anchor] and each not in found:
            row = row_of(each.target)
            assert row is None or row.group is None, f"{each} starts behind the optimizer's step"
            found.add(each)
            late += each.all_input_nodes
    for each in sorted(found, key=place.__getitem__):
        anchor.prepend(each)
