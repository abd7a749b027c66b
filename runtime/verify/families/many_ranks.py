"""The proof for many ranks, at the cost of a few: equal ops once, equal programs once, and every program read.

Ranks with equal shards (all of them, where every sharding of the plan is even) have programs that differ in numbers and
in names of groups only, and where an op is computed otherwise on some ranks. Then these are proven instead of all
programs one by one:

1. *Every op at every rank* (:mod:`.single_ops`): its code, alone, takes its operands as the plan places them to its
   results as the plan places them.
2. *The planned graph is the captured one*, by terms, and its outputs are placed as promised.
3. *Every rank's program is one text with the numbers of its ops' code.* What writes programs (lowering and rank passes)
   runs once for all ranks whose numbers take it the same way (:mod:`.varying`). The constants that differ within such a
   *family* are those of 1. The families have one order of collectives.
4. *Whole programs*, with all their collectives, on two ranks of each family, side by side: order, operands, waits and
   results. What is linear and right at two places is right at all. Their partners in collectives are *shadows*
   (:mod:`..proof.collective_matching`), which run the program of their own family at their own coordinates.

Ranks at different places along the axis of stages are in no family, and each place has its own order of collectives and
messages. A send is checked by those that it concerns, and *all* ranks' messages of it are compared. The whole programs
are those of *lines* of ranks, one of each place and at the same coordinates else, which send to one another. In which
order two ranks send and receive over all iterations is checked beforehand (:mod:`..loop_proof`).

A program with other numbers is interpreted as a whole, on each rank of its family, and so is every rank that it
communicates with, and the lines of these. So is a program that somebody gives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardfx.ir.graph import Graph, Input, Node, Output
from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.ops.table import OwnOp
from shardfx.ir.program.loops.schedule_actions import local_ends, runs_here
from shardfx.ir.rules.book import RuleBook
from shardfx.runtime.verify.data_movement import COLLECTIVES, MESSAGES
from shardfx.runtime.verify.fault import Failed, Fault
from shardfx.runtime.verify.proof.calls import Proof
from shardfx.runtime.verify.proof.collective_matching import LockStep
from shardfx.runtime.verify.proof.interpreter import HasGraph, Rank

from .equal_shards import EqualShards
from .family import Family, families, same_numbers
from .single_ops import SingleOps, Write, pair

EVERY = 16
"""The most ranks of a mesh on which every program is interpreted."""
Key = tuple[int, int] | Family
"""A family, or a place along the axis of stages and the number of a box of ranks with equal shards."""


@dataclass(frozen=True)
class FamilyRequest:
    """Programs for outputs of some kinds: the plan's own, and others by rank. ``given`` are ranks whose program is
    written together, as the plan's own are, though somebody gave it."""

    program: Callable[[Any], HasGraph]
    changed: Mapping[int, HasGraph]
    nodes: Sequence[Node]
    inputs: Sequence[Input]
    outputs: Sequence[Output]
    given: frozenset[int] = frozenset()

    def at(self, graph: Graph, rank: int) -> FamilyRequest:
        """The part of the request for the stages of a rank."""
        coords = graph.mesh.coords(rank)
        inputs, outputs = local_ends(graph, self.inputs, self.outputs, coords)
        nodes = [node for node in self.nodes if runs_here(node, graph, coords)]
        return replace(self, nodes=nodes, inputs=inputs, outputs=outputs)


def verify(
    proof: Proof,
    book: RuleBook,
    write: Write,
    requests: Sequence[FamilyRequest],
    alike: EqualShards,
    counts: Counter[str],
) -> tuple[Fault | None, int]:
    """The first fault of the programs, or None, and of which; ``counts`` says how much was checked.

    ``write`` writes one op alone.
    """
    graph = proof.after
    ops = SingleOps(graph, [node for each in requests for node in each.nodes], book, write, alike)
    found = ops.fault()
    counts["distinct ops at every rank"] += len(ops)
    if found is not None:
        return found, 0
    places: dict[int, list[int]] = {}
    for rank in range(graph.mesh.size):
        places.setdefault(place_of(graph, rank), []).append(rank)
    for number, each in enumerate(requests):
        try:
            read = {place: FamilyPrograms(ops, each.at(graph, ranks[0]), ranks) for place, ranks in places.items()}
            for part in read.values():
                written = {*part.read.values(), *part.other.values()}
                counts.update({"programs read": len(part.read), "families": len(written)})
            WholePrograms(proof, read, alike, counts).interpret(each.changed)
        except Failed as failed:
            return failed.fault, number
    return None, 0


def place_of(graph: Graph, rank: int) -> int:
    """The place of a rank along the axis of stages; 0 where there are none."""
    return graph.mesh.coords(rank)[graph.pipeline.axis] if graph.pipeline is not None else 0


