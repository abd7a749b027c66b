"""What a pass is: a frozen dataclass whose fields are its options, and what it is given beside the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar

from shardfx.ir.cut import Cut
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Node, Value, op_name
from shardfx.ir.ops.redistribute import Redistribution
from shardfx.ir.rules.book import RuleBook
from shardfx.ir.spec import Spec

from .options import value_text

SHARDED = "SHARDED"
"""Every node has a strategy."""
COMM_EXPLICIT = "COMM_EXPLICIT"
"""Every operand has the placement that its node needs: what differs is a ``comm`` node."""


@dataclass(eq=False)
class Decision:
    """Why a dim of a value is cut as it is: from where, and what was turned down.

    ``node`` is the op that carried the cut on, ``near`` the tensor of it that had the cut, ``causes`` the decisions
    that gave it to its tensors; a hint has none of them. What was ``turned_down`` is told as texts, each perhaps of a
    value.
    """

    value: Value
    dim: int
    cut: Cut
    level: str = ""
    hint: str = ""
    turned_down: tuple[tuple[str, Value | None], ...] = ()
    node: Node | None = None
    near: Value | None = None
    causes: tuple[Decision, ...] = ()

    @property
    def how(self) -> str:
        """The hint, or through which kind of op."""
        return f"the hint {self.hint!r}" if self.hint else self.level

    @cached_property
    def step(self) -> int:
        """One for a hint; else one more than the steps of its causes, so that it is behind them."""
        open_ = [self]
        while "step" not in vars(self):  # a walk, for a chain of causes goes through all blocks of a model
            made = open_[-1]
            missing = [each for each in made.causes if "step" not in vars(each)]
            open_ += missing
            if not missing:
                vars(open_.pop())["step"] = 1 + max((each.step for each in made.causes), default=0)
        return self.step

    def down(self, name: Callable[[Value], str] = repr) -> str:
        """What was turned down, in words."""
        return ", ".join(text + (f" of {name(value)}" if value is not None else "") for text, value in self.turned_down)

    @property
    def source(self) -> str:
        if self.node is None or self.near is None:
            return self.how
        return f"{self.near!r} through {op_name(self.node.op)} @ {self.node.where} ({self.how})"

    def __str__(self) -> str:
        rest = f"; turned down: {self.down()}" if self.turned_down else ""
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
        options = ",".join(f"{f.name}={value_text(getattr(self, f.name))}" for f in fields(self) if f.init)
        return f"{self.name}{{{options}}}" if options else self.name


class PassError(Error):
    """A pass that broke the graph or failed: names the pass and those that ran before it."""
