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
    """Gives the nodes behind the forward copies of what ``again`` says; each is made once, as late as it may, on each
    rank that needs it: a parameter of several stages is gathered again in each of them.

    Args:
        again: whether a value that the forward made is made again, where something behind it needs it.
        kept: what is used behind the forward in the place of a value that is not made again: called with the value
            and the node before which it is needed.
    """

    graph: Graph
    again: Callable[[Value], bool]
    kept: Callable[[Rewriter, Value, Node], Value] = lambda rewriter, value, anchor: value
    _made: dict[Value, list[tuple[frozenset[int], Value]]] = field(default_factory=dict)
    """What stands for a value, and at which coordinates along the axis of stages."""

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
        places = self._places(anchor)
        open_ = [wanted]  # a walk, for a chain may go through many nodes
        while open_:
            value = open_[-1]
            if self._there(value, places) is not None:
                open_.pop()
            elif value.node is not None and value.node.op is comm.send:  # what came from another stage stays
                self._keep(open_.pop(), places, value)
            elif not self.again(value):
                self._keep(open_.pop(), places, self.kept(rewriter, value, anchor))
            else:
                node = value.node
                assert node is not None
                missing = [v for v in node.operands if self._is_of_forward(v) and self._there(v, places) is None]
                open_ += missing
                if not missing:
                    open_.pop()
                    self._copy(node, anchor, rewriter)
        return self._there(wanted, places) or wanted

    def _there(self, value: Value, places: frozenset[int]) -> Value | None:
        """What stands for a value wherever it is needed; None: nothing yet."""
        return next((made for held, made in self._made.get(value, ()) if places <= held), None)

    def _keep(self, value: Value, places: frozenset[int], made: Value) -> None:
        self._made.setdefault(value, []).append((places, made))

    def _places(self, anchor: Node) -> frozenset[int]:
        """Where a node needs what it takes, as coordinates along the axis of stages."""
        pipeline = self.graph.pipeline
        if pipeline is None:
            return frozenset()
        return frozenset([anchor.kwargs["origin"]] if anchor.op is comm.send else pipeline.places(anchor.at))

    def _copy(self, node: Node, anchor: Node, rewriter: Rewriter) -> None:
        """One node once more; a view of what stays is that view."""
        places = self._places(anchor)

        def there(value: Value) -> Value:
            return self._there(value, places) or value

        if is_view(node) and all(there(value) is value for value in node.operands):
            for value in node.outs:
                self._keep(value, places, value)
            return
        copy = node.copied(there)
        copy.phase = anchor.phase
        copy.why = f"made again for {anchor.name}"
        if node.at and anchor.at:  # another stage of the same rank may need it first
            copy.at = anchor.at if anchor.op is not comm.send else self._stages_of(node, places)
        rewriter.before(anchor, copy)
        for value, made in zip(node.outs, copy.outs, strict=True):
            self._keep(value, places, made)

    def _stages_of(self, node: Node, places: frozenset[int]) -> tuple[int, ...]:
        """A node's stages that lie at some places."""
        assert self.graph.pipeline is not None
        return tuple(stage for stage in node.at if places.issuperset(self.graph.pipeline.places((stage,))))
