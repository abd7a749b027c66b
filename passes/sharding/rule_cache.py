"""The rules of the nodes of a graph, each made once."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardfx.ir.graph import Graph, Node
from shardfx.ir.ops.alike import alike
from shardfx.ir.rules.book import RuleBook, replicated
from shardfx.ir.rules.sharding_rule import ShardingRule


@dataclass
class RuleCache:
    """The rule of every node; nodes alike (of repeated blocks) share one.

    Nodes without are put in ``missing``, those whose rule was found by running the op in ``discovered``.
    """

    book: RuleBook
    missing: list[Node] = field(default_factory=list)
    discovered: list[Node] = field(default_factory=list)
    _known: dict[object, tuple[ShardingRule, list[Node] | None]] = field(default_factory=dict)

    def add(self, graph: Graph, rules: dict[Node, ShardingRule]) -> None:
        """Find the rules of the nodes that have none yet."""
        for node in graph.nodes:
            if node in rules:
                continue
            key = alike(node)
            found = self._known.get(key)
            if found is None:
                entry = self.book.entry(node.op)
                made = entry.make(node) if entry is not None else None
                told = self.missing if made is None else self.discovered if entry and entry.discovered else None
                found = self._known[key] = (made or replicated(node), told)
            rules[node], told = found
            if told is not None:
                told.append(node)
