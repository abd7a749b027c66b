"""The proof of loops: each iteration is a rank of its own (:mod:`shardfx.ir.program.loops.unrolled`).

Where a schedule orders the iterations of a pipeline, ranks also have to match in one order: iteration by iteration the
same collectives, message by message. A proof of single iterations does not show that, and a backend without tags pairs
messages by their order alone. So the order is checked first. The program of a family of ranks is walked once, where its
messages name no number that differs by rank but groups: then each of its ranks does the same, in its own groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import zip_longest
from typing import Any

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
from .families.varying import Together, leaves
from .fault import Failed, Fault, place
from .plan_proof import ProgramRequest, malformed


def unrolled_plan(
    before: Graph, after: Graph, requests: Sequence[ProgramRequest]
) -> tuple[Graph, Graph, list[ProgramRequest]]:
    """The captured graph, the planned one and the programs, where each iteration is a rank. A program whose iterations
    are not those of its plan is :class:`.fault.Failed` when it is asked for.

    Raises:
        Failed: ranks do not meet, or do not send and receive, in one order.
    """
    before, iterations = before.copy(), after.copy()
    before.mesh = iterations.mesh = loops_as_ranks(after.mesh)
    return before, iterations, [_Unrolled(each, after, iterations).request() for each in requests]


def of_iteration(fault: Fault, mesh: Mesh) -> Fault:
    """A fault at an iteration (a rank of the unrolled plan) as a fault of the rank that runs it."""
    if fault.rank is None:
        return fault
    ranks = loops_as_ranks(mesh)
    at = ranks.coords(fault.rank)
    iteration = ", ".join(f"iteration {at[axis.name]} of {axis.name}" for axis in mesh.axes if axis.loop)
    where = "; ".join(filter(None, (iteration, fault.where)))
    seen = None if fault.seen is None else (fault.seen[0], mesh.rank(ranks.coords(fault.seen[1])))
    return replace(fault, rank=mesh.rank(at), where=where, seen=seen)


class _Unrolled:
    """The unrolled programs of a request, for the planned graph and for the same with iterations as ranks.

    Raises:
        Failed: ranks do not meet, or do not send and receive, in one order.
    """

    def __init__(self, request: ProgramRequest, looped: Graph, iterations: Graph) -> None:
        self.given, self.looped, self.iterations, self.mesh = request, looped, iterations, looped.mesh
        self.changed = request.changed(looped)
        self._own = cache(lambda rank: request.program(looped, rank))
        self._fault = cache(malformed)
        self._check_order()

    def request(self) -> ProgramRequest:
        """The same request, with iterations as ranks."""

        def program(_: Graph, rank: int) -> RankProgram:
            return self.iteration(self._own(self.rank_of(rank)), rank)

        def together(_: Graph, rank: Any) -> RankProgram:
            own = self.rank_of(rank)
            other = next((each for number, each in self.changed.items() if number == own), None)
            return self.iteration(self.given.program(self.looped, own) if other is None else other, rank)

        return replace(self.given, program=program, used=_Used(self), modules={}, together=together)

    def _check_order(self) -> None:
        """Check that ranks meet and send in one order over all iterations, where these have an order of their own."""
        first = self.changed[0] if 0 in self.changed else self._own(0)
        if not any(loop_role(n) == "unit" for each in (first, *self.changed.values()) for n in each.graph.nodes):
            return
        own = tuple(rank for rank in range(self.mesh.size) if rank not in self.changed)
        found = families(lambda rank: self.given.program(self.looped, rank), [own] if own else [])
        alone = [Family(Together([rank]), program) for rank, program in self.changed.items()]
        faults = [*filter(None, map(malformed, self.changed.values()))]
        fault = faults[0] if faults else out_of_order([*alone, *found], self.mesh)
        if fault is not None:
            raise Failed(fault)

    def rank_of(self, rank: int) -> int:
        """The rank that runs an iteration."""
        return self.mesh.rank(self.iterations.mesh.coords(rank))

    def iteration(self, program: RankProgram, rank: int) -> RankProgram:
        """The part of its rank's program that one iteration runs.

        Raises:
            Failed: the program's iterations are not those of its plan.
        """
        if (fault := self._fault(program)) is not None:
            raise Failed(replace(fault, rank=rank))
        try:
            return unrolled(program, self.iterations, rank)
        except NotALoop as wrong:
            raise Failed(_fault(wrong.what, rank, wrong.node)) from wrong


class _Used(Mapping[int, RankProgram]):
    """A user's programs, unrolled: in the place of the plan's, iteration by iteration, each written on demand."""

    def __init__(self, of: _Unrolled) -> None:
        own = {rank: of.rank_of(rank) for rank in range(of.iterations.mesh.size if of.changed else 0)}
        self._of, self._own = of, {rank: number for rank, number in own.items() if number in of.changed}

    def __getitem__(self, rank: int) -> RankProgram:
        return self._of.iteration(self._of.changed[self._own[rank]], rank)

    def __iter__(self) -> Iterator[int]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


# ---- the order in which ranks meet -----------------------------------------------------------------------------------

CallOf = tuple[Any, fx.Node]
"""The tag and the iteration of a message, or the iterations in which a group meets; and the call."""
Way = tuple[str, int, int]
"""A direction of messages: the group, the sender's place and the receiver's."""
Ends = dict[Way, list[tuple[int, list[CallOf]]]]


def out_of_order(families: Iterable[Family], mesh: Mesh) -> Fault | None:
    """The first call at which two ranks do not match; None where there is none."""
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
    if any(varies(arg) for node in looked for arg in leaves(node.args, node.kwargs) if arg is not groups.get(node)):
        for rank in family.ranks:
            with family.only(rank) as program:
                yield (rank,), program.graph
    else:
        yield family.ranks, graph


def _calls_by_end(graph: fx.Graph) -> dict[tuple[str, str, int], list[CallOf]]:
    """The collectives and messages in execution order, as often as they run; by whether a call sends, receives, or
    (empty) meets all of a group, by the group, and by the place of the other rank."""
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
    """The induction variables that a call takes, and those that they are computed from."""
    found = {each for each in node.all_input_nodes if is_induction_variable(each)}
    return found.union(*map(_numbers_behind, found))


def _numbers(node: fx.Node, iterations: Mapping[str, int]) -> dict[str, int]:
    """The induction variables of an iteration that a call takes, by name."""

    def number(each: fx.Node) -> int:
        row = row_of(each.target)
        assert row is not None
        if row.loop == "opens":
            return iterations[str(each.args[0])]
        return int(row.function(*fx.map_arg(each.args, number)))

    return {each.name: number(each) for each in node.all_input_nodes if is_induction_variable(each)}
