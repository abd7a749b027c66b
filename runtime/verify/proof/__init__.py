"""Static verification: abstract interpretation of every rank's program, compared with the model.

All ranks are interpreted in lock-step, without numbers. A tensor of a rank is known by *facts*: it is box B of term t
of the captured graph, perhaps a share of a sum over some axes. A fact about an op's result follows from facts about its
operands, if the op, its arguments on this rank (shapes, offsets, bounds of masks) and its operands are those of the
op's sharding rule; communication and packing are executed on element numbers (:mod:`.numbering`). At the end each
output must be the box of the captured output that its place promises, and no share.

Proven: every op, argument, operand, group, reduction, order, offset and padding of every rank; that all ranks of a
group come together; that the planned graph is the captured one, sums reordered, copies and decompositions aside.
Assumed: the sharding rules (the oracle executes them), torch's kernels, the capture itself, exact arithmetic (a sum in
another order is the same sum), and decompositions, which are compared with their op on random numbers only (and above
``CHECKED_NUMEL`` elements not at all). No fact is read off the programs'
metadata, and none off the plan: its placements are tried as guesses where the operands leave a choice, and each guess
is checked. A program may be right in a way that no rule knows: then the answer is "unknown", at the node where the
facts end.
"""
