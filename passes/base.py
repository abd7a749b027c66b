"""Passes: frozen dataclasses whose fields are their options, and the context that they get beside the graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from shardfx.ir.cost.machine import Machine
from shardfx.ir.dim_sharding import DimSharding
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Node, Strategy, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.names import pattern
from shardfx.ir.ops.alike import alike
from shardfx.ir.ops.redistribute import Redistribution
from shardfx.ir.rules.book import RuleBook, replicated
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.rules.strategy import strategy
from shardfx.ir.validate import COMM_EXPLICIT, SHARDED

from .pass_text import options_of

__all__ = ["COMM_EXPLICIT", "HINTED", "SHARDED", "Pass", "PassContext", "PassError", "RuleCache", "check_requires"]
__all__ += ["derived"]

HINTED = "HINTED"
"""The user's hints are written on the values that they name."""


class KnownRule(NamedTuple):
    """A node's rule, and its source: somebody wrote it, it was found by running the op, or there is none (all is
    replicated)."""

    rule: ShardingRule
    source: Literal["written", "discovered", "none"]


@dataclass
class RuleCache:
    """The rules of nodes, and their strategies on a mesh, each made once; nodes alike (of repeated blocks) share one
    rule. All passes of a pipeline share one cache, that of their context."""

    book: RuleBook
    mesh: Mesh
    _rules: dict[object, KnownRule] = field(default_factory=dict)
    _strategies: dict[object, Strategy] = field(default_factory=dict)

    def rule(self, node: Node) -> ShardingRule:
        """The rule of a node; a replicated one, where there is none."""
        return self.known(node).rule

    def known(self, node: Node) -> KnownRule:
        """The rule of a node, and its source."""
        key = alike(node)
        if key not in self._rules:
            entry = self.book.entry(node.op)
            made = entry.make(node) if entry is not None else None
            if entry is None or made is None:
                self._rules[key] = KnownRule(replicated(node), "none")
            else:
                self._rules[key] = KnownRule(made, "discovered" if entry.discovered else "written")
        return self._rules[key]

    def strategy(
        self, rule: ShardingRule, shardings: Mapping[str, DimSharding], partial: Mapping[str, Any] | None = None
    ) -> Strategy:
        """The strategy by one of these rules (see :func:`shardfx.ir.rules.strategy.strategy`)."""
        key = (id(rule), tuple(shardings.items()), tuple(partial.items()) if partial else None)
        found = self._strategies.get(key)
        if found is None:
            found = self._strategies[key] = strategy(rule, shardings, self.mesh, partial)
        return found


@dataclass
class PassContext:
    """The state that passes share besides the graph: nothing in it decides, but for the rules and the user's specs.

    Attributes:
        rules: the rules of ops; ``cache`` has those of nodes, each made once.
        planner: finds the cheapest communication on the mesh.
        specs, strategies: the user's hints, as given: ``bind-hints`` writes them onto values and nodes.
        machine: what a rank runs on.
        seconds: how long each pass took.
    """

    rules: RuleBook
    planner: Redistribution
    specs: Mapping[str, Any] = field(default_factory=dict)
    strategies: Mapping[str, Any] = field(default_factory=dict)
    machine: Machine = field(default_factory=lambda: Machine.of(None))
    seconds: dict[str, float] = field(default_factory=dict)
    cache: RuleCache = field(init=False)

    def __post_init__(self) -> None:
        self.cache = RuleCache(self.rules, self.planner.mesh)


@dataclass(frozen=True)
class NamedPass:
    """A pass of any kind: its name, and what it requires to be established before it, and establishes."""

    name: ClassVar[str] = ""
    requires: ClassVar[frozenset[str]] = frozenset()
    establishes: ClassVar[frozenset[str]] = frozenset()

    def __str__(self) -> str:
        return f"{self.name}{options_of(self)}"


@dataclass(frozen=True)
class Pass(NamedPass):
    """A transformation of a graph.

    ``before`` and ``after`` are the slot in which it stands when a user adds it to the built-in passes: the name of one
    of them. ``after`` goes first; without either it stands before ``order``. Where a pass ``copies`` nodes, the copies
    are made by whoever made the original. One that ``repeats`` may stand in a pipeline several times.

    Subclass it as a frozen dataclass, give it a ``name``, and write :meth:`run`::

        @dataclass(frozen=True)
        class CountNodes(Pass):
            name: ClassVar[str] = "count-nodes"

            def run(self, graph, context):
                graph.notes.append(f"{len(graph.nodes)} nodes")
                return False
    """

    before: ClassVar[str] = "order"
    after: ClassVar[str] = ""
    copies: ClassVar[bool] = False
    repeats: ClassVar[bool] = False

    def run(self, graph: Graph, context: PassContext) -> bool:
        """Transform ``graph`` (through a Rewriter); returns whether it changed."""
        raise NotImplementedError


def check_requires(each: NamedPass, established: Collection[str], before: Sequence[str], kind: str = "pass") -> None:
    """Raise if a pass precedes one that establishes its requirements; ``before`` has the names of those before it.

    Raises:
        Error: naming the pass, what it lacks, and which passes stand before it.
    """
    missing = each.requires - set(established)
    if missing:
        raise Error(
            f"{kind} {each.name!r} stands too early",
            expected=f"{', '.join(sorted(missing))} established before it",
            got=f"{', '.join(before) or 'nothing'} before it",
            remedy="move it behind the pass that establishes that",
        )


def derived(graph: Graph, values: Iterable[Value], every: bool = False) -> set[Value]:
    """Some values, and all that depend on any of them, or, with ``every``, on nothing else."""
    found = set(values)
    for node in graph.nodes:
        operands = set(node.operands)
        if operands and (operands <= found if every else operands & found):
            found.update(node.outs)
    return found


class PassError(Error):
    """A pass that broke the graph or failed: its name, and the passes before it."""


def is_within(module: str, text: str) -> bool:
    """Whether a pattern names a module, or one that it is in."""
    matches, parts = pattern(text).fullmatch, module.split(".")
    return any(matches(".".join(parts[:count])) for count in range(1, len(parts) + 1))
