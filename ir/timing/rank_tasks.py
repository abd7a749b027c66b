"""The tasks of a rank, as the simulator sees its program: compute, start, wait, send and receive, each with its action.

    unit = loop.action(%micro-batches, "F0")
    mm = aten.mm(%piece, %w)                     ComputeTask of F0
    unit_1 = loop.action(%micro-batches, "B0")
    mm_1 = aten.mm(%wait_tensor, %w)             ComputeTask of B0
    done = loop.end(...)
    sum = c10d.all_reduce(%grad, "sum", ...)     StartTask of U0

Loops in schedule actions name their actions themselves. Other programs are split where the phases of the planned nodes
are split best, for some of the backward may stand among the forward. What stands behind the loop, such as the reduction
of its gradients, belongs to the update; what stands in front of it to no action. Every iteration is visited, in the
order that the program says; calls that follow one another are one task.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

from torch import fx

from shardfx.ir.cost.amounts import Cost
from shardfx.ir.cost.footprint import Footprint
from shardfx.ir.cost.machine import Machine
from shardfx.ir.graph import Node, Phase
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.ops.sends import is_comm
from shardfx.ir.ops.traits import is_heavy
from shardfx.ir.program.loops.loop_regions import end_of, name_of, part_in_iterations, regions
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.schedule.actions import KINDS

from .stream_order import link_of, source

BEFORE = ""
"""What is done once, in front of all micro-batches."""
RECEIVED = "R"
"""What only takes in what others send."""


class Purpose(NamedTuple):
    """A kind of action (``F``, ``B``, ``I``, ``W``, ``U``), or one of the above, and its stage."""

    kind: str
    stage: int = 0


def main_iterations(nodes: Sequence[fx.Node]) -> fx.Node | None:
    """The first call of the micro-batches in which most of a program's forward and backward is done; None where none
    are."""
    inside = regions(nodes)
    in_units = next((inside[node][0] for node in nodes if _names_action(node)), None)
    if in_units is not None:
        return in_units
    work = [node for node in nodes if _phase(node) in (Phase.FORWARD, Phase.BACKWARD) and not _is_comm(node)]
    sizes: dict[fx.Node, int] = {}
    for node in work:
        if inside[node]:
            sizes[inside[node][0]] = sizes.get(inside[node][0], 0) + 1
    most = max(sizes, key=sizes.__getitem__, default=None)
    return most if most is not None and 2 * sizes[most] > len(work) else None


def purposes(nodes: Iterable[fx.Node]) -> dict[fx.Node, Purpose]:
    """What each call is done for, in the order of the program."""
    calls = [node for node in nodes if node.op == "call_function"]
    microbatches, inside = main_iterations(calls), regions(calls)
    stage = _stage(calls)
    if microbatches is None:
        return _parted(calls, stage)
    first = calls.index(microbatches)
    behind = [place for place, node in enumerate(calls) if microbatches in inside[node]][-1] + 1
    found = dict.fromkeys(calls[: first + 1], Purpose(BEFORE, stage))
    here = calls[first + 1 : behind]
    found |= _in_units(here) if any(map(_names_action, here)) else _parted(here, stage)
    return found | dict.fromkeys(calls[behind:], Purpose("U", stage))


def _stage(calls: Sequence[fx.Node]) -> int:
    """The stage that an update is said to be of: the first that has units, or that in which most is done."""
    units = [int(name[1:]) for name in map(name_of, filter(_names_action, calls)) if name[0] in KINDS]
    counts = Counter(node.at[0] for node in map(_planned, calls) if node is not None and node.at)
    return min(units) if units else max(counts, key=counts.__getitem__, default=0)


def _names_action(node: fx.Node) -> bool:
    """Whether a unit begins that is an action of a schedule; others are stretches of a micro-batch that is
    interleaved."""
    return part_in_iterations(node) == "unit" and re.fullmatch(rf"R?[{''.join(KINDS)}]\d+|O", name_of(node)) is not None


def _in_units(calls: Sequence[fx.Node]) -> dict[fx.Node, Purpose]:
    """By the units' names: ``F0``; ``RB1`` receives what B1 sends, and ``O`` what leaves the program."""
    found, now = dict[fx.Node, Purpose](), Purpose(RECEIVED)
    for node in calls:
        if _names_action(node):
            kind, stage = name_of(node)[0], name_of(node)[1:]
            now = Purpose(kind, int(stage)) if kind in KINDS else Purpose(RECEIVED)
        found[node] = now
    return found


