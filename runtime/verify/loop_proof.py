"""The proof of loops: each iteration is a rank of its own (:mod:`shardfx.ir.program.loops.unrolled`).

Where iterations of a pipeline are run in an order of their own, ranks also have to meet in one order: iteration by
iteration the same collectives, message by message. Of iterations that are proven one by one that is not seen, and a
backend that knows no tags pairs messages by their order alone. So the order is checked first. The program of a family
of ranks is walked once, where its messages name no number that differs by rank but groups: then each of its ranks does
the same, in its own groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary

from torch import fx

from shardfx.ir.graph import Graph, Node
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.ops.loop.stage_transfer import Message
from shardfx.ir.program.loops.loop_regions import (
    DELIMITERS,
    Iterations,
    execution_order,
    is_induction_variable,
    loop_role,
)
from shardfx.ir.program.loops.unrolled import NotALoop, loops_as_ranks, unrolled
from shardfx.ir.program.rank_program import RankProgram
from shardfx.runtime.rendezvous import Request

from .families.family import Family, families, varies
from .families.varying import Diverged, Together, Varying, leaves
from .fault import Fault, place
from .plan_proof import Malformed, ProgramRequest, first_malformed


def unrolled_plan(
    before: Graph, after: Graph, requests: Sequence[ProgramRequest]
) -> tuple[Graph, Graph, list[ProgramRequest]]:
    """The captured graph, the planned one and the programs, where each iteration is a rank. A program whose iterations
    are not those of its plan is :class:`.plan_proof.Malformed` when it is asked for.

    Raises:
        Malformed: ranks do not meet, or do not send and receive, in one order.
    """
    mesh = after.mesh
    before, after = _on(before, loops_as_ranks(mesh)), _on(after, loops_as_ranks(mesh))
    found = [_Unrolled(mesh, each) for each in requests]
    for each in found:
        each.check_order(after)
    return before, after, [each.request(after) for each in found]


def of_iteration(fault: Fault, mesh: Mesh) -> Fault:
    """A fault of an iteration as a rank, as one of the rank that runs it."""
    if fault.rank is None:
        return fault
    ranks = loops_as_ranks(mesh)
    at = ranks.coords(fault.rank)
    iteration = ", ".join(f"iteration {at[axis.name]} of {axis.name}" for axis in mesh.axes if axis.loop)
    where = "; ".join(filter(None, (iteration, fault.where)))
    seen = None if fault.seen is None else (fault.seen[0], mesh.rank(ranks.coords(fault.seen[1])))
    return replace(fault, rank=mesh.rank(at), where=where, seen=seen)


def _on(graph: Graph, mesh: Mesh) -> Graph:
    """The same graph on a mesh with the same axes."""
    made = graph.copy()
    made.mesh = mesh
    return made


class _Unrolled:
    """The programs of a request, iteration by iteration."""

    def __init__(self, mesh: Mesh, given: ProgramRequest) -> None:
        self.mesh, self.given = mesh, given
        self.looped: WeakKeyDictionary[Graph, Graph] = WeakKeyDictionary()
        """Graphs whose iterations are ranks, on the mesh with loop axes again."""
        self.known: WeakKeyDictionary[Graph, dict[int, RankProgram]] = WeakKeyDictionary()
        self.families: WeakKeyDictionary[Graph, list[Family]] = WeakKeyDictionary()
        self.faults: WeakKeyDictionary[RankProgram, Fault | None] = WeakKeyDictionary()

    def request(self, after: Graph) -> ProgramRequest:
        """The same, of ranks that are iterations."""
        changed = self.given.changed(self._looped(after))

        def program(graph: Graph, rank: int) -> RankProgram:
            own = self.rank_of(graph, rank)
            known = self.known.setdefault(graph, {})
            if own not in known:
                known[own] = self._own(graph, own)
            return self.iteration(known[own], graph, rank)

        def together(graph: Graph, rank: Any) -> RankProgram:
            own = self.rank_of(graph, rank)
            other = next((each for number, each in changed.items() if number == own), None)
            return self.iteration(other if other is not None else self._own(graph, own), graph, rank)

        used = _Used(self, changed, after)
        return replace(self.given, program=program, used=used, modules={}, together=together)

    def _own(self, graph: Graph, own: Any) -> RankProgram:
        """The plan's program of a rank, or of several together: of a family's, where that was written.

        Raises:
            Diverged: the ranks are of several families.
        """
        numbers = own.numbers() if isinstance(own, Varying) else (own,)
        family = next((each for each in self.families.get(graph, ()) if numbers[0] in each.together.place), None)
        if family is None:
            return self.given.program(self._looped(graph), own)
        assert isinstance(family.program, RankProgram)
        if isinstance(own, Varying):
            parts: tuple[list[int], list[int]] = [], []
            for rank, number in zip(own.together.ranks, numbers, strict=True):
                parts[number not in family.together.place].append(rank)
            if parts[1]:
                raise Diverged(parts)
        written = family.moved(own) if isinstance(own, Varying) else family.at(own)
        return replace(family.program, rank=own, graph=written.graph)

    def check_order(self, graph: Graph) -> None:
        """Check that ranks meet and send in one order over all iterations, where these have an order of their own.

        Raises:
            Malformed: they do not.
        """
        looped = self._looped(graph)
        changed = self.given.changed(looped)
        first = changed[0] if 0 in changed else self.given.program(looped, 0)
        if not any(loop_role(n) == "unit" for each in (first, *changed.values()) for n in each.graph.nodes):
            return
        own = tuple(rank for rank in range(self.mesh.size) if rank not in changed)
        self.families[graph] = list(families(lambda rank: self.given.program(looped, rank), [own] if own else []))
        given = [Family(Together([rank]), program) for rank, program in changed.items()]
        fault = first_malformed(changed.values()) or out_of_order([*given, *self.families[graph]], self.mesh)
        if fault is not None:
            raise Malformed(fault)

    def _looped(self, graph: Graph) -> Graph:
        if graph not in self.looped:
            self.looped[graph] = _on(graph, self.mesh)
        return self.looped[graph]

    def rank_of(self, graph: Graph, rank: int) -> int:
        """The rank that runs an iteration."""
        return self.mesh.rank(graph.mesh.coords(rank))

    def iteration(self, program: RankProgram, graph: Graph, rank: int) -> RankProgram:
        """What one iteration runs of a program of its rank.

        Raises:
            Malformed: the program's iterations are not those of its plan.
        """
        if program not in self.faults:
            self.faults[program] = first_malformed([program])
        if (fault := self.faults[program]) is not None:
            raise Malformed(replace(fault, rank=rank))
        try:
            return unrolled(program, graph, rank)
        except NotALoop as wrong:
            raise Malformed(_fault(wrong.what, rank, wrong.node)) from wrong


class _Used(Mapping[int, RankProgram]):
    """Programs in the place of the plan's, iteration by iteration, each written when it is asked for."""

    def __init__(self, of: _Unrolled, given: Mapping[int, RankProgram], graph: Graph) -> None:
        self._of, self._given, self._graph = of, given, graph
        own = {rank: of.rank_of(graph, rank) for rank in range(graph.mesh.size if given else 0)}
        self._own = {rank: number for rank, number in own.items() if number in given}

    def __getitem__(self, rank: int) -> RankProgram:
        return self._of.iteration(self._given[self._own[rank]], self._graph, rank)

    def __iter__(self) -> Iterator[int]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


