"""Values that are made again: copies of forward nodes, before the first backward node that needs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from shardfx.ir.graph import Graph, Node, Phase, Value
from shardfx.ir.ops import comm
from shardfx.ir.ops.traits import is_view
from shardfx.ir.rewriter import Rewriter, dead_code


@dataclass
class Repeats:
    """Gives the nodes behind the forward copies of what ``again`` says; each is made once, as late as it may.

    Args:
        again: whether a value that the forward made is made again, where something behind it needs it.
        kept: what is used behind the forward in the place of a value that is not made again: called with the value
            and the node before which it is needed.
    """

    graph: Graph
    again: Callable[[Value], bool]
    kept: Callable[[Rewriter, Value, Node], Value] = lambda rewriter, value, anchor: value
    _made: dict[Value, Value] = field(default_factory=dict)

    def run(self) -> bool:
        """Make the copies; says whether there are any."""
        rewriter = Rewriter(self.graph)
        for node in self.graph.nodes:
            if node.phase is Phase.FORWARD:
                continue
            for value in dict.fromkeys(node.operands):
                if self._is_of_forward(value):
                    new = self._again(value, node, rewriter)
                    if new is not value:
                        rewriter.replace(value, new, users=[node])
        changed = rewriter.apply()
        if changed:
            dead_code(self.graph)
            self.graph.rename()
        return changed

    def _is_of_forward(self, value: Value) -> bool:
        return value.node is not None and value.node.phase is Phase.FORWARD

    def _again(self, wanted: Value, anchor: Node, rewriter: Rewriter) -> Value:
        """What stands for ``wanted`` at ``anchor``: copies that are missing are made just before it."""
        open_ = [wanted]  # a walk, for a chain may go through many nodes
        while open_:
            value = open_[-1]
            if value in self._made:
                open_.pop()
            elif value.node is not None and value.node.op is comm.send:  # what came from another stage stays
                self._made[open_.pop()] = value
            elif not self.again(value):
                self._made[open_.pop()] = self.kept(rewriter, value, anchor)
            else:
                node = value.node
                assert node is not None
                missing = [v for v in node.operands if self._is_of_forward(v) and v not in self._made]
                open_ += missing
                if not missing:
                    open_.pop()
                    self._copy(node, anchor, rewriter)
        return self._made[wanted]

    def _copy(self, node: Node, anchor: Node, rewriter: Rewriter) -> None:
        """One node once more; a view of what stays is that view."""
        if is_view(node) and all(self._made.get(value, value) is value for value in node.operands):
            self._made.update((value, value) for value in node.outs)
            return
        copy = node.copied(lambda value: self._made.get(value, value))
        copy.phase = anchor.phase
        copy.why = f"made again for {anchor.name}"
        if node.at and anchor.at and anchor.op is not comm.send:  # another stage of the same rank may need it first
            copy.at = anchor.at
        rewriter.before(anchor, copy)
        self._made.update(zip(node.outs, copy.outs, strict=True))
