"""The tasks of a rank, as the simulator sees its program: compute, start, wait, send and receive, each with its action.

    unit = loop.action(%micro-batches, "F0")
    mm = aten.mm(%shard, %w)                     compute of F0
    unit_1 = loop.action(%micro-batches, "B0")
    mm_1 = aten.mm(%wait_tensor, %w)             compute of B0
    done = loop.end(...)
    sum = c10d.all_reduce(%grad, "sum", ...)     start of U0

Loops with schedule actions name their actions. Other programs are split between forward and backward where this fits
the phases of the planned nodes best, as some of the backward may run among the forward. Calls behind the loop, such
as the reduction of its gradients, belong to the update; calls in front of it to no action. All iterations are
expanded, in program order; consecutive compute is merged into one task.

On NCCL each group of axes is a stream of its own, and a wait blocks the compute stream, not the host: communication is
hidden by compute between its start and its wait, and by nothing else.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any, Literal, NamedTuple

from torch import fx

from shardfx.ir.cost.footprint import Footprint
from shardfx.ir.cost.machine import Machine
from shardfx.ir.graph import Node, Phase
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.ops.sends import is_comm
from shardfx.ir.ops.traits import is_heavy
from shardfx.ir.program.loops.loop_regions import action_name, execution_order, loop_role, regions
from shardfx.ir.program.rank_program import RankProgram, planned_node
from shardfx.ir.schedule.actions import KINDS

BEFORE = ""
"""The kind of calls that run once, in front of the loop."""
RECEIVED = "R"
"""The kind of calls that receive messages of other ranks."""


class Purpose(NamedTuple):
    """The purpose of a call: an action kind (``F``, ``B``, ``I``, ``W``, ``U``) or one above, and its stage."""

    kind: str
    stage: int = 0


def main_loop(nodes: Sequence[fx.Node]) -> fx.Node | None:
    """The call that opens the loop in which most of a program's forward and backward runs; None if there is none."""
    inside = regions(nodes)
    if (action := next(filter(_names_action, nodes), None)) is not None:
        return inside[action][0]
    planned = ((node, planned_node(node)) for node in nodes)
    work = [node for node, made in planned if made and made.phase is not Phase.UPDATE and not is_comm(made)]
    sizes = Counter(inside[node][0] for node in work if inside[node])
    most = max(sizes, key=sizes.__getitem__, default=None)
    return most if most is not None and 2 * sizes[most] > len(work) else None


def purposes(nodes: Iterable[fx.Node]) -> dict[fx.Node, Purpose]:
    """The purpose of each call, in program order."""
    calls = [node for node in nodes if node.op == "call_function"]
    loop, inside = main_loop(calls), regions(calls)
    stage = _stage(calls)
    if loop is None:
        return _by_phase(calls, stage)
    first = calls.index(loop)
    behind = [place for place, node in enumerate(calls) if loop in inside[node]][-1] + 1
    found = dict.fromkeys(calls[: first + 1], Purpose(BEFORE, stage))
    here = calls[first + 1 : behind]
    found |= _by_action(here) if any(map(_names_action, here)) else _by_phase(here, stage)
    return found | dict.fromkeys(calls[behind:], Purpose("U", stage))


def _stage(calls: Sequence[fx.Node]) -> int:
    """The stage of an update: the first that has actions, or the one with most calls."""
    actions = [int(name[1:]) for name in map(action_name, filter(_names_action, calls)) if name[0] in KINDS]
    counts = Counter(node.at[0] for node in map(planned_node, calls) if node is not None and node.at)
    return min(actions) if actions else max(counts, key=counts.__getitem__, default=0)


def _names_action(node: fx.Node) -> bool:
    """Whether a call begins an action of a schedule; other actions are segments of an interleaved iteration."""
    return loop_role(node) == "unit" and re.fullmatch(rf"R?[{''.join(KINDS)}]\d+|O", action_name(node)) is not None


def _by_action(calls: Sequence[fx.Node]) -> dict[fx.Node, Purpose]:
    """The purpose of each call by named actions: ``F0``; ``RB1`` receives what B1 sends, ``O`` sends outputs."""
    found, now = dict[fx.Node, Purpose](), Purpose(RECEIVED)
    for node in calls:
        if _names_action(node):
            kind, stage = action_name(node)[0], action_name(node)[1:]
            now = Purpose(kind, int(stage)) if kind in KINDS else Purpose(RECEIVED)
        found[node] = now
    return found


def _by_phase(calls: Sequence[fx.Node], stage: int) -> dict[fx.Node, Purpose]:
    """The purpose of each call by phases in order; updates before the last product of the backward belong to it."""
    planned = [*map(planned_node, calls)]
    back = _split_point(planned, lambda phase: phase is not Phase.FORWARD)
    products = [i for i, node in enumerate(planned) if node and node.phase is Phase.BACKWARD and is_heavy(node)]
    update = max(back, products[-1] + 1 if products else 0)
    update += _split_point(planned[update:], lambda phase: phase is Phase.UPDATE)
    parts = ("F", calls[:back]), ("B", calls[back:update]), ("U", calls[update:])
    return {node: Purpose(kind, stage) for kind, part in parts for node in part}


def _split_point(planned: Sequence[Node | None], late: Callable[[Phase], bool]) -> int:
    """The best split of calls into phases: most in front of it are of early phases, most behind it of late ones."""
    gains = [*accumulate((0 if node is None else -1 if late(node.phase) else 1 for node in planned), initial=0)]
    return max(range(len(gains)), key=gains.__getitem__)


# ---- tasks ----------------------------------------------------------------------------------------------------------

