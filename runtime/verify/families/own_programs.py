"""The plan's own programs, read family by family: those of ranks that have the same stages, if there are stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardfx.ir.graph import Graph, Input, Node, Output
from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.program.loops.schedule_actions import ends_here, is_done
from shardfx.runtime.verify.movers import COLLECTIVES, MESSAGES
from shardfx.runtime.verify.proof.interpreter import HasGraph

from .family import Family, families
from .op_code import Reading, same_numbers
from .single_ops import SingleOps


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

    def at(self, graph: Graph, rank: int) -> Asked:
        """What of them is of the stages of a rank."""
        coords = graph.mesh.coords(rank)
        inputs, outputs = ends_here(graph, self.inputs, self.outputs, coords)
        nodes = [node for node in self.nodes if is_done(node, graph, coords)]
        return replace(self, nodes=nodes, inputs=inputs, outputs=outputs)


class Own:
    """Programs of ranks that have the same stages."""

    def __init__(self, ops: SingleOps, asked: Asked, ranks: Sequence[int]) -> None:
        self.asked, nodes = asked, asked.nodes
        self.families = self.calls = 0
        self.read: dict[int, Family] = {}
        """By rank: families whose program is the planned graph in the code of its ops."""
        self.alike: dict[int, Family] = {}
        """Families with other code, but with no number other than the ops' own."""
        self.other: dict[int, Family] = {}
        """Families with other code."""
        order: list[Any] | None = None
        mine = set(ranks) - asked.changed.keys()
        parts = [[rank for rank in part if rank in mine] for part in ops.parts]
        for family in families(asked.program, sorted(filter(None, parts), key=len, reverse=True)):
            self.families += 1
            codes = ops.codes(family.ranks, nodes)
            reading = Reading(family, nodes, codes)
            order, own = order or _speaks(family), _speaks(family)
            if own == order and reading.first_other(asked.inputs, asked.outputs) is None:
                self.read |= dict.fromkeys(family.ranks, family)
                self.calls += reading.calls * len(family.ranks)
            elif own == order and not asked.given & {*family.ranks} and same_numbers(family, nodes, codes):
                self.alike |= dict.fromkeys(family.ranks, family)
            else:
                self.other |= dict.fromkeys(family.ranks, family)

    def counts(self) -> dict[str, int]:
        """How much was read."""
        return {"programs read": len(self.read), "calls read": self.calls, "families": self.families}

    def at(self, rank: int) -> HasGraph:
        """The plan's own program of a rank."""
        family = self.alike.get(rank) or self.other.get(rank)
        return self.asked.program(rank) if family is None else family.at(rank)

    def settled(self, rank: int) -> HasGraph:
        """The same, of a family that is not needed any more."""
        return self.read[rank].settled(rank) if rank in self.read else self.at(rank)


def _speaks(family: Family) -> list[Any]:
    """What is asked of which groups, and sent to whom, in order."""
    found: list[Any] = []
    for node in family.program.graph.nodes:
        if node.op == "call_function" and node.target in COLLECTIVES | MESSAGES:
            row = row_of(node.target)
            to = node.args[-4:-2] if row is not None and row.message else ()
            found.append((node.target, str(node.args[-1]).partition("@")[0], *to))
    return found
