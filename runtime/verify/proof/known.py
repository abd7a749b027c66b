"""What a proof knows: of each node of a rank's program, and for all ranks together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from shardfx.ir.graph import Graph
from shardfx.ir.spec import Spec

from .deduction import Deduction, Fact
from .elements import Elements
from .numbering import Numbering
from .terms import Universe


@dataclass
class Known:
    """What is known of one fx node on one rank: facts, numbered elements, several results, or why nothing is."""

    facts: list[Fact] | None = None
    codes: Elements | None = None
    hints: Sequence[int] = ()
    many: list[Known] | None = None
    waits: bool = False
    why: str = ""


@dataclass
class Proof:
    """One verification: the terms, the rules, the element numbers; shared by all ranks."""

    after: Graph
    universe: Universe
    deduction: Deduction
    numbering: Numbering
    drawn: dict[int, Spec] = field(default_factory=dict)
    """The placement for which each random mask is drawn."""
    deduced: dict[Hashable, Known] = field(default_factory=dict)
    """What follows from calls: one call stands in several programs of a rank."""
    reach: dict[int, int] = field(default_factory=dict)
    """For each rank, how many calls stand one behind the other in what a rule writes for an op."""
    nodes: int = 0
    collectives: int = 0
