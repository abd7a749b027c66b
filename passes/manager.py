"""Passes, and the manager that runs them in order.

A pass is a frozen dataclass; its fields are its options, so that ``FuseComm(mb=25.0)`` prints and parses as
``fuse-comm{mb=25.0}``. It says what it ``requires`` and ``establishes``: a wrong order is a clear error before
anything runs. The graph is verified between passes, and a callback between them makes the dumps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from shardfx.ir.comm import Planner
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Node, Value, op_name
from shardfx.ir.rules import RuleBook
from shardfx.ir.spec import Cut, Spec
from shardfx.ir.verify import verify_graph

from .text import value_text

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
    planner: Planner
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


def check_order(passes: Iterable[Pass]) -> None:
    """Every pass's requirements are established by an earlier one.

    Raises:
        Error: naming the pass, what it lacks, and which passes establish that.
    """
    established: set[str] = set()
    before: list[str] = []
    for each in passes:
        if not isinstance(each, Pass):
            raise Error(
                "this is not a pass",
                where="Hints(passes=...)",
                expected="an instance of a subclass of shardfx.Pass, such as MyPass()",
                got=repr(each),
            )
        missing = each.requires - established
        if missing:
            raise Error(
                f"pass {each.name!r} stands too early",
                expected=f"{', '.join(sorted(missing))} established before it",
                got=f"{', '.join(before) or 'nothing'} before it",
                remedy="move it behind the pass that establishes that",
            )
        established |= each.establishes
        before.append(each.name)


def run_passes(
    graph: Graph,
    passes: Iterable[Pass],
    context: Context,
    on_pass: Callable[[Pass, Graph], None] | None = None,
) -> None:
    """Run ``passes`` over ``graph``, verifying it after each; ``on_pass`` sees the graph after each pass."""
    passes = tuple(passes)
    check_order(passes)
    ran: list[str] = []
    for each in passes:
        started = time.perf_counter()
        try:
            each.run(graph, context)
        except Error:
            raise
        except Exception as error:
            raise PassError(
                f"pass {each.name!r} failed: {type(error).__name__}: {error}",
                where=f"after {', '.join(ran) or 'capture'}",
                remedy="if it is your own pass, see the traceback above; else please report it",
            ) from error
        graph.established |= each.establishes
        verify_graph(graph, after=each.name)
        context.seconds[each.name] = context.seconds.get(each.name, 0.0) + time.perf_counter() - started
        ran.append(each.name)
        if on_pass is not None:
            on_pass(each, graph)
