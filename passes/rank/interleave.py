"""interleave: loop iterations overlap, one computing while another waits for other ranks.

    iterations = loop.begin('mb', 2, [w, b])             iterations = loop.begin('mb', 2, [w, b], 's0.0 s0.1 s1.0 s1.1')
    mm = aten.mm(shard, w)                          unit = loop.action(iterations, 's0')
    sent = c10d.all_reduce(mm, ...)                     mm = aten.mm(shard, w)
    done = c10d.wait_tensor(sent)              ->       sent = c10d.all_reduce(mm, ...)
    sum = aten.add(done, b)                         unit_1 = loop.action(iterations, 's1')
                                                        done = c10d.wait_tensor(sent)
                                                        sum = aten.add(done, b)

Iterations are split into units where they wait for what they started. Units of so many iterations as may be under way
at a time are done one after the other, each of another iteration.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.ops.loop import loop_ops
from shardfx.ir.ops.sends import is_comm
from shardfx.ir.ops.traits import is_view
from shardfx.ir.program.loops.loop_regions import ActionOrder, ActionStep, action_order, loop_end, loop_role, regions
from shardfx.ir.program.rank_program import RankProgram, planned_node
from shardfx.ir.timing.rank_tasks import started_call
from shardfx.passes.pass_text import check_options

from .rank_pass import RankContext, RankPass, waits


@dataclass(frozen=True)
class Interleave(RankPass):
    """Interleave iterations of an axis ``Loop(..., interleave=True)``, at most ``copies`` at a time."""

    name: ClassVar[str] = "interleave"
    requires: ClassVar[frozenset[str]] = frozenset({"WAITS_LATE"})
    establishes: ClassVar[frozenset[str]] = frozenset({"INTERLEAVED"})

    copies: int = 2

    def __post_init__(self) -> None:
        check_options(self, copies=1)

    def run(self, program: RankProgram, context: RankContext) -> bool:
        mesh, changed = program.mesh, False
        for begin in list(program.graph.nodes):
            if loop_role(begin) != "opens" or action_order(begin) or not mesh[str(begin.args[0])].interleave:
                continue
            nodes = list(begin.graph.nodes)
            nodes = nodes[nodes.index(begin) :]
            nodes = nodes[: loop_end(nodes, 0)]
            if any((row := row_of(node.target)) is not None and row.message for node in nodes):
                axis = begin.args[0]
                context.notes.append(f"iterations of {axis!r} are not interleaved: pipeline stages send within them")
                continue
            head, starts = _split(nodes)
            if len(starts) == 1:
                continue
            for number in reversed(head):
                begin.append(number)
            for place, start in enumerate(starts):
                with program.graph.inserting_before(start):
                    program.graph.call_function(loop_ops.action, (begin, f"s{place}"))
            order = _order(len(starts), mesh[str(begin.args[0])].size, self.copies)
            begin.args = (*begin.args[:3], str(order))
            changed = True
        return changed


def _split(nodes: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """The induction variables at the start of a loop, and the first nodes of the segments of its body, which is split
    where it waits for transfers.

    No split is made for a transfer that started before all compute since the last split: it would hide nothing.
    """
    inside, head, starts = regions(nodes), list[fx.Node](), list[fx.Node]()
    started, computes = set[fx.Node](), False
    for node in nodes[1:]:
        inner = any(loop_role(loop) == "opens" for loop in inside[node][1:])
        if not inner and loop_role(node) == "number":
            head.append(node)
            continue
        source = started_call(node.args[0]) if not inner and waits(node) else None
        if not starts or (source is not None and (source in started or computes)):
            starts.append(node)
            started, computes = set(), False
        planned, row = planned_node(node), row_of(node.target)
        if row is not None and row.starts:
            started.add(node)
        computes |= planned is not None and not is_comm(planned) and not is_view(planned)
    return head, starts


def _order(units: int, count: int, copies: int) -> ActionOrder:
    """The order of segments: next of the iteration that waits longest; a finished one makes room for another."""
    steps: list[ActionStep] = []
    running, later = deque((iteration, 0) for iteration in range(min(copies, count))), iter(range(copies, count))
    while running:
        iteration, place = running.popleft()
        steps.append(ActionStep(f"s{place}", iteration))
        if place + 1 < units:
            running.append((iteration, place + 1))
        elif (following := next(later, None)) is not None:
            running.appendleft((following, 0))
    return ActionOrder(tuple(steps))