# ---- the order in which ranks meet -----------------------------------------------------------------------------------

CallOf = tuple[Any, fx.Node]
"""The tag and the iteration of a message, or the iterations in which a group meets; and the call."""
Way = tuple[str, int, int]
"""Of a group, the place that sends and the one that receives."""
Ends = dict[Way, list[tuple[int, list[CallOf]]]]


def out_of_order(families: Iterable[Family], mesh: Mesh) -> Fault | None:
    """The first call at which two ranks do not meet; None where there is none."""
    sent, received, first = Ends(), Ends(), dict[str, tuple[int, list[CallOf]]]()
    equal: set[tuple[int, ...]] = set()
    for family in families:
        for ranks, graph in _texts(family):
            for (kind, named, other), calls in _calls_by_end(graph).items():
                axes = mesh.group_axes(named)
                for rank in ranks:
                    group, at = family.together.at(named, rank), mesh.group(rank, axes).index(rank)
                    if kind:
                        way = (group, at, other) if kind == "sends" else (group, other, at)
                        (sent if kind == "sends" else received).setdefault(way, []).append((rank, calls))
                        continue
                    member, theirs = first.setdefault(group, (rank, calls))
                    pair = (id(calls), id(theirs))
                    if pair not in equal and (fault := _not_together(group, rank, calls, member, theirs)) is not None:
                        return fault
                    equal.add(pair)
    for way in dict.fromkeys([*sent, *received]):
        mine, others = sent.get(way, []), received.get(way, [])
        same = tuple(id(calls) for _, calls in (*mine, *others))
        if same not in equal and (fault := _not_received(way, mine, others)) is not None:
            return fault
        equal.add(same)
    return None


