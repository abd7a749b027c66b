"""The rules of the nodes of a graph, each made once.

Nodes alike (those of repeated blocks) share one rule, so that what hangs on a rule can be found by it. All passes of a
pipeline share one cache, that of their context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from shardfx.ir.dim_sharding import DimSharding
from shardfx.ir.graph import Node, Strategy
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.alike import alike
from shardfx.ir.rules.book import RuleBook, replicated
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.rules.strategy import strategy

Source = Literal["written", "discovered", "none"]
"""Where a rule comes from: somebody wrote it, it was found by running the op, or there is none (all is whole)."""


class KnownRule(NamedTuple):
    """A node's rule, and where it comes from."""

    rule: ShardingRule
    source: Source


@dataclass
class RuleCache:
    """The rules of nodes, and their strategies on a mesh, each made once."""

    book: RuleBook
    mesh: Mesh
    _of_form: dict[object, KnownRule] = field(default_factory=dict)
    _strategies: dict[object, Strategy] = field(default_factory=dict)

    def rule(self, node: Node) -> ShardingRule:
        """The rule of a node; one by which nothing is sharded, where there is none."""
        return self.known(node).rule

    def known(self, node: Node) -> KnownRule:
        """The rule of a node, and where it comes from."""
        key = alike(node)
        found = self._of_form.get(key)
        if found is None:
            found = self._of_form[key] = self._make(node)
        return found

    def _make(self, node: Node) -> KnownRule:
        entry = self.book.entry(node.op)
        made = entry.make(node) if entry is not None else None
        if entry is None or made is None:
            return KnownRule(replicated(node), "none")
        return KnownRule(made, "discovered" if entry.discovered else "written")

    def strategy(
        self, rule: ShardingRule, shardings: Mapping[str, DimSharding], partial: Mapping[str, Any] | None = None
    ) -> Strategy:
        """The strategy of one of these rules (see :func:`shardfx.ir.rules.strategy.strategy`)."""
        key = (id(rule), tuple(shardings.items()), tuple(partial.items()) if partial else None)
        found = self._strategies.get(key)
        if found is None:
            found = self._strategies[key] = strategy(rule, shardings, self.mesh, partial)
        return found
