"""What a pass is: a frozen dataclass whose fields are its options, and what it is given beside the graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from shardfx.ir.cut import Cut
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Node, Value, op_name
from shardfx.ir.ops.redistribute import Redistribution
from shardfx.ir.rules.book import RuleBook
from shardfx.ir.spec import Spec

from .options import options_of

SHARDED = "SHARDED"
"""Every node has a strategy."""
COMM_EXPLICIT = "COMM_EXPLICIT"
"""Every operand has the placement that its node needs: what differs is a ``comm`` node."""


@dataclass(frozen=True)
class Decision:
    """Why a dim of a value is cut as it is: at which step, from where, and what was turned down.

    ``node`` is the op that carried the cut on, ``near`` the tensor of it that had the cut; a hint has neither.
    """

    step: int
    value: Value
    dim: int
    cut: Cut
    how: str
    turned_down: str = ""
    node: Node | None = None
    near: Value | None = None

    @property
    def source(self) -> str:
        if self.node is None or self.near is None:
            return self.how
        return f"{self.near!r} through {op_name(self.node.op)} @ {self.node.where} ({self.how})"

    def __str__(self) -> str:
        rest = f"; turned down: {self.turned_down}" if self.turned_down else ""
        cut = self.cut.text(self.value.shape[self.dim])
        return f"step {self.step}: {self.value!r} dim {self.dim} cut {cut}, from {self.source}{rest}"


@dataclass
class Context:
    """What passes share: the rules, the planner of communication, the user's specs, and what they noted."""

    rules: RuleBook
    planner: Redistribution
    specs: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    strict: bool = False
    decisions: dict[Value, list[Decision]] = field(default_factory=dict)
    hints: dict[Value, Spec] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Pass:
    """One thing that may be done to a graph.

    Subclass it as a frozen dataclass, give it a ``name``, and write :meth:`run`::

        @dataclass(frozen=True)
        class CountNodes(Pass):
            name: ClassVar[str] = "count-nodes"

            def run(self, graph, context):
                context.notes.append(f"{len(graph.nodes)} nodes")
                return False
    """

    name: ClassVar[str] = ""
    requires: ClassVar[frozenset[str]] = frozenset()
    establishes: ClassVar[frozenset[str]] = frozenset()

    def run(self, graph: Graph, context: Context) -> bool:
        """Change ``graph`` (through a Rewriter); says whether it did."""
        raise NotImplementedError

    def __str__(self) -> str:
        return f"{self.name}{options_of(self)}"


class PassError(Error):
    """A pass that broke the graph or failed: names the pass and those that ran before it."""