def _parted(calls: Sequence[fx.Node], stage: int) -> dict[fx.Node, Purpose]:
    """Forward, backward, update, one behind the other. What is updated before the last product of the backward is part
    of that."""
    back = _parting(calls, lambda phase: phase is not Phase.FORWARD)
    products = [i for i, node in enumerate(calls) if _phase(node) is Phase.BACKWARD and _is_heavy(node)]
    update = max(back, products[-1] + 1 if products else 0)
    update += _parting(calls[update:], lambda phase: phase is Phase.UPDATE)
    parts = ("F", calls[:back]), ("B", calls[back:update]), ("U", calls[update:])
    return {node: Purpose(kind, stage) for kind, part in parts for node in part}


def _is_heavy(node: fx.Node) -> bool:
    planned = _planned(node)
    return planned is not None and is_heavy(planned)


def _parting(calls: Sequence[fx.Node], behind: Callable[[Phase], bool]) -> int:
    """Where calls are parted best: most in front of it are not of phases that come behind, most behind it are."""
    phases = map(_phase, calls)
    gains = accumulate((0 if phase is None else -1 if behind(phase) else 1 for phase in phases), initial=0)
    best = list(gains)
    return max(range(len(best)), key=best.__getitem__)


def _planned(node: fx.Node) -> Node | None:
    planned = node.meta.get("shardfx")
    return planned if isinstance(planned, Node) else None


def _phase(node: fx.Node) -> Phase | None:
    planned = _planned(node)
    return planned.phase if planned is not None else None


def _is_comm(node: fx.Node) -> bool:
    planned = _planned(node)
    return planned is not None and is_comm(planned)


Message = tuple[int, int, int, int]
"""From one place along the axis of stages to another: these, what it is (its tag), and the micro-batch."""


@dataclass(frozen=True)
class Doing:
    """One thing that a rank does for a purpose in a micro-batch; it takes so many seconds, of the rank or of a link.
    ``at``:
    the micro-batches of all loops around, outermost first."""

    purpose: Purpose
    seconds: float = 0.0
    microbatch: int = 0
    at: tuple[int, ...] = field(default=(), kw_only=True)


class Works(Doing):
    """It computes."""


@dataclass(frozen=True)
class Starts(Doing):
    """It starts what goes on by itself, over one of its links (or what it has to do itself, if it is not ``hidden``): a
    collective, or a copy to another pool of memory."""

    call: fx.Node | None = None
    link: str = ""
    hidden: bool = True


@dataclass(frozen=True)
class Waits(Doing):
    """It waits for what it started, or is to receive."""

    call: fx.Node | None = None


@dataclass(frozen=True)
class Sends(Doing):
    """It sends, and goes on. What is not ``hidden`` takes half of the seconds of it, to lay out what is sent, and half
    of who takes it in."""

    message: Message = (0, 0, 0, 0)
    hidden: bool = True
    call: fx.Node | None = None


@dataclass(frozen=True)
class Receives(Doing):
    """It is to receive; a wait says when it needs it."""

    message: Message = (0, 0, 0, 0)
    call: fx.Node | None = None


class _Word(NamedTuple):
    """A turn of all units of a loop, or of one of them."""

    unit: str
    microbatch: int


def doings(program: RankProgram, footprint: Footprint, machine: Machine, mesh: Mesh) -> list[Doing]:
    """What a rank does in a step.

    Args:
        footprint: the replay of the program, which says what its calls cost.
        machine, mesh: how long that takes.
    """
    return list(_joined(_Walk(program, footprint, machine, mesh).all()))


