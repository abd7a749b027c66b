"""Plans with turns, as what is proven: each turn is a rank of its own (:mod:`shardfx.ir.program.loops.unrolled`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from shardfx.ir.graph import Graph, Node
from shardfx.ir.mesh import Mesh
from shardfx.ir.program.loops.unrolled import NotTurns, as_ranks, unrolled
from shardfx.ir.program.rank_program import RankProgram

from .families.family import Family, families
from .families.varying import Split, Together, Varying
from .fault import Fault, place
from .order_of_turns import in_units, out_of_order
from .plan_proof import Asked, Broken, first_broken


def of_turns(before: Graph, after: Graph, asked: Sequence[Asked]) -> tuple[Graph, Graph, list[Asked]]:
    """The captured graph, the planned one and the programs, where each turn is a rank. A program whose turns are not
    those of its plan is :class:`.plan_proof.Broken` when it is asked for.

    Raises:
        Broken: ranks do not meet, or do not send and receive, in one order.
    """
    mesh = after.mesh
    before, after = _on(before, as_ranks(mesh)), _on(after, as_ranks(mesh))
    turned = [_Turned(mesh, each) for each in asked]
    for each in turned:
        each.check_order(after)
    return before, after, [each.asked(after) for each in turned]


def _on(graph: Graph, mesh: Mesh) -> Graph:
    """The same graph on a mesh with the same axes."""
    made = graph.copy()
    made.mesh = mesh
    return made


class _Turned:
    """Programs for outputs of some kinds, turn by turn."""

    def __init__(self, mesh: Mesh, asked: Asked) -> None:
        self.mesh, self.given = mesh, asked
        self.timed: WeakKeyDictionary[Graph, Graph] = WeakKeyDictionary()
        self.known: WeakKeyDictionary[Graph, dict[int, RankProgram]] = WeakKeyDictionary()
        self.families: WeakKeyDictionary[Graph, list[Family]] = WeakKeyDictionary()
        self.faults: WeakKeyDictionary[RankProgram, Fault | None] = WeakKeyDictionary()
        """Of programs that were looked at: whether they are well formed."""

    def asked(self, after: Graph) -> Asked:
        """The same, of ranks that are turns."""
        changed = self.given.changed(self._timed(after))
        used = _Used(self, changed, after)

        def together(graph: Graph, rank: Any) -> RankProgram:
            own = self.rank_of(graph, rank)
            other = next((program for number, program in changed.items() if number == own), None)
            made = other if other is not None else self._own(graph, own)
            return self.unrolled(made, graph, rank)

        return replace(self.given, program=self._program(), used=used, modules={}, together=together)

    def _program(self) -> Callable[[Graph, int], RankProgram]:
        def program(graph: Graph, rank: int) -> RankProgram:
            own = self.rank_of(graph, rank)
            known = self.known.setdefault(graph, {})
            if own not in known:
                known[own] = self._own(graph, own)
            return self.unrolled(known[own], graph, rank)

        return program

    def _own(self, graph: Graph, own: Any) -> RankProgram:
        """The plan's program of a rank, or of some that are together: of a family's, where that was written.

        Raises:
            Split: the ranks are of several families.
        """
        numbers = own.numbers() if isinstance(own, Varying) else (own,)
        known = self.families.get(graph, ())
        family = next((each for each in known if numbers[0] in each.together.place), None)
        if family is None:
            return self.given.program(self._timed(graph), own)
        assert isinstance(family.program, RankProgram)
        if isinstance(own, Varying):
            parts: tuple[list[int], list[int]] = [], []
            for rank, number in zip(own.together.ranks, numbers, strict=True):
                parts[number not in family.together.place].append(rank)
            if parts[1]:
                raise Split(parts)
        written = family.moved(own) if isinstance(own, Varying) else family.at(own)
        return replace(family.program, rank=own, graph=written.graph)

    def check_order(self, graph: Graph) -> None:
        """Where units of turns are done in an order of their own, ranks meet and send in one order, over all turns: of
        each turn alone, as a rank, that is not seen.

        Raises:
            Broken: they do not.
        """
        timed = self._timed(graph)
        changed = self.given.changed(timed)
        first = changed[0] if 0 in changed else self.given.program(timed, 0)
        if not any(in_units(each.graph) for each in (first, *changed.values())):
            return
        own = tuple(rank for rank in range(self.mesh.size) if rank not in changed)
        self.families[graph] = list(families(lambda rank: self.given.program(timed, rank), [own] if own else []))
        given = [Family(Together([rank]), program) for rank, program in changed.items()]
        fault = first_broken(changed.values()) or out_of_order([*given, *self.families[graph]], self.mesh)
        if fault is not None:
            raise Broken(fault)

    def _timed(self, graph: Graph) -> Graph:
        """A graph of ranks with the axes of time again."""
        if graph not in self.timed:
            self.timed[graph] = _on(graph, self.mesh)
        return self.timed[graph]

    def rank_of(self, graph: Graph, rank: int) -> int:
        """Whose turn it is."""
        return self.mesh.rank(graph.mesh.coords(rank))

    def unrolled(self, program: RankProgram, graph: Graph, rank: int) -> RankProgram:
        """What one turn does of a program of its rank, or what turns of the same rank do.

        Raises:
            Broken: the program's turns are not those of its plan.
        """
        if program not in self.faults:
            self.faults[program] = first_broken([program])
        if (fault := self.faults[program]) is not None:
            raise Broken(replace(fault, rank=rank))
        try:
            return unrolled(program, graph, rank)
        except NotTurns as wrong:
            made = wrong.node.meta.get("shardfx")
            where = place(made) if isinstance(made, Node) else ""
            raise Broken(Fault(wrong.what, "", rank, wrong.node.name, where, certain=True)) from wrong


class _Used(Mapping[int, RankProgram]):
    """What somebody gave in the place of the plan's programs, turn by turn, each written when it is asked for."""

    def __init__(self, turned: _Turned, given: Mapping[int, RankProgram], graph: Graph) -> None:
        self._turned, self._given, self._graph = turned, given, graph
        own = {rank: turned.rank_of(graph, rank) for rank in range(graph.mesh.size if given else 0)}
        self._own = {rank: number for rank, number in own.items() if number in given}

    def __getitem__(self, rank: int) -> RankProgram:
        return self._turned.unrolled(self._given[self._own[rank]], self._graph, rank)

    def __iter__(self) -> Iterator[int]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


def of_the_rank(fault: Fault, mesh: Mesh) -> Fault:
    """A fault of a turn, as one of the rank whose turn it is."""
    if fault.rank is None:
        return fault
    turns = as_ranks(mesh)
    at = turns.coords(fault.rank)
    turn = ", ".join(f"turn {at[axis.name]} of {axis.name}" for axis in mesh.axes if axis.time)
    where = "; ".join(filter(None, (turn, fault.where)))
    seen = None if fault.seen is None else (fault.seen[0], mesh.rank(turns.coords(fault.seen[1])))
    return replace(fault, rank=mesh.rank(at), where=where, seen=seen)
