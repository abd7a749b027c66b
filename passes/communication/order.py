"""order: when communication starts. It stands as early as it may, so that it travels while something else is computed.

    %5 = mm(%3, %w)            %5 = mm(%3, %w)
    %6 = mm(%4, %3)            %7 = comm.all_reduce(%5)      starts; nothing waits yet
    %7 = comm.all_reduce(%5)   %6 = mm(%4, %3)
    %8 = add(%7, %1)           %8 = add(%7, %1)              waits just before this

A gather of stored parameters could start at once, but then all parameters would be whole at the same time: it starts
when the ``ahead``-th op before its own first one that needs gathered parameters does; and so does, in the backward, one
of what the forward put away in slices. Rows of those that a rank has are taken where they are needed: that waits for
nobody before. All ranks run one graph, so that
the order of collectives is the same on all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Node, Phase, Value
from shardfx.ir.ops.sends import is_comm, is_part
from shardfx.ir.ops.traits import is_view, narrows
from shardfx.passes.base import COMM_EXPLICIT, Context, Pass


@dataclass(frozen=True)
class Order(Pass):
    """Start each transfer as early as it may; gathers of stored parameters ``ahead`` uses before their own."""

    name: ClassVar[str] = "order"
    requires: ClassVar[frozenset[str]] = frozenset({COMM_EXPLICIT})

    ahead: int = 1

    def __post_init__(self) -> None:
        if self.ahead < 0:
            raise Error(
                "order cannot start transfers late", where="order{ahead=...}", expected="0 or more", got=self.ahead
            )

    def run(self, graph: Graph, context: Context) -> bool:
        before = graph.nodes
        graph.nodes = _Places(graph, self.ahead).ordered()
        graph.rename()
        return graph.nodes != before


@dataclass
class _Places:
    """Where the nodes of a graph stand, and where they shall: ``at`` has those that move."""

    graph: Graph
    ahead: int
    now: dict[Node, int] = field(default_factory=dict)
    users: dict[Value, list[Node]] = field(default_factory=dict)
    at: dict[Node, float] = field(default_factory=dict)

    def ordered(self) -> list[Node]:
        """The nodes in their new order."""
        self.now = {node: i for i, node in enumerate(self.graph.nodes)}
        self.users = self.graph.users()
        fetches = self._fetches()
        self._place_fetches(fetches)
        for node in self.graph.nodes:
            if self._travels(node) and node not in fetches:
                chain: list[Node] = [node]
                ready = max((self._ready(value, fetches, chain) for value in node.operands), default=-1.0)
                for each in chain:
                    self.at[each] = min(self.at.get(each, self.now[each]), ready + 0.5)
        for node in reversed(self.graph.nodes):
            if travels(node) and not self._travels(node) and node not in fetches:
                uses = [self.at.get(user, self.now[user]) for value in node.outs for user in self.users[value]]
                made = [self.at.get(each, self.now[each]) for each in makers(node)]
                self.at[node] = max([min(uses, default=self.now[node]) - 0.5, *made])
        return sorted(self.graph.nodes, key=lambda node: (self.at.get(node, self.now[node]), self.now[node]))

    def _ready(self, value: Value, fetches: set[Node], chain: list[Node]) -> float:
        """Where the last op stands that computes a value, behind the views between, which go into ``chain``."""
        node = value.node
        if node is None:
            return -1.0
        if node in fetches or not is_view(node):
            return self.at[node] if node in fetches else self.now[node]
        if node not in chain:
            chain.append(node)
        return max((self._ready(operand, fetches, chain) for operand in node.operands), default=-1.0)

    # ---- what is there from the start -----------------------------------------------------------------------

    def _fetches(self) -> set[Node]:
        """The transfers of what is there from the start (stored parameters and other inputs; for the backward also what
        the forward made), and the views and casts to fewer bits before and behind them."""
        found: set[Node] = set()
        for node in self.graph.nodes:
            moves = is_comm(node) or is_view(node) or narrows(node)
            if moves and all(self._there(value, node.phase, found) for value in node.operands):
                found.add(node)
        return found

    def _there(self, value: Value, phase: Phase, found: set[Node]) -> bool:
        made = value.node
        return made is None or made in found or (made.phase is Phase.FORWARD and phase is not Phase.FORWARD)

    def _place_fetches(self, fetches: set[Node]) -> None:
        """Let each transfer start where an earlier one's result is first computed with; what is made of it in the
        meantime stands where its own is."""
        ordered = sorted(fetches, key=self.now.__getitem__)
        first: dict[Node, int] = {}
        """Where the first op stands that computes with it."""
        leads: set[Node] = set()
        """Transfers, and the views that lead to one."""
        for node in reversed(ordered):
            uses = [user for value in node.outs for user in self.users[value]]
            first[node] = min((first.get(user, self.now[user]) for user in uses), default=len(self.now))
            if self._travels(node) or any(user in leads for user in uses):
                leads.add(node)
        needed = sorted({first[node] for node in leads})
        starts = {
            use: needed[i - self.ahead] - 0.5 if i >= self.ahead else float(i - self.ahead)
            for i, use in enumerate(needed)
        }
        behind: set[Node] = set()
        for node in ordered:
            if node in leads:
                made = [self.at[n] if n in fetches else self.now[n] + 0.5 for n in makers(node)]
                self.at[node] = max([starts[first[node]], *made])
            else:
                late = any(value.node in behind for value in node.operands)
                self.at[node] = first[node] - 0.5 if late else self.now[node]
            if self._travels(node) or any(value.node in behind for value in node.operands):
                behind.add(node)

    def _travels(self, node: Node) -> bool:
        return travels(node) and not is_part(node, self.graph.mesh)


def makers(node: Node) -> list[Node]:
    """The nodes that make its operands."""
    return [value.node for value in node.operands if value.node is not None]


def travels(node: Node) -> bool:
    """Whether something may be sent."""
    return is_comm(node) and not node.op.stays
