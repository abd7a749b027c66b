"""Static verification: what does every node of every rank's program hold, and is that what the model says?

All ranks are interpreted in lock-step, without numbers. A tensor of a rank is known by *facts*: it is box B of term t
of the captured program, perhaps a share of a sum over some axes. A fact about an op's result follows from facts about
its operands, if the op, its arguments on this rank (shapes, offsets, bounds of masks) and its operands are those of the
op's sharding rule; communication and packing are executed on element numbers (:mod:`.numbering`). At the end each
output must be the box of the captured output that its place promises, and no share.

Proven: every op, argument, operand, group, reduction, order, offset and padding of every rank; that all ranks of a
group come together; that the planned graph is the captured one, sums reordered, copies and decompositions aside.
Taken as given: the sharding rules (the oracle executes them), torch's kernels, the capture itself, exact arithmetic (a
sum in another order is the same sum; what else is equal by laws stands in :mod:`..forms`), and decompositions, which
are compared with their op on random numbers only (and above ``CHECKED_NUMEL`` elements not at all). No fact is read off
the programs' metadata, and none off the plan: its placements are tried as guesses where the operands leave a choice,
and each guess is checked. A program may be right in a way that no rule knows: then the answer is "unknown", at the node
where the facts end.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence

from shardfx.ir.graph import Graph, Input, Output
from shardfx.ir.program.loops.schedule_actions import ends_here
from shardfx.ir.rules.book import RuleBook
from shardfx.runtime.verify.fault import Failed, Fault

from .deduction import Deduction
from .interpreter import HasGraph, Rank
from .known import Proof
from .meeting import LockStep
from .numbering import Numbering
from .same_function import same_function
from .terms import Universe


def verify(
    before: Graph,
    after: Graph,
    book: RuleBook,
    modules: Mapping[int, HasGraph],
    inputs: Sequence[Input],
    outputs: Sequence[Output],
    universe: Universe | None = None,
) -> tuple[Fault | None, dict[str, int]]:
    """The first fault of the programs, or None; and how much was checked.

    ``inputs`` and ``outputs`` are those of all programs, in order: each has what is of its rank's stages;
    ``universe`` is :func:`.terms.build`'s, if it is there already.
    """
    counts: dict[str, int] = {"ranks": len(modules), "outputs": len(outputs) * len(modules)}
    proof = begin(before, after, book, outputs, counts, universe)
    if isinstance(proof, Fault):
        return proof, counts
    fault = interpret(proof, modules, inputs, outputs)
    return fault, counts | {"nodes": proof.nodes, "collectives": proof.collectives}


def interpret(
    proof: Proof, modules: Mapping[int, HasGraph], inputs: Sequence[Input], outputs: Sequence[Output]
) -> Fault | None:
    """The first fault of the programs of all ranks, or None."""
    after = proof.after
    ends = {r: ends_here(after, inputs, outputs, after.mesh.coords(r)) for r in range(after.mesh.size)}
    ranks = {r: Rank(proof, r, modules[r], given) for r, (given, _) in ends.items()}
    try:
        LockStep(proof, ranks).run()
        for r, rank in ranks.items():
            rank.outputs(ends[r][1])
    except Failed as failed:
        return failed.fault
    return None


def begin(
    before: Graph,
    after: Graph,
    book: RuleBook,
    outputs: Sequence[Output],
    counts: MutableMapping[str, int],
    universe: Universe | None = None,
) -> Proof | Fault:
    """A proof, begun with that the planned graph is the same function of the inputs as the captured one; or the fault
    that it is not."""
    found = same_function(before, after, book, outputs, universe)
    if isinstance(found, Fault):
        return found
    counts.update({"terms": len(found.terms.types), "decompositions": found.decompositions})
    if found.trusted:
        counts["decompositions too large to compare"] = found.trusted
    return Proof(after, found, Deduction(found, book, after.mesh), Numbering(found, after.mesh))


def anew(proof: Proof) -> Proof:
    """The same proof, where it began."""
    after, found = proof.after, proof.universe
    return Proof(after, found, Deduction(found, proof.deduction.book, after.mesh), Numbering(found, after.mesh))
