"""The proof for many ranks, at the cost of a few: equal ops once, equal programs once, and every program read.

Where every cut of the plan is even, all ranks hold equal shapes, and their programs differ in numbers and in names of
groups only, and where an op is done otherwise on some ranks. Then these are proven instead of all programs one by one:

1. *Every op at every rank* (:mod:`.single_ops`): its code, alone, takes its operands as the plan places them to its
   results as the plan places them.
2. *The planned graph is the captured one*, by terms, and its outputs are placed as promised.
3. *Every rank's program is the planned graph in that code.* The code that writes programs (lowering and rank passes)
   runs once for all ranks whose numbers take it the same way (:mod:`.varying`), and what it writes for such a *family*
   is read op by op (:mod:`.op_code`): each call is the next one of its op's code, with this rank's own numbers, of what
   stands for the operands that the planned graph gives the op; and the families keep one order of collectives.
4. *One whole program*, with all its collectives: order, operands, waits and results. Its partners in collectives are
   *shadows* (:mod:`..proof.meeting`): by 1 and 3, they hold at each node what the rank itself holds, at their own
   coordinates. Programs for fewer outputs, whose calls all stand in one that was interpreted, in its order, are read as
   parts of it (:mod:`..proof.within`).

A program that is not the planned graph in the code of its ops (rank passes may write it otherwise) is interpreted as a
whole, on each rank of its family, and so is every rank with which it speaks; on two, where at least all its numbers are
those of its ops' codes, unless somebody gave it. A program that somebody gives for a rank alone is always interpreted,
with every rank to which it speaks; one that is given for many ranks, the turns of one, is read first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardfx.ir.graph import Graph, Input, Node, Output
from shardfx.ir.ops.table import OwnOp
from shardfx.ir.rules.book import RuleBook
from shardfx.ir.spec import Spec
from shardfx.runtime.verify.fault import Failed, Fault
from shardfx.runtime.verify.proof.interpreter import HasGraph, Rank
from shardfx.runtime.verify.proof.known import Proof
from shardfx.runtime.verify.proof.meeting import LockStep
from shardfx.runtime.verify.proof.numbering import COLLECTIVES
from shardfx.runtime.verify.proof.within import Within

from .family import Family, families
from .op_code import Reading, same_numbers
from .single_ops import SingleOps, Write, pair

EVERY = 16
"""On a mesh of up to so many ranks every program is interpreted."""


def is_even(graph: Graph) -> bool:
    """Whether every rank holds as much as any other of every value."""
    seen: set[tuple[tuple[int, ...], Spec]] = set()
    for value in graph.values():
        if value.spec is not None:
            seen.add((value.shape, value.spec))
    for node in graph.nodes:
        if node.strategy is not None:
            seen.update(zip((v.shape for v in node.operands), node.strategy.operands, strict=False))
            seen.update(zip((v.shape for v in node.outs), node.strategy.results, strict=False))
    return all(
        cut.is_even(size, graph.mesh) for shape, spec in seen for cut, size in zip(spec.dims, shape, strict=True)
    )


@dataclass(frozen=True)
class Asked:
    """Programs for outputs of some kinds: the plan's own, and others by rank. ``given`` are ranks whose program is
    written together, as the plan's own are, though somebody gave it."""

    program: Callable[[Any], HasGraph]
    changed: Mapping[int, HasGraph]
    nodes: Sequence[Node]
    inputs: Sequence[Input]
    outputs: Sequence[Output]
    given: frozenset[int] = frozenset()


def verify(
    proof: Proof, book: RuleBook, write: Write, asked: Sequence[Asked], counts: Counter[str]
) -> tuple[Fault | None, int]:
    """The first fault of the programs, or None, and of which; ``counts`` says how much was checked.

    ``write`` writes one op alone. The plan must be even.
    """
    ops = SingleOps(proof.after, [node for each in asked for node in each.nodes], book, write)
    found = ops.fault()
    counts["distinct ops at every rank"] += len(ops)
    if found is not None:
        return found, 0
    earlier: list[Within] = []
    for number, each in enumerate(asked):
        own = Own(ops, each)
        whole = Whole(proof, own, each.inputs, each.outputs)
        try:
            whole.interpret(each.changed, earlier)
        except Failed as failed:
            return failed.fault, number
        finally:
            counts.update(own.counts() | whole.counts())
    return None, 0


