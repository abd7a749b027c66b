"""Plans with turns, as what is proven: each turn is a rank of its own (:mod:`shardfx.ir.program.looped.unrolled`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

from shardfx.ir.graph import Graph, Node
from shardfx.ir.mesh import Mesh
from shardfx.ir.program.looped.collected import NotTurns
from shardfx.ir.program.looped.unrolled import as_ranks, unrolled
from shardfx.ir.program.rank_program import RankProgram

from .fault import Fault, place
from .plan_proof import Asked, Broken, first_broken


def of_turns(before: Graph, after: Graph, asked: Sequence[Asked]) -> tuple[Graph, Graph, list[Asked]]:
    """The captured graph, the planned one and the programs, where each turn is a rank.

    Raises:
        Broken: a program's turns are not those of its plan.
    """
    mesh = after.mesh
    before, after = _on(before, as_ranks(mesh)), _on(after, as_ranks(mesh))
    return before, after, [_Turned(mesh, each).asked(after) for each in asked]


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

    def asked(self, after: Graph) -> Asked:
        """The same, of ranks that are turns."""
        changed = self.given.changed(self._timed(after))
        used = {
            rank: self._unrolled(changed[own], after, rank)
            for rank in range(after.mesh.size)
            if (own := self._rank(after, rank)) in changed
        }
        return replace(self.given, program=self._program(), used=used, modules={})

    def _program(self) -> Callable[[Graph, int], RankProgram]:
        def program(graph: Graph, rank: int) -> RankProgram:
            own = self._rank(graph, rank)
            known = self.known.setdefault(graph, {})
            if own not in known:
                known[own] = self.given.program(self._timed(graph), own)
            return self._unrolled(known[own], graph, rank)

        return program

    def _timed(self, graph: Graph) -> Graph:
        """A graph of ranks with the axes of time again."""
        if graph not in self.timed:
            self.timed[graph] = _on(graph, self.mesh)
        return self.timed[graph]

    def _rank(self, graph: Graph, rank: int) -> int:
        return self.mesh.rank(graph.mesh.coords(rank))

    def _unrolled(self, program: RankProgram, graph: Graph, rank: int) -> RankProgram:
        fault = first_broken([program])
        if fault is not None:
            raise Broken(fault)
        try:
            return unrolled(program, graph, rank)
        except NotTurns as wrong:
            made = wrong.node.meta.get("shardfx")
            where = place(made) if isinstance(made, Node) else ""
            fault = Fault(wrong.what, "", self._rank(graph, rank), wrong.node.name, where, certain=True)
            raise Broken(fault) from wrong
