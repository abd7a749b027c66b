"""The proof for many ranks, at the cost of a few: equal ops once, equal programs once, and every program read.

Ranks that hold equal shapes (all of them, where every cut of the plan is even) have programs that differ in numbers and
in names of groups only, and where an op is done otherwise on some ranks. Then these are proven instead of all programs
one by one:

1. *Every op at every rank* (:mod:`.single_ops`): its code, alone, takes its operands as the plan places them to its
   results as the plan places them.
2. *The planned graph is the captured one*, by terms, and its outputs are placed as promised.
3. *Every rank's program is the planned graph in that code.* The code that writes programs (lowering and rank passes)
   runs once for all ranks whose numbers take it the same way (:mod:`.varying`), and what it writes for such a *family*
   is read op by op (:mod:`.op_code`): each call is the next one of its op's code, with this rank's own numbers, of what
   stands for the operands that the planned graph gives the op; and the families keep one order of collectives.
4. *One whole program*, with all its collectives: order, operands, waits and results. Its partners in collectives are
   *shadows* (:mod:`..proof.meeting`): by 1 and 3, they hold at each node what the rank itself holds, at their own
   coordinates. Where ranks hold more or less than others, it is one of each box of ranks that hold as much
   (:mod:`.alike_ranks`), side by side, and a shadow holds what that of its own box does. Programs for fewer outputs,
   whose calls all stand in one that was interpreted, in its order, are read as parts of it (:mod:`..proof.within`).

Where the plan has stages, ranks at one place along their axis have the same ops, inputs and outputs, and are read for
themselves: ranks of two places are in no family, and each place has its own order of collectives and messages. An op
alone is done by all ranks, whatever its stage; a send by those that it concerns, and *all* ranks' messages of it are
compared (:mod:`.stage_messages`). In 3 each message of an op's code must stand in the program once, for a rank waits
for it. In 4 the whole programs are those of a *line* of ranks, one of each place and at the same coordinates else,
which send to one another. Messages at other coordinates are then right by 1 and 3: they are those of the ops' codes,
with each rank's own turn and group, and what a rank sends is what 1 and 3 say of its operand. In which order two ranks
send and receive over all turns is checked beforehand (:mod:`..order_of_turns`).

A program that is not the planned graph in the code of its ops (rank passes may write it otherwise) is interpreted as a
whole, on each rank of its family, and so is every rank with which it speaks, and the lines of these; on two ranks and
their lines, where at least all its numbers are those of its ops' codes, unless somebody gave it. A program that
somebody gives for a rank alone is always interpreted, with every rank to which it speaks; one that is given for many
ranks, the turns of one, is read first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shardfx.ir.graph import Graph
from shardfx.ir.rules.book import RuleBook
from shardfx.runtime.verify.fault import Failed, Fault
from shardfx.runtime.verify.proof.known import Proof

from .alike_ranks import AlikeRanks
from .own_programs import Asked, Own
from .single_ops import SingleOps, Write
from .whole_programs import Earlier, Whole, place_of

EVERY = 16
"""On a mesh of up to so many ranks every program is interpreted."""


def verify(
    proof: Proof, book: RuleBook, write: Write, asked: Sequence[Asked], alike: AlikeRanks, counts: Counter[str]
) -> tuple[Fault | None, int]:
    """The first fault of the programs, or None, and of which; ``counts`` says how much was checked.

    ``write`` writes one op alone, ``alike`` says which ranks hold as much.
    """
    graph = proof.after
    ops = SingleOps(graph, [node for each in asked for node in each.nodes], book, write, alike)
    found = ops.fault()
    counts["distinct ops at every rank"] += len(ops)
    if found is not None:
        return found, 0
    earlier: list[Earlier] = []
    for number, each in enumerate(asked):
        own = {place: Own(ops, each.at(graph, ranks[0]), ranks) for place, ranks in _places(graph).items()}
        whole = Whole(proof, own, alike)
        try:
            whole.interpret(each.changed, earlier)
        except Failed as failed:
            return failed.fault, number
        finally:
            counts.update(whole.counts())
            for part in own.values():
                counts.update(part.counts())
    return None, 0


def _places(graph: Graph) -> dict[int, list[int]]:
    """The ranks by the stages that they have: by their place along the axis of stages."""
    found: dict[int, list[int]] = {}
    for rank in range(graph.mesh.size):
        found.setdefault(place_of(graph, rank), []).append(rank)
    return found