class Own:
    """The plan's own programs, read family by family."""

    def __init__(self, ops: SingleOps, asked: Asked) -> None:
        self.program, nodes = asked.program, asked.nodes
        self.families = self.calls = 0
        self.read: set[int] = set()
        """Ranks whose program is the planned graph in the code of its ops."""
        self.pattern: Family | None = None
        self.alike: list[Family] = []
        """Families with other code, but with no number other than the ops' own."""
        self.other: dict[int, Family] = {}
        """By rank: families with other code."""
        order: list[tuple[Any, str]] | None = None
        parts = [[rank for rank in part if rank not in asked.changed] for part in ops.parts]
        for family in families(asked.program, sorted(filter(None, parts), key=len, reverse=True)):
            self.families += 1
            codes = ops.codes(family.ranks, nodes)
            reading = Reading(family, nodes, codes)
            order, mine = order or _collectives(family), _collectives(family)
            if mine == order and reading.first_other(asked.inputs, asked.outputs) is None:
                self.read.update(family.ranks)
                self.calls += reading.calls * len(family.ranks)
                self.pattern = self.pattern or family
            elif mine == order and not asked.given & {*family.ranks} and same_numbers(family, nodes, codes):
                self.alike.append(family)
            else:
                self.other |= dict.fromkeys(family.ranks, family)

    def counts(self) -> dict[str, int]:
        """How much was read."""
        return {"programs read": len(self.read), "calls read": self.calls, "families": self.families}

    def at(self, rank: int) -> HasGraph:
        """The plan's own program of a rank."""
        return self.other[rank].at(rank) if rank in self.other else self.program(rank)


class Whole:
    """Whole programs, interpreted."""

    def __init__(self, proof: Proof, own: Own, inputs: Sequence[Input], outputs: Sequence[Output]) -> None:
        self.proof, self.own, self.inputs, self.outputs = proof, own, inputs, outputs
        self.mesh = proof.after.mesh
        self.count = self.within = 0
        self._pattern: Rank | None = None

    def counts(self) -> dict[str, int]:
        """How much was interpreted."""
        return {"whole programs": self.count, "programs within a whole one": self.within}

    def interpret(self, changed: Mapping[int, HasGraph], earlier: list[Within]) -> None:
        """Interpret what must be: see above. ``earlier`` are whole programs for other outputs; this one joins them.

        Raises:
            Failed: a program is wrong.
        """
        own = self.own
        if own.pattern is not None:
            rank = pair(own.pattern.ranks, self.mesh)[0]
            program = own.pattern.settled(rank)
            if not any(self._stands_within(each, rank, program) for each in earlier):
                self._lock_step({rank: program}, ())
                assert self._pattern is not None
                earlier.append(Within(self._pattern))
            self._promises()
        for family in own.alike:
            self._lock_step({r: family.at(r) for r in pair(family.ranks, self.mesh)}, ())
        apart = {*changed, *own.other}
        if apart:
            axes = {
                tuple(n.kwargs["axes"])
                for n in self.proof.after.nodes
                if isinstance(n.op, OwnOp) and n.kwargs.get("axes")
            }
            near = {m for r in apart for each in axes for m in self.mesh.group(r, each)}
            self._lock_step({r: changed.get(r) or own.at(r) for r in sorted(apart | near)}, apart)

    def _stands_within(self, whole: Within, rank: int, program: HasGraph) -> bool:
        """Whether a program does nothing that a whole one does not do, and gives what it should."""
        made = Rank(self.proof, rank, program, self.inputs)
        if not whole.read(made):
            return False
        try:
            made.outputs(self.outputs)
        except Failed:  # it is interpreted then, which says where it is wrong
            return False
        self._pattern, self.within = made, self.within + 1
        return True

    def _lock_step(self, programs: Mapping[int, HasGraph], apart: Iterable[int]) -> None:
        alone = set(apart)
        made = {r: Rank(self.proof, r, each, self.inputs, r in alone) for r, each in programs.items()}
        self.count += len(made)
        LockStep(self.proof, made, self._pattern if alone else None).run()
        for rank in made.values():
            rank.outputs(self.outputs)
        self._pattern = self._pattern or next(iter(made.values()))

    def _promises(self) -> None:
        """Outputs that are placed otherwise than promised, but are the same box where that was seen, are it on all
        ranks: what is linear in each coordinate and the same at 0 and 1 is the same."""
        assert self._pattern is not None
        zero = dict.fromkeys((axis.name for axis in self.mesh.space), 0)
        places = [self.mesh.rank(zero)]
        places += [self.mesh.rank({**zero, axis.name: 1}) for axis in self.mesh.space if axis.size > 1]
        self._pattern.promised(self.outputs, places)


def _collectives(family: Family) -> list[tuple[Any, str]]:
    """What is asked of which groups, in order."""
    found = []
    for node in family.program.graph.nodes:
        if node.op == "call_function" and node.target in COLLECTIVES:
            found.append((node.target, str(node.args[-1]).partition("@")[0]))
    return found
