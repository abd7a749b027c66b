"""What a rank does, as a clock sees it: it works, starts transfers, waits for them, sends and receives.

    F0.0 works 2 ms     F0.0 sends %30 to place 1     F0.1 works 2 ms     RB1.0 receives %55     B0.0 works 4 ms ...

All turns are gone through, in the order that the program says. Calls that follow one another are one piece of work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

from torch import fx

from shardfx.ir.cost.amounts import Cost
from shardfx.ir.cost.live.storages import Footprint
from shardfx.ir.cost.machine import Machine
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.program.looped.within_turns import part_in_turns, regions
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.program.units.execution import end_of

from .purposes import Purpose, main_turns, purposes
from .stream_order import link_of, source

Message = tuple[int, int, int, int]
"""From one place along the axis of stages to another: these, what it is (its tag), and the turn."""


@dataclass(frozen=True)
class Doing:
    """One thing that a rank does for a purpose in a turn; it takes so many seconds, of the rank or of a link. ``at``:
    the turns of all loops around, outermost first."""

    purpose: Purpose
    seconds: float = 0.0
    turn: int = 0
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
    turn: int


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
        self.main = main_turns(self.nodes)

    def all(self) -> Iterator[Doing]:
        """The program from its first call to its last."""
        return self._within(0, len(self.nodes))

    def _within(self, start: int, end: int) -> Iterator[Doing]:
        at = start
        while at < end:
            node = self.nodes[at]
            if part_in_turns(node) == "opens":
                closed = end_of(self.nodes, at)
                yield from self._in_turns(node, at + 1, closed)
                at = closed
            elif doing := self._read(node):
                yield doing
            at += 1

    def _in_turns(self, turns: fx.Node, start: int, end: int) -> Iterator[Doing]:
        """What is done in turns, each of their units read once."""
        words, units = _words(turns), dict[str, list[Doing]]()
        for unit in {word.unit for word in words}:
            units[unit] = list(_joined(self._within(*self._unit(turns, start, end, unit))))
        for word in words:
            for each in units[word.unit]:
                made = replace(each, at=(word.turn, *each.at))
                yield replace(made, turn=word.turn) if turns is self.main else made

    def _unit(self, turns: fx.Node, start: int, end: int, name: str) -> tuple[int, int]:
        """The calls of a unit of turns; of no name: all."""
        if not name:
            return start, end
        units = (i for i in range(start, end) if part_in_turns(self.nodes[i]) == "unit")
        begins = [i for i in units if self.nodes[i].args[0] is turns]
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
        times = prod(len(_turns(each)) for each in self.inside[node] if part_in_turns(each) == "opens")
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


def _words(turns: fx.Node) -> Sequence[_Word]:
    """What is done of which turn, in order."""
    args: Any = turns.args
    if len(args) > 3 and args[3]:
        parts = (word.rpartition(".") for word in args[3].split())
        return [_Word(unit, int(turn)) for unit, _, turn in parts]
    return [_Word("", turn) for turn in _turns(turns)]


def _turns(turns: fx.Node) -> range:
    args: Any = turns.args
    return range(args[1])


def _joined(doings: Iterator[Doing]) -> Iterator[Doing]:
    """Works that follow one another for one purpose in one turn, as one."""
    last: Doing | None = None
    for each in doings:
        if (
            isinstance(last, Works)
            and isinstance(each, Works)
            and (last.purpose, last.turn) == (each.purpose, each.turn)
        ):
            last = replace(last, seconds=last.seconds + each.seconds)
            continue
        if last is not None:
            yield last
        last = each
    if last is not None:
        yield last
