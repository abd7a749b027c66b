"""Communication volume: the formula of what each collective sends.

For ``n`` ranks, and a *full* value of ``b`` bytes (the gathered, unreduced or exchanged local value), one rank sends

    all-gather, reduce-scatter, all-to-all, broadcast    (n-1)/n b     in log2(n) messages, one behind the other
    all-reduce                                         2 (n-1)/n b     in twice as many (Patarasu and Yuan, 2009)
    slice                                                  nothing
    halo                                      the rows that others need, in as many messages as an all-to-all

The factor, and which values are full, are facts of an op's row (:class:`shardfx.ir.ops.table.OwnOp`). The planner
asks before a node is there, report and pictures ask of a node, a replay and the run-time counts of a call on real
tensors; all of them by the row. How long it takes says the link (:meth:`shardfx.ir.mesh.Link.seconds`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from shardfx.ir.graph import Graph, InputKind, Node, Phase, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.spec import Spec

from .traits import base_name, is_view, narrows


class Sent(NamedTuple):
    """The communication of one rank: dependent messages, and bytes. They add."""

    messages: float = 0.0
    nbytes: float = 0.0

    def __add__(self, other: tuple[object, ...]) -> Sent:
        """The sum of two sequential communications."""
        assert isinstance(other, Sent)
        return Sent(self.messages + other.messages, self.nbytes + other.nbytes)

    def times(self, count: float) -> Sent:
        """The communication of ``count`` repetitions."""
        return Sent(self.messages * count, self.nbytes * count)


def sent(factor: float, ranks: int, full: float) -> Sent:
    """The communication of one of ``ranks``, if (n-1)/n of ``full`` bytes are sent ``factor`` times."""
    return Sent(factor * math.log2(ranks), factor * full * (ranks - 1) / ranks)


def exchanged(ranks: int, nbytes: float) -> Sent:
    """The communication of one of ``ranks`` that sends ``nbytes`` to others; nothing if there are none."""
    return Sent(math.log2(ranks), nbytes) if nbytes else Sent()


def is_comm(node: Node) -> bool:
    """Whether the node is communication: it moves data between ranks (or takes a rank's shard)."""
    return base_name(node).startswith("comm.")


EACH_ITERATION = "each_iteration"
"""Node attribute: run in each iteration, though the result is the same in all."""


def is_part(node: Node, mesh: Mesh) -> bool:
    """Whether a halo node only takes a part of local rows, as every rank has those that it needs."""
    return node.op.rows is not None and not node.op.sends(node, mesh).nbytes


def sends(node: Node, mesh: Mesh) -> bool:
    """Whether a node sends data to other ranks."""
    return is_comm(node) and not node.op.sends_nothing and not is_part(node, mesh)


def loop_of(node: Node, mesh: Mesh) -> int:
    """The trip count of a node in a step: one for each iteration of the loop axes of its operands, or of all, if its
    attribute says so."""
    if node.attrs.get(EACH_ITERATION):
        return mesh.extent(axis.name for axis in mesh.axes if axis.loop)
    spec: Spec | None = node.operands[0].spec if node.operands else None
    return mesh.extent(
        axis for axis in ((*spec.axes, *spec.partial_axes) if spec is not None else ()) if mesh[axis].loop
    )


def fetched(graph: Graph) -> set[Value]:
    """Stored parameters, and values of the forward derived from them by gathers, casts and views alone."""
    found = {inp.value for inp in graph.of_kind(InputKind.PARAMETER)}
    for node in graph.nodes:
        moves = is_comm(node) or is_view(node) or narrows(node)
        if node.phase is Phase.FORWARD and moves and all(value in found for value in node.operands):
            found.update(node.outs)
    return found
