"""interleave: where an axis of iterations says so, an iteration goes on while another one waits for other ranks.

    iterations = loop.begin('mb', 2, [w, b])             iterations = loop.begin('mb', 2, [w, b], 's0.0 s0.1 s1.0 s1.1')
    mm = aten.mm(piece, w)                          unit = loop.action(iterations, 's0')
    sent = c10d.all_reduce(mm, ...)                     mm = aten.mm(piece, w)
    done = c10d.wait_tensor(sent)              ->       sent = c10d.all_reduce(mm, ...)
    sum = aten.add(done, b)                         unit_1 = loop.action(iterations, 's1')
                                                        done = c10d.wait_tensor(sent)
                                                        sum = aten.add(done, b)

Iterations are split into units where they wait for what they started; all else of them stays as it is. The order of the
units is that of a clock: what can begin first is done first, and of several the earliest iteration. It knows rough
costs alone, which are the same on all ranks, so that all come to one order.
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

from .rank_pass import RankContext, RankPass


@dataclass(frozen=True)
class Interleave(RankPass):
    """Do iterations of an axis ``Loop(..., interleave=True)`` side by side, at most ``copies`` at a time."""

    name: ClassVar[str] = "interleave"
    requires: ClassVar[frozenset[str]] = frozenset({"WAITS_LATE"})
    establishes: ClassVar[frozenset[str]] = frozenset({"INTERLEAVED"})

    copies: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.copies, int) or self.copies < 1:
            raise Error(
                "so many iterations cannot be under way",
                where="interleave{copies=...}",
                expected="an int of at least 1",
                got=self.copies,
            )

    def run(self, program: RankProgram, context: RankContext) -> bool:
        """Put units into iterations, and an order on them."""
        mesh, changed = context.machine.connect(program.mesh), False
        for begin in list(program.graph.nodes):
            if loop_role(begin) != "opens" or action_order(begin) or not mesh[str(begin.args[0])].interleave:
                continue
            if _between_stages(begin):
                axis = begin.args[0]
                context.notes.append(f"iterations of {axis!r} are done one behind the other: stages send within them")
                continue
            head, parts = _sharding(begin, context, mesh)
            if len(parts) == 1:
                continue
            for number in reversed(head):
                begin.append(number)
            for place, part in enumerate(parts):
                with program.graph.inserting_before(part.nodes[0]):
                    program.graph.call_function(loop_ops.action, (begin, f"s{place}"))
            order = _order(parts, mesh[str(begin.args[0])].size, self.copies)
            begin.args = (*begin.args[:3], str(order))
            changed = True
        return changed


def _between_stages(begin: fx.Node) -> bool:
    """Whether stages of a pipeline send one another something within iterations: they agreed on its order."""
    nodes = list(begin.graph.nodes)
    nodes = nodes[nodes.index(begin) :]
    rows = (row_of(node.target) for node in nodes[: loop_end(nodes, 0)])
    return any(row is not None and row.message for row in rows)


@dataclass
class _Part:
    """A stretch of an iteration: what it waits for first, for how long it computes, and what it starts meanwhile."""

    nodes: list[fx.Node] = field(default_factory=list)
    waits: list[fx.Node] = field(default_factory=list)
    seconds: float = 0.0
    starts: dict[fx.Node, tuple[object, float]] = field(default_factory=dict)
    """By what is started: the link that it goes over, and for how long."""


def _sharding(begin: fx.Node, context: RankContext, mesh: Mesh) -> tuple[list[fx.Node], list[_Part]]:
    """The numbers of the iterations, which stand first, and the iterations sharding where they wait for what they
    started.

    Where that was started before all that is computed since the last sharding, nothing would be won by one more.
    """
    nodes = list(begin.graph.nodes)
    nodes = nodes[nodes.index(begin) :]
    nodes = nodes[: loop_end(nodes, 0)]
    inside, clock = regions(nodes), _Prices(context, mesh)
    head: list[fx.Node] = []
    parts = [_Part()]
    for node in nodes[1:]:
        around = [loop for loop in inside[node][1:] if loop_role(loop) == "opens"]
        if not around and loop_role(node) == "number":
            head.append(node)
            continue
        row = row_of(node.target)
        if not around and row is not None and row.waits:
            source = _started(node)
            if source in parts[-1].starts or parts[-1].seconds:
                parts.append(_Part())
            parts[-1].waits.append(source)
        parts[-1].nodes.append(node)
        clock.add(node, parts[-1], around)
    return head, parts


def _started(wait: fx.Node) -> fx.Node:
    """What was started of which a result is waited for."""
    made: Any = wait.args[0]
    while made.target is operator.getitem:
        made = made.args[0]
    return made  # type: ignore[no-any-return]


class _Prices:
    """How long calls take by the plan's nodes that they are of, each of which counts once."""

    def __init__(self, context: RankContext, mesh: Mesh) -> None:
        self._machine, self._mesh = context.machine, mesh
        self._counted: set[Node] = set()

    def add(self, node: fx.Node, part: _Part, around: Iterable[fx.Node]) -> None:
        """A call is done in a part, in iterations within."""
        planned, row = node.meta.get("shardfx"), row_of(node.target)
        if not isinstance(planned, Node):
            return
        if row is not None and row.starts:
            cost = rough_cost(planned, self._mesh)
            seconds = cost.sending(self._machine, self._mesh) + cost.copying(self._machine)
            part.starts[node] = next(iter(cost.sent), None), seconds
        elif not is_comm(planned) and not is_view(planned) and planned not in self._counted:
            self._counted.add(planned)
            times = 1
            for loop in around:
                times *= self._mesh[str(loop.args[0])].size
            part.seconds += times * rough_cost(planned, self._mesh).computing(self._machine)


def _order(parts: Sequence[_Part], count: int, copies: int) -> ActionOrder:
    """Which part of which iteration is done next, by a clock: what can begin first; of several, that of the first
    iteration."""
    words: list[ActionStep] = []
    left = list(range(count))
    place = dict.fromkeys(left, 0)
    done: dict[tuple[fx.Node, int], float] = {}
    free: dict[object, float] = {}
    now = 0.0

    def ready(iteration: int) -> float:
        return max((done.get((each, iteration), 0.0) for each in parts[place[iteration]].waits), default=0.0)

    while left:
        iteration = min(left[:copies], key=lambda each: (max(now, ready(each)), each))
        part = parts[place[iteration]]
        now = max(now, ready(iteration)) + part.seconds
        for started, (link, seconds) in part.starts.items():
            free[link] = max(now, free.get(link, 0.0)) + seconds
            done[started, iteration] = free[link]
        words.append(ActionStep(f"s{place[iteration]}", iteration))
        place[iteration] += 1
        if place[iteration] == len(parts):
            left.remove(iteration)
    return ActionOrder(tuple(words))
