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
from shardfx.ir.validate import COMM_EXPLICIT, SHARDED

from .options import options_of
from .rule_cache import RuleCache

__all__ = ["COMM_EXPLICIT", "HINTED", "SHARDED", "Context", "Decision", "Pass", "PassError"]

HINTED = "HINTED"
"""The user's hints are written on the values that they name."""


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
        """Where the cut comes from, in words: the tensor and the op that carried it on, or the hint."""
        if self.node is None or self.near is None:
            return self.how
        return f"{self.near!r} through {op_name(self.node.op)} @ {self.node.where} ({self.how})"

    def __str__(self) -> str:
        rest = f"; turned down: {self.turned_down}" if self.turned_down else ""
        cut = self.cut.text(self.value.shape[self.dim])
        return f"step {self.step}: {self.value!r} dim {self.dim} cut {cut}, from {self.source}{rest}"


@dataclass
class Context:
    """What passes share besides the graph: nothing in it decides, but for the rules and the user's specs.

    Attributes:
        rules: the rules of ops; ``cache`` has those of nodes, each made once.
        planner: finds the cheapest communication on the mesh.
        specs: the user's hints, as given: ``bind-hints`` writes them onto values.
        decisions: why values are cut as they are, for ``pm.explain``.
        seconds: how long each pass took.
    """

    rules: RuleBook
    planner: Redistribution
    specs: Mapping[str, Any] = field(default_factory=dict)
    decisions: dict[Value, list[Decision]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    cache: RuleCache = field(init=False)

    def __post_init__(self) -> None:
        self.cache = RuleCache(self.rules, self.planner.mesh)


@dataclass(frozen=True)
class Pass:
    """One thing that may be done to a graph.

    ``before`` and ``after`` are the slot in which it stands when a user adds it to the built-in passes: the name of one
    of them. ``after`` goes first; without either it stands before ``order``.

    Subclass it as a frozen dataclass, give it a ``name``, and write :meth:`run`::

        @dataclass(frozen=True)
        class CountNodes(Pass):
            name: ClassVar[str] = "count-nodes"

            def run(self, graph, context):
                graph.notes.append(f"{len(graph.nodes)} nodes")
                return False
    """

    name: ClassVar[str] = ""
    requires: ClassVar[frozenset[str]] = frozenset()
    establishes: ClassVar[frozenset[str]] = frozenset()
    before: ClassVar[str] = "order"
    after: ClassVar[str] = ""

    def run(self, graph: Graph, context: Context) -> bool:
        """Change ``graph`` (through a Rewriter); says whether it did."""
        raise NotImplementedError

    def __str__(self) -> str:
        return f"{self.name}{options_of(self)}"


class PassError(Error):
    """A pass that broke the graph or failed: names the pass and those that ran before it."""
