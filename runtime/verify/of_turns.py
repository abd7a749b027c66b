"""Plans with turns, as what is proven: each turn is a rank of its own (:mod:`shardfx.ir.program.looped.unrolled`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

from torch import fx

from shardfx.ir.graph import Graph, Node
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.program.looped.collected import NotTurns
from shardfx.ir.program.looped.unrolled import as_ranks, unrolled
from shardfx.ir.program.looped.within_turns import FRAMES, part_in_turns
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.program.units.execution import Turns, executed

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
        self._meet(after, changed)
        used = {
            rank: self._unrolled(changed[own], after, rank)
            for rank in range(after.mesh.size)
            if (own := self._rank(after, rank)) in changed
        }
        return replace(self.given, program=self._program(), used=used, modules={})

    def _meet(self, after: Graph, changed: Mapping[int, RankProgram]) -> None:
        """Where units are done in an order of their own, members of a group must do their collectives turn by turn in
        the same one: of each turn alone, as a rank, that is not seen.

        Raises:
            Broken: they do not.
        """
        if not any(in_units(program) for program in (self._planned(after, 0), *changed.values())):
            return
        first: dict[str, tuple[int, list[tuple[fx.Node, Turns]]]] = {}
        for rank in range(self.mesh.size):
            program = changed.get(rank) or self._planned(after, rank)
            if (fault := first_broken([program])) is not None:
                raise Broken(fault)
            for group, calls in _by_group(program).items():
                other, theirs = first.setdefault(group, (rank, calls))
                apart = next((i for i, (a, b) in enumerate(zip(calls, theirs, strict=False)) if a[1] != b[1]), None)
                if apart is not None:
                    node, turns = calls[apart]
                    said = f"is of {_said(turns)}, and of {_said(theirs[apart][1])} on rank {other}"
                    what = f"collective {apart} on {group} {said}"
                    raise Broken(Fault(what, "", rank, node.name, _place(node), certain=True))

    def _program(self) -> Callable[[Graph, int], RankProgram]:
        def program(graph: Graph, rank: int) -> RankProgram:
            own = self._rank(graph, rank)
            return self._unrolled(self._planned(graph, own), graph, rank)

        return program

    def _planned(self, graph: Graph, rank: int) -> RankProgram:
        """The plan's own program of a rank of the mesh with turns."""
        known = self.known.setdefault(graph, {})
        if rank not in known:
            known[rank] = self.given.program(self._timed(graph), rank)
        return known[rank]

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
            fault = Fault(wrong.what, "", self._rank(graph, rank), wrong.node.name, _place(wrong.node), certain=True)
            raise Broken(fault) from wrong


def in_units(program: RankProgram) -> bool:
    """Whether a program does turns in units."""
    return any(part_in_turns(node) == "unit" for node in program.graph.nodes)


def _by_group(program: RankProgram) -> dict[str, list[tuple[fx.Node, Turns]]]:
    """By group the collectives of a program, as they are done, with their turns."""
    groups = {node: group for node in program.graph.nodes if (group := _group(node))}
    found: dict[str, list[tuple[fx.Node, Turns]]] = {}
    for node, turns in executed([n for n in program.graph.nodes if n in groups or part_in_turns(n) in FRAMES]):
        if node in groups:
            found.setdefault(groups[node], []).append((node, turns))
    return found


def _group(node: fx.Node) -> str:
    row = row_of(node.target) if node.op == "call_function" else None
    return "" if row is None or row.group is None else str(node.args[row.group])


def _said(turns: Turns) -> str:
    return " ".join(f"turn {turn} of {axis}" for axis, turn in turns) or "no turn"


def _place(node: fx.Node) -> str:
    made = node.meta.get("shardfx")
    return place(made) if isinstance(made, Node) else ""