Message = tuple[int, int, int]
"""A message: the places of its two stages, and its tag."""


@dataclass(frozen=True)
class RankTask:
    """A task of a rank: compute, the start of a transfer over a link (a collective, a copy between memories, a message
    to another stage), or the wait for one.

    A transfer that is not ``hidden`` is done on the rank: of a message by sender and receiver, half of the seconds
    each. ``at``: the iterations of all loops around, outermost first.
    """

    kind: Literal["compute", "start", "wait"]
    purpose: Purpose
    seconds: float = 0.0
    microbatch: int = 0
    call: fx.Node | None = None
    """The call that starts the transfer."""
    link: str = ""
    message: Message | None = None
    hidden: bool = True
    at: tuple[int, ...] = ()

    @property
    def transfer(self) -> tuple[Any, ...]:
        """What is started, or waited for: the message of a micro-batch, or the call in an iteration."""
        return (self.call, self.at) if self.message is None else (*self.message, self.microbatch)


def rank_tasks(program: RankProgram, footprint: Footprint, machine: Machine, mesh: Mesh) -> list[RankTask]:
    """The tasks of a rank in a step; ``footprint`` is the replay of the program, with the costs of its calls."""
    return _merged(_TaskReader(program, footprint, machine, mesh).all())


class _TaskReader:
    def __init__(self, program: RankProgram, footprint: Footprint, machine: Machine, mesh: Mesh) -> None:
        self.nodes = [node for node in program.graph.nodes if node.op == "call_function"]
        self.costs = dict(zip(footprint.calls, footprint.costs, strict=True))
        self.machine, self.mesh, self.coords = machine, mesh, mesh.coords(program.rank)
        self.inside, self.purposes = regions(self.nodes), purposes(self.nodes)

    def all(self) -> Iterator[RankTask]:
        """The tasks of the program, one per run of a call."""
        main, known = main_loop(self.nodes), dict[fx.Node, RankTask | None]()
        for node, iterations in execution_order(self.nodes):
            if node not in known:
                known[node] = self._read(node)
            if (task := known[node]) is not None:
                at = tuple(number for _, number in iterations)
                yield (
                    replace(task, at=at, microbatch=at[0] if at and self.inside[node][0] is main else 0) if at else task
                )

    def _read(self, node: fx.Node) -> RankTask | None:
        """The task of one run of a call."""
        row, purpose = row_of(node.target), self.purposes[node]
        args: Any = node.args
        if row is not None and row.waits:
            call = started_call(args[0])
            return RankTask("wait", purpose, call=call, message=self._message(call, "receives"))
        cost = self.costs.get(node)
        if cost is None or (row is not None and row.message == "receives"):
            return None
        trips: Any = [each.args[1] for each in self.inside[node] if loop_role(each) == "opens"]
        times = prod(trips)
        if row is None or not (row.starts or row.message):
            seconds = cost.computing(self.machine) / times
            return RankTask("compute", purpose, seconds) if seconds else None
        if message := self._message(node, "sends"):
            nbytes = sum(sent.nbytes for sent in cost.sent.values()) / times
            link, seconds = f"to place {message[1]}", self.mesh.link(self._axes(node)).seconds(1, nbytes)
        else:
            sending = cost.sending(self.machine, self.mesh) + cost.copying(self.machine)
            link, seconds = link_of(node), sending / times
        hides = self.machine.hides
        return RankTask("start", purpose, seconds, call=node, link=link, message=message, hidden=hides)

    def _message(self, call: fx.Node, role: str) -> Message | None:
        """The message that a call sends or receives; None: its role is another."""
        row, args = row_of(call.target), list[Any](call.args)
        if row is None or row.message != role:
            return None
        here = self.coords[self._axes(call)[0]]
        return (here, args[1], args[2]) if role == "sends" else (args[3], here, args[4])

    def _axes(self, call: fx.Node) -> tuple[str, ...]:
        row = row_of(call.target)
        assert row is not None
        return self.mesh.group_axes(str(call.args[row.group or 0]))


def started_call(started: Any) -> fx.Node:
    """The call that started the transfer that a wait is for."""
    while started.target is operator.getitem:
        started = started.args[0]
    made: fx.Node = started
    return made


def link_of(call: fx.Node) -> str:
    """The link of a transfer that a call starts or sends: the axes of its group, or the direction of a copy."""
    row = row_of(call.target)
    assert row is not None
    if row.copies:
        return "to host" if row.holds else "from host"
    name = str(call.args[row.group or 0])
    axes = name.partition("/")[2].partition("@")[0].replace(".", ", ")
    if row.message == "sends":
        return f"{axes}, to {call.args[1]}"
    return f"{axes}, from {call.args[3]}" if row.message else axes


def call_label(call: fx.Node) -> str:
    """The label of a call: its kind, the value in the planned graph, the module."""
    row, planned = row_of(call.target), call.meta.get("shardfx")
    kind = row.name.rpartition(".")[2].rstrip("_") if row is not None else str(call.target)
    where = f" {planned.where.module}" if isinstance(planned, Node) and planned.where.module else ""
    return f"{kind} %{call.name}{where}"


def _merged(tasks: Iterable[RankTask]) -> list[RankTask]:
    """Merge consecutive compute for one purpose in one micro-batch into one task."""
    found: list[RankTask] = []
    for each in tasks:
        last = found[-1] if found else None
        together = last is not None and last.kind == each.kind == "compute"
        if last is not None and together and (last.purpose, last.microbatch) == (each.purpose, each.microbatch):
            found[-1] = replace(last, seconds=last.seconds + each.seconds)
        else:
            found.append(each)
    return found
