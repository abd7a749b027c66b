"""Static verification: what does every node of every rank's program hold, and is that what the model says?

All ranks are interpreted in lock-step, without numbers. A tensor of a rank is known by *facts*: it is box B of term
t of
the captured program, perhaps a share of a sum over some axes. A fact about an op's result follows from facts about its
operands, if the op, its arguments on this rank (shapes, offsets, bounds of masks) and its operands are those of the
op's
sharding rule; communication and packing are executed on element numbers (:mod:`.moves`). At the end each output must be
the box of the captured output that its place promises, and no share.

Proven: every op, argument, operand, group, reduction, order, offset and padding of every rank; that all ranks of a
group
come together; that the planned graph is the captured one, sums reordered and decompositions aside. Taken as given: the
sharding rules (the oracle executes them), torch's kernels, the capture itself, exact arithmetic (a sum in another order
is the same sum), and decompositions, which are compared with their op on random numbers only (and above
``CHECKED_NUMEL`` elements not at all). No fact is read off the programs' metadata, and none off the plan: its
placements are
tried as guesses where the operands leave a choice, and each guess is checked. A program may be right in a way that
no rule
knows: then the answer is "not proven", at the node where the facts end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import fx

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Input, Output, op_name
from shardfx.ir.rules import RuleBook

from ..virtual import Groups
from .elements import Elements
from .interpret import Failed, Fault, Item, Proof, Rank
from .moves import Numbering, Source, Wrong
from .rules import Deduction
from .terms import Universe, Unjustified, build, differing

c10d = torch.ops._c10d_functional


def verify(
    before: Graph,
    after: Graph,
    book: RuleBook,
    modules: Mapping[int, fx.GraphModule],
    inputs: Sequence[Input],
    outputs: Sequence[Output],
    universe: Universe | None = None,
) -> tuple[Fault | None, dict[str, int]]:
    """The first fault of the programs, or None; and how much was checked.

    ``inputs`` and ``outputs`` are those of every program, in order; ``universe`` is :func:`.terms.build`'s, if it is
    there already.
    """
    counts: dict[str, int] = {"ranks": len(modules), "outputs": len(outputs) * len(modules)}
    try:
        universe = universe or build(before, after, book)
    except Unjustified as error:
        return Fault(str(error)), counts
    counts |= {"terms": len(universe.terms.types), "decompositions": universe.decompositions}
    if universe.trusted:
        counts["decompositions too large to compare"] = universe.trusted
    other = differing(universe, outputs)
    if other is not None:
        what = "the planned graph computes another function of the inputs than the captured one"
        return Fault(what, f"{other.kind.value} {other.name}", None, other.value.name, str(other.value.where)), counts
    proof = Proof(after, universe, Deduction(universe, book, after.mesh), Numbering(universe, after.mesh))
    ranks = [Rank(proof, r, modules[r], inputs) for r in range(after.mesh.size)]
    fault: Fault | None = None
    try:
        lock_step(proof, ranks)
        for rank in ranks:
            rank.outputs(outputs)
    except Failed as failed:
        fault = failed.fault
    return fault, counts | {"nodes": proof.nodes, "collectives": proof.collectives}


def lock_step(proof: Proof, ranks: Sequence[Rank]) -> None:
    """Interpret all ranks up to their next collective, do it where a group has come together, and go on."""
    groups = Groups(proof.after.mesh)
    asks = [rank.run() for rank in ranks]
    waiting: dict[int, tuple[fx.Node, Elements | None, Sequence[int]]] = {}

    def advance(rank: int, reply: Item | None) -> None:
        try:
            waiting[rank] = asks[rank].send(reply)  # type: ignore[arg-type]
        except StopIteration:
            waiting.pop(rank, None)

    for rank in range(len(ranks)):
        advance(rank, None)
    while waiting:
        progressed = False
        for rank in sorted(waiting):
            if rank not in waiting:
                continue
            node = waiting[rank][0]
            members = _members(groups, ranks[rank], node)
            if not all(m in waiting and waiting[m][0].args[-1] == node.args[-1] for m in members):
                continue
            for member, reply in zip(members, _collective(proof, ranks, members, waiting), strict=True):
                del waiting[member]
                advance(member, reply)
            progressed = True
        if not progressed:
            rank, (node, _, _) = min(waiting.items())
            raise Failed(ranks[rank].fault(f"deadlock: the group {node.args[-1]} does not come together here", node))


def _members(groups: Groups, rank: Rank, node: fx.Node) -> Sequence[int]:
    try:
        return groups.members(str(node.args[-1]), rank.rank)
    except Error as error:
        raise Failed(rank.fault(error.what, node)) from None


def _collective(
    proof: Proof,
    ranks: Sequence[Rank],
    members: Sequence[int],
    waiting: Mapping[int, tuple[fx.Node, Elements | None, Sequence[int]]],
) -> Iterator[Item]:
    """What each member gets."""
    nodes = [waiting[m][0] for m in members]
    first = nodes[0]
    for member, node in zip(members, nodes, strict=True):
        exchange = node.target is c10d.all_to_all_single.default
        if node.target is not first.target or (not exchange and node.args[1:] != first.args[1:]):
            what = (
                f"{op_name(node.target)}{node.args[1:]}, where rank {members[0]} does "
                f"{op_name(first.target)}{first.args[1:]}"
            )
            raise Failed(ranks[member].fault(what, node))
    axes = str(first.args[-1]).partition("/")[2].partition("@")[0].split(".")
    tensors = [waiting[m][1] for m in members]
    hints = list(dict.fromkeys(h for m in members for h in waiting[m][2]))
    if any(t is None for t in tensors):
        return iter([Item(why="nothing is known of what is sent") for _ in members])
    known = [t for t in tensors if t is not None]
    try:
        got = proof.numbering.collective(first.target, [n.args[1:-1] for n in nodes], known, axes)
    except (Wrong, RuntimeError) as error:
        return iter([Item(why=str(error)) for _ in members])
    left = list(dict.fromkeys([*proof.numbering.inside(got), *_reduced(proof, hints, axes, first)]))
    return iter([Item(codes=t, hints=left) for t in got])


def _reduced(proof: Proof, hints: Sequence[int], axes: Sequence[str], node: fx.Node) -> list[int]:
    """The sources of empty tensors behind a collective."""
    if node.target not in (c10d.all_reduce.default, c10d.reduce_scatter_tensor.default):
        return list(hints)
    found = []
    for hint in hints:
        source = proof.numbering.sources[hint - 1]
        partial = tuple(p for p in source.partial if p[0] not in axes)
        origins = tuple(o for o in source.origins if o[0] not in axes)
        found.append(proof.numbering.number(Source(source.term, partial, origins)))
    return found
