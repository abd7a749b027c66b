"""interleave: where a loop axis says so, an iteration goes on while another one waits for other ranks.

    iterations = loop.begin('mb', 2, [w, b])             iterations = loop.begin('mb', 2, [w, b], 's0.0 s0.1 s1.0 s1.1')
    mm = aten.mm(shard, w)                          unit = loop.action(iterations, 's0')
    sent = c10d.all_reduce(mm, ...)                     mm = aten.mm(shard, w)
    done = c10d.wait_tensor(sent)              ->       sent = c10d.all_reduce(mm, ...)
    sum = aten.add(done, b)                         unit_1 = loop.action(iterations, 's1')
                                                        done = c10d.wait_tensor(sent)
                                                        sum = aten.add(done, b)

Iterations are split into units where they wait for what they started. The order of the units is that of a simulated
clock: what can begin first is done first, and of several the earliest iteration. It knows rough costs alone, which are
the same on all ranks, so that all come to one order.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import fx

from shardfx.ir.cost.node_cost import rough_cost
from shardfx.ir.errors import Error
from shardfx.ir.graph import Node
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.ops.loop import loop_ops
from shardfx.ir.ops.sends import is_comm
from shardfx.ir.ops.traits import is_view
from shardfx.ir.program.loops.loop_regions import ActionOrder, ActionStep, action_order, loop_end, loop_role, regions
from shardfx.ir.program.rank_program import RankProgram

from .rank_pass import RankContext, RankPass, planned_node, waits


@dataclass(frozen=True)
class Interleave(RankPass):
    """Interleave iterations of an axis ``Loop(..., interleave=True)``, at most ``copies`` at a time."""

    name: ClassVar[str] = "interleave"
    requires: ClassVar[frozenset[str]] = frozenset({"WAITS_LATE"})
    establishes: ClassVar[frozenset[str]] = frozenset({"INTERLEAVED"})

    copies: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.copies, int) or self.copies < 1:
            what, where = "so many iterations cannot be in flight", "interleave{copies=...}"
            raise Error(what, where=where, expected="an int of at least 1", got=self.copies)

    def run(self, program: RankProgram, context: RankContext) -> bool:
        """Split iterations into units, and order these."""
        mesh, changed = context.machine.connect(program.mesh), False
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
            head, units = _split(nodes, _Costs(context, mesh))
            if len(units) == 1:
                continue
            for number in reversed(head):
                begin.append(number)
            for place, unit in enumerate(units):
                with program.graph.inserting_before(unit.nodes[0]):
                    program.graph.call_function(loop_ops.action, (begin, f"s{place}"))
            order = _order(units, mesh[str(begin.args[0])].size, self.copies)
            begin.args = (*begin.args[:3], str(order))
            changed = True
        return changed


@dataclass
class _Segment:
    """A segment of an iteration: what it waits for first, for how long it computes, and what it starts meanwhile."""

    nodes: list[fx.Node] = field(default_factory=list)
    waits: list[fx.Node] = field(default_factory=list)
    seconds: float = 0.0
    starts: dict[fx.Node, tuple[object, float]] = field(default_factory=dict)
    """By what is started: the link that it goes over, and for how long."""


class _Costs:
    """How long calls take by the planned nodes that they are of, each of which counts once."""

    def __init__(self, context: RankContext, mesh: Mesh) -> None:
        self._machine, self._mesh = context.machine, mesh
        self._counted: set[Node] = set()

    def add(self, node: fx.Node, unit: _Segment, around: Iterable[fx.Node]) -> None:
        """A call is done in a unit, in loops within the iteration."""
        planned, row = planned_node(node), row_of(node.target)
        if planned is None:
            return
        if row is not None and row.starts:
            cost = rough_cost(planned, self._mesh)
            seconds = cost.sending(self._machine, self._mesh) + cost.copying(self._machine)
            unit.starts[node] = next(iter(cost.sent), None), seconds
        elif not is_comm(planned) and not is_view(planned) and planned not in self._counted:
            self._counted.add(planned)
            seconds = rough_cost(planned, self._mesh).computing(self._machine)
            for loop in around:
                seconds *= self._mesh[str(loop.args[0])].size
            unit.seconds += seconds


def _split(nodes: Sequence[fx.Node], costs: _Costs) -> tuple[list[fx.Node], list[_Segment]]:
    """The induction variables of a loop, which stand first, and its body split where it waits for what it started.

    Where that was started before all that is computed since the last split, nothing would be won by one more.
    """
    inside, head, units = regions(nodes), list[fx.Node](), [_Segment()]
    for node in nodes[1:]:
        around = [loop for loop in inside[node][1:] if loop_role(loop) == "opens"]
        if not around and loop_role(node) == "number":
            head.append(node)
            continue
        if not around and waits(node):
            source: Any = node.args[0]
            while source.target is operator.getitem:
                source = source.args[0]
            if source in units[-1].starts or units[-1].seconds:
                units.append(_Segment())
            units[-1].waits.append(source)
        units[-1].nodes.append(node)
        costs.add(node, units[-1], around)
    return head, units


def _order(units: Sequence[_Segment], count: int, copies: int) -> ActionOrder:
    """Which unit of which iteration is done next: what can begin first; of several, that of the first iteration."""
    words: list[ActionStep] = []
    left = list(range(count))
    place = dict.fromkeys(left, 0)
    done: dict[tuple[fx.Node, int], float] = {}
    free: dict[object, float] = {}
    now = 0.0

    def ready(iteration: int) -> float:
        return max((done.get((each, iteration), 0.0) for each in units[place[iteration]].waits), default=0.0)

    while left:
        iteration = min(left[:copies], key=lambda each: (max(now, ready(each)), each))
        unit = units[place[iteration]]
        now = max(now, ready(iteration)) + unit.seconds
        for started, (link, seconds) in unit.starts.items():
            free[link] = max(now, free.get(link, 0.0)) + seconds
            done[started, iteration] = free[link]
        words.append(ActionStep(f"s{place[iteration]}", iteration))
        place[iteration] += 1
        if place[iteration] == len(units):
            left.remove(iteration)
    return ActionOrder(tuple(words))