class FamilyPrograms:
    """The plan's own programs of ranks that have the same stages, read family by family."""

    def __init__(self, ops: SingleOps, request: FamilyRequest, ranks: Sequence[int]) -> None:
        self.request, nodes = request, request.nodes
        self.read: dict[int, Family] = {}
        """The families by rank whose numbers are all those of the ops."""
        self.other: dict[int, Family] = {}
        """Families with other numbers."""
        order: list[Any] | None = None
        mine = set(ranks) - request.changed.keys()
        parts = [[rank for rank in part if rank in mine] for part in ops.parts]
        for family in families(request.program, sorted(filter(None, parts), key=len, reverse=True)):
            order, own = order or _communication(family), _communication(family)
            codes = ops.codes(family.ranks, nodes)
            alike = own == order and not request.given & {*family.ranks} and same_numbers(family, nodes, codes)
            (self.read if alike else self.other).update(dict.fromkeys(family.ranks, family))

    def at(self, rank: int) -> HasGraph:
        """The plan's own program of a rank."""
        family = self.read.get(rank) or self.other.get(rank)
        return self.request.program(rank) if family is None else family.at(rank)


def _communication(family: Family) -> list[Any]:
    """The sequence of collectives and messages of a family, with their groups."""
    found: list[Any] = []
    for node in family.program.graph.nodes:
        if node.op == "call_function" and node.target in COLLECTIVES | MESSAGES:
            row = row_of(node.target)
            to = node.args[-4:-2] if row is not None and row.message else ()
            found.append((node.target, str(node.args[-1]).partition("@")[0], *to))
    return found


@dataclass
class WholePrograms:
    """The interpretation of full programs: of a few lines of ranks over all stages, with shadows for all others."""

    proof: Proof
    places: Mapping[int, FamilyPrograms]
    alike: EqualShards
    counts: Counter[str]
    _patterns: dict[Key, Rank] = field(default_factory=dict)
    """An interpreted rank for each key, whose program stands for the others'."""

    def interpret(self, changed: Mapping[int, HasGraph]) -> None:
        """Interpret the programs that need it.

        Raises:
            Failed: a program is wrong.
        """
        found = dict.fromkeys(family for own in self.places.values() for family in own.read.values())
        lines = {m for family in found for rank in self._in_two_lines(family) for m in self._line(rank)}
        if lines:
            self._lock_step({rank: self._of(rank).at(rank) for rank in sorted(lines)}, ())
            # outputs that are placed otherwise than promised, but are the same box at these ranks, are it at all:
            # what is linear in each coordinate and the same at two places is the same
            for rank in self._patterns.values():
                rank.promised(self._of(rank.rank).request.outputs, self.alike.starts())
        apart = {*changed, *(rank for own in self.places.values() for rank in own.other)}
        if apart:
            nodes = [node for node in self.proof.after.nodes if isinstance(node.op, OwnOp)]
            axes = {tuple(node.kwargs["axes"]) for node in nodes if node.kwargs.get("axes")}
            near = apart | {m for r in apart for each in axes for m in self.proof.after.mesh.group(r, each)}
            near = {m for rank in near for m in self._line(rank)}
            self._lock_step({r: changed.get(r) or self._of(r).at(r) for r in sorted(near)}, apart)

    def _in_two_lines(self, family: Family) -> Sequence[int]:
        """Ranks of two lines that have ranks of a family, and none with other numbers, where there are such."""
        lines = [line for line in map(self._line, family.ranks) if all(m in self._of(m).read for m in line)]
        return pair(sorted(m for line in lines for m in line), self.proof.after.mesh) if lines else ()

    def _of(self, rank: int) -> FamilyPrograms:
        return self.places[place_of(self.proof.after, rank)]

    def _line(self, rank: int) -> Sequence[int]:
        """The ranks with the coordinates of one, but for the stage."""
        pipeline = self.proof.after.pipeline
        return (rank,) if pipeline is None else self.proof.after.mesh.group(rank, (pipeline.axis,))

    def _lock_step(self, programs: Mapping[int, HasGraph], apart: Iterable[int]) -> None:
        alone = set(apart)
        made = {r: Rank(self.proof, r, each, self._of(r).request.inputs, r in alone) for r, each in programs.items()}
        self.counts["whole programs"] += len(made)
        known = dict(self._patterns)
        for r in sorted(made.keys() - alone):
            for key in (self._key(r), self._place(r)):
                known.setdefault(key, made[r])

        def model(rank: Rank, member: int) -> Rank | None:
            mine, theirs = self._key(rank.rank), self._key(member)
            return rank if mine == theirs and not (alone and mine in self._patterns) else known.get(theirs)

        LockStep(self.proof, made, model).run()
        for r, rank in made.items():
            rank.outputs(self._of(r).request.outputs)
        self._patterns = known

    def _place(self, rank: int) -> tuple[int, int]:
        return place_of(self.proof.after, rank), self.alike.box_of[rank]

    def _key(self, rank: int) -> Key:
        return self._of(rank).read.get(rank) or self._place(rank)
