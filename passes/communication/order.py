"""order: communication starts as early as possible, so that it overlaps with computation.

    %5 = mm(%3, %w)            %5 = mm(%3, %w)
    %6 = mm(%4, %3)            %7 = comm.all_reduce(%5)      starts; nothing waits yet
    %7 = comm.all_reduce(%5)   %6 = mm(%4, %3)
    %8 = add(%7, %1)           %8 = add(%7, %1)              waits just before this

A gather of stored parameters could start at once, but then all parameters would be replicated at the same time: it
starts when the ``ahead``-th op before its own first one that needs gathered parameters does; and so does, in the
backward, one of what the forward kept in slices. Slices of what a rank has are taken where they are needed: that waits
for nobody. All ranks run one graph, so that the order of collectives is the same on all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from shardfx.ir.graph import Graph, Node, Phase, Value
from shardfx.ir.ops.context.attention_steps import attention_step
from shardfx.ir.ops.sends import is_comm, sends
from shardfx.ir.ops.traits import is_view, narrows
from shardfx.passes.base import COMM_EXPLICIT, Pass, PassContext
from shardfx.passes.pass_text import check_options


@dataclass(frozen=True)
class Order(Pass):
    """Start each transfer as early as possible; gathers of stored parameters ``ahead`` uses before their own."""

    name: ClassVar[str] = "order"
    requires: ClassVar[frozenset[str]] = frozenset({COMM_EXPLICIT})

    ahead: int = 1

    def __post_init__(self) -> None:
        check_options(self, ahead=0)

    def run(self, graph: Graph, context: PassContext) -> bool:
        before = graph.nodes
        graph.nodes = _Places(graph, self.ahead).ordered()
        graph.rename()
        return graph.nodes != before


@dataclass
class _Places:
    """The positions of a graph's nodes: ``now``, and ``at`` those of nodes that move."""

    graph: Graph
    ahead: int
    at: dict[Node, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.now = {node: i for i, node in enumerate(self.graph.nodes)}
        self.users = self.graph.users()
        self.fetches = self._find_fetches()

    def ordered(self) -> list[Node]:
        """The nodes in their new order."""
        self._place_fetches()
        for node in self.graph.nodes:
            if sends(node, self.graph.mesh) and node not in self.fetches:
                chain: list[Node] = [node]
                ready = max((self._ready(value, chain) for value in node.operands), default=-1.0)
                for each in chain:
                    self.at[each] = min(self._place(each), ready + 0.5)
        for node in reversed(self.graph.nodes):
            kept = is_comm(node) and not node.op.sends_nothing and not sends(node, self.graph.mesh)
            if kept and node not in self.fetches:
                uses = [self._place(user) for value in node.outs for user in self.users[value]]
                made = [self._place(each) for each in _makers(node)]
                self.at[node] = max([min(uses, default=self.now[node]) - 0.5, *made])
        return sorted(self.graph.nodes, key=lambda node: (self._place(node), self.now[node]))

    def _place(self, node: Node) -> float:
        return self.at.get(node, self.now[node])

    def _ready(self, value: Value, chain: list[Node]) -> float:
        """The position of the last op that computes a value, behind the views between, which go into ``chain``."""
        node = value.node
        if node is None:
            return -1.0
        if node in self.fetches:
            return self.at[node]
        if not is_view(node):
            return self.now[node]
        if node not in chain:
            chain.append(node)
        return max((self._ready(operand, chain) for operand in node.operands), default=-1.0)

    def _find_fetches(self) -> set[Node]:
        """The transfers of inputs (stored parameters and others; for the backward also what the forward made), and the
        views and casts to fewer bits before and behind them; and the keys for a step of a ring."""
        found: set[Node] = set()
        for node in self.graph.nodes:
            late = node.phase is not Phase.FORWARD
            there = all(made in found or (made.phase is Phase.FORWARD and late) for made in _makers(node))
            step = is_comm(node) and {user.op for value in node.outs for user in self.users[value]} == {attention_step}
            if step or (there and (is_comm(node) or is_view(node) or narrows(node))):
                found.add(node)
        return found

    def _place_fetches(self) -> None:
        """Let each transfer start where an earlier one's result is first computed with; what is made of it in the
        meantime stands where its own is."""
        ordered = sorted(self.fetches, key=self.now.__getitem__)
        first: dict[Node, int] = {}
        """Where the first op stands that computes with it."""
        leads: set[Node] = set()
        """Transfers, and the views that lead to one."""
        for node in reversed(ordered):
            uses = [user for value in node.outs for user in self.users[value]]
            first[node] = min((first.get(user, self.now[user]) for user in uses), default=len(self.now))
            if sends(node, self.graph.mesh) or not leads.isdisjoint(uses):
                leads.add(node)
        needed = sorted({first[node] for node in leads})
        ahead = self.ahead
        starts = {use: needed[i - ahead] - 0.5 if i >= ahead else float(i - ahead) for i, use in enumerate(needed)}
        behind: set[Node] = set()
        for node in ordered:
            late = not behind.isdisjoint(_makers(node))
            if node in leads:
                made = [self.at[n] if n in self.fetches else self.now[n] + 0.5 for n in _makers(node)]
                self.at[node] = max([starts[first[node]], *made])
            else:
                self.at[node] = first[node] - 0.5 if late else self.now[node]
            if sends(node, self.graph.mesh) or late:
                behind.add(node)


def _makers(node: Node) -> list[Node]:
    """The nodes that make its operands."""
    return [value.node for value in node.operands if value.node is not None]