def _not_together(group: str, rank: int, calls: list[CallOf], member: int, theirs: list[CallOf]) -> Fault | None:
    for (mine, node), (other, _) in zip(calls, theirs, strict=False):
        if mine != other:
            said = f"is of {_iterations(mine)}, and of {_iterations(other)} on rank {member}"
            return _fault(f"a collective on {group} {said}", rank, node)
    return None


def _not_received(
    way: Way, sent: Sequence[tuple[int, list[CallOf]]], received: Sequence[tuple[int, list[CallOf]]]
) -> Fault | None:
    mine, theirs = ([(rank, *call) for rank, calls in each for call in calls] for each in (sent, received))
    for one, other in zip_longest(mine, theirs):
        if one is None or other is None or one[1] != other[1]:
            rank, _, node = other or one
            names = [Message(*way, *each[1]) if each is not None else "nothing" for each in (other, one)]
            return _fault(f"{names[0]} is received, where {names[1]} is sent", rank, node)
    return None


def _fault(what: str, rank: int, node: fx.Node) -> Fault:
    made = node.meta.get("shardfx")
    return Fault(what, "", rank, node.name, place(made) if isinstance(made, Node) else "", certain=True)


def _iterations(iterations: Iterations) -> str:
    return " ".join(f"iteration {number} of {axis}" for axis, number in iterations) or "no iteration"


def _texts(family: Family) -> Iterator[tuple[Sequence[int], fx.Graph]]:
    """The program of the ranks of a family: one for all, or each its own where messages differ by rank."""
    graph = family.program.graph
    groups = {n: n.args[-1] for n in graph.nodes if n.op == "call_function" and (r := row_of(n.target)) and r.message}
    looked = {*groups, *(number for node in groups for number in _numbers_behind(node))}
    if any(varies(arg) for node in looked for arg in leaves(node) if arg is not groups.get(node)):
        for rank in family.ranks:
            yield (rank,), family.at(rank).graph
    else:
        yield family.ranks, graph


def _calls_by_end(graph: fx.Graph) -> dict[tuple[str, str, int], list[CallOf]]:
    """What groups are asked for, in the order and as often as it runs; by whether a call sends, receives, or (empty)
    meets all of a group, by the group, and by the place of the other rank."""
    asks = {node: request for node in graph.nodes if (request := Request.of(node)) is not None}
    frames = [node for node in graph.nodes if node in asks or loop_role(node) in DELIMITERS]
    found: dict[tuple[str, str, int], list[CallOf]] = {}
    for node, iterations in execution_order(frames):
        request = asks.get(node)
        if request is None:
            continue
        if request.message:
            other, tag, iteration = request.of_iteration(_numbers(node, dict(iterations))).args[-3:]
            found.setdefault((request.message, request.group, other), []).append(((tag, iteration), node))
        else:
            found.setdefault(("", request.group, 0), []).append((iterations, node))
    return found


def _numbers_behind(node: fx.Node) -> set[fx.Node]:
    """The numbers of iterations that a call takes, and those that they are computed from."""
    found = {each for each in node.all_input_nodes if is_induction_variable(each)}
    return found.union(*map(_numbers_behind, found))


def _numbers(node: fx.Node, iterations: Mapping[str, int]) -> dict[str, int]:
    """The numbers of an iteration that a call takes, by their names."""

    def number(each: fx.Node) -> int:
        row = row_of(each.target)
        assert row is not None
        if row.loop == "opens":
            return iterations[str(each.args[0])]
        return int(row.function(*fx.map_arg(each.args, number)))

    return {each.name: number(each) for each in node.all_input_nodes if is_induction_variable(each)}