class _Walk:
    def __init__(self, program: RankProgram, footprint: Footprint, machine: Machine, mesh: Mesh) -> None:
        self.nodes = [node for node in program.graph.nodes if node.op == "call_function"]
        self.costs: Mapping[fx.Node, Cost] = dict(zip(footprint.calls, footprint.costs, strict=True))
        self.machine, self.mesh, self.coords = machine, mesh, mesh.coords(program.rank)
        self.inside, self.purposes = regions(self.nodes), purposes(self.nodes)
        self.main = main_iterations(self.nodes)

    def all(self) -> Iterator[Doing]:
        """The program from its first call to its last."""
        return self._within(0, len(self.nodes))

    def _within(self, start: int, end: int) -> Iterator[Doing]:
        at = start
        while at < end:
            node = self.nodes[at]
            if part_in_iterations(node) == "opens":
                closed = end_of(self.nodes, at)
                yield from self._in_iterations(node, at + 1, closed)
                at = closed
            elif doing := self._read(node):
                yield doing
            at += 1

    def _in_iterations(self, microbatches: fx.Node, start: int, end: int) -> Iterator[Doing]:
        """What is done in micro-batches, each of their units read once."""
        words, units = _words(microbatches), dict[str, list[Doing]]()
        for unit in {word.unit for word in words}:
            units[unit] = list(_joined(self._within(*self._unit(microbatches, start, end, unit))))
        for word in words:
            for each in units[word.unit]:
                made = replace(each, at=(word.microbatch, *each.at))
                yield replace(made, microbatch=word.microbatch) if microbatches is self.main else made

    def _unit(self, microbatches: fx.Node, start: int, end: int, name: str) -> tuple[int, int]:
        """The calls of a unit of micro-batches; of no name: all."""
        if not name:
            return start, end
        units = (i for i in range(start, end) if part_in_iterations(self.nodes[i]) == "unit")
        begins = [i for i in units if self.nodes[i].args[0] is microbatches]
        at = next(place for place, i in enumerate(begins) if self.nodes[i].args[1] == name)
        return begins[at] + 1, [*begins, end][at + 1]

    def _read(self, node: fx.Node) -> Doing | None:
        """What a call is for the clock."""
        row, purpose = row_of(node.target), self.purposes[node]
        args: Any = node.args
        if row is not None and row.waits:
            return Waits(purpose, call=source(args[0]))
        cost = self.costs.get(node)
        if cost is None:
            return None
        times = prod(len(_iterations(each)) for each in self.inside[node] if part_in_iterations(each) == "opens")
        if row is not None and row.message:
            (axis,) = self.mesh.group_axes(str(args[row.group or 0]))
            here = self.coords[axis]
            if row.message == "receives":
                return Receives(purpose, message=(args[3], here, args[4], 0), call=node)
            nbytes = sum(sent.nbytes for sent in cost.sent.values()) / times
            seconds = self.mesh.link([axis]).seconds(1, nbytes)
            message = (here, args[1], args[2], 0)
            return Sends(purpose, seconds, message=message, hidden=self.machine.hides, call=node)
        if row is not None and row.starts:
            seconds = cost.sending(self.machine, self.mesh) + cost.carrying(self.machine)
            return Starts(purpose, seconds / times, call=node, link=link_of(node), hidden=self.machine.hides)
        seconds = cost.computing(self.machine) / times
        return Works(purpose, seconds) if seconds else None


def _words(microbatches: fx.Node) -> Sequence[_Word]:
    """What is done of which micro-batch, in order."""
    args: Any = microbatches.args
    if len(args) > 3 and args[3]:
        parts = (word.rpartition(".") for word in args[3].split())
        return [_Word(unit, int(microbatch)) for unit, _, microbatch in parts]
    return [_Word("", microbatch) for microbatch in _iterations(microbatches)]


def _iterations(microbatches: fx.Node) -> range:
    args: Any = microbatches.args
    return range(args[1])


def _joined(doings: Iterator[Doing]) -> Iterator[Doing]:
    """Works that follow one another for one purpose in one micro-batch, as one."""
    last: Doing | None = None
    for each in doings:
        if (
            isinstance(last, Works)
            and isinstance(each, Works)
            and (last.purpose, last.microbatch) == (each.purpose, each.microbatch)
        ):
            last = replace(last, seconds=last.seconds + each.seconds)
            continue
        if last is not None:
            yield last
        last = each
    if last is not None:
        yield last
