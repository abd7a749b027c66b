"""partition: explicit communication where placements differ.

Each operand whose value is placed otherwise than its node needs it gets the cheapest sequence of ``comm`` steps. All
consumers that need the same thing share it, and a partial sum is reduced once: what else is needed of the value starts
from a reduced copy. A stored parameter is gathered before its first use.

    %3 = aten.mm(%1, %2) : f32[64{dp}, 512] +{tp}        %3 = aten.mm(%1, %2) : f32[64{dp}, 512] +{tp}
    %4 = aten.relu(%3)   needs f32[64{dp}, 512]     ->   %4 = comm.all_reduce(%3, axes=[tp], reduce=sum)
                                                         %5 = aten.relu(%4)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from shardfx.ir.graph import Graph, Node, Output, Strategy, Value
from shardfx.ir.ops import comm
from shardfx.ir.ops.redistribute import CommStep, Redistribution
from shardfx.ir.rewriter import Rewriter
from shardfx.ir.shards import has_rows
from shardfx.ir.spec import Spec
from shardfx.passes.base import COMM_EXPLICIT, SHARDED, Pass, PassContext

Needs = dict[Spec, dict[Node | Output, list[int]]]
"""By placement, who needs a value so, and as which operands."""


@dataclass(frozen=True)
class Partition(Pass):
    """Make communication explicit."""

    name: ClassVar[str] = "partition"
    requires: ClassVar[frozenset[str]] = frozenset({SHARDED})
    establishes: ClassVar[frozenset[str]] = frozenset({COMM_EXPLICIT})

    def run(self, graph: Graph, context: PassContext) -> bool:
        needs: dict[Value, Needs] = {}
        for node in graph.nodes:
            assert node.strategy is not None
            for i, (value, spec) in enumerate(zip(node.operands, node.strategy.operands, strict=True)):
                needs.setdefault(value, {}).setdefault(spec, {}).setdefault(node, []).append(i)
        for output, spec in graph.output_specs().items():
            needs.setdefault(output.value, {}).setdefault(spec, {}).setdefault(output, []).append(0)
        rewriter, users = Rewriter(graph), graph.users()
        for value in list(graph.values()):
            if value in needs:
                first = next(iter(users[value]), None)
                _Copies(value, rewriter, context.planner, first).serve(needs[value])
        changed = rewriter.apply()
        graph.rename()
        return changed


class _Copies:
    """The copies of one value under different placements, each made once, by the cheapest steps from another.

    They stand behind the node that makes the value; those of an input before the ``first`` node that uses it.
    """

    def __init__(self, value: Value, rewriter: Rewriter, planner: Redistribution, first: Node | None) -> None:
        assert value.spec is not None
        self.value, self._rewriter, self._planner, self._first = value, rewriter, planner, first
        self._at: dict[Spec, Value] = {value.spec: value}
        if value.node is not None and value.hint is not None and value.hint != value.spec:
            self._at = {value.hint: self._make(value.hint)}

    def serve(self, needs: Needs) -> None:
        """Give every user the copy that it needs; those that keep the partial sum first, then the rest."""
        wanted = sorted(needs, key=lambda target: min(self._seconds(source, target) for source in self._at))
        for spec in wanted:
            wider = [each for each in wanted if self._has(each, spec) and any(sharding.rows for sharding in each.dims)]
            widest = next((each for each in wider if all(self._has(each, other) for other in wider)), spec)
            if widest != spec and widest not in self._at and not self._has(self.value.spec, spec):
                self._make(widest)
            leaves = all(isinstance(user, Output) for user in needs[spec])
            copy = self._at.get(spec) or self._make(spec, leaves)
            for user, places in needs[spec].items() if copy is not self.value else ():
                self._rewriter.replace(self.value, copy, [user], places)

    def _sources(self, target: Spec) -> list[Spec]:
        """Copies to start from: once the value is reduced, never the partial sum again; of rows that overlap those that
        have the target's, or the value as it is made."""
        tiles = [s for s in self._at if self._has(s, target) or not any(sharding.rows for sharding in s.dims)]
        reduced = [s for s in tiles if len(s.partial) <= len(target.partial)]
        return reduced or tiles or list(self._at)[:1]

    def _seconds(self, source: Spec, target: Spec) -> float:
        return self._planner.seconds(self.value.type, source, target)

    def _has(self, source: Spec | None, target: Spec) -> bool:
        assert source is not None
        return has_rows(source, target, self.value.shape, self._planner.mesh)

    def _make(self, target: Spec, leaves: bool = False) -> Value:
        """A copy; where it ``leaves`` the program at once, it is gathered at the end, and what follows stands there."""
        type, at_end = self.value.type, False
        source = min(self._sources(target), key=lambda each: self._seconds(each, target))
        copy = self._at[source]
        for step in self._planner.steps(type, source, target):
            known = self._at.get(step.spec)
            at_end |= leaves and step.op is comm.all_gather
            copy = known if known is not None else self._step(copy, step, at_end)
            if not at_end:
                self._at[step.spec] = copy
        return copy

    def _step(self, copy: Value, step: CommStep, at_end: bool) -> Value:
        values: dict[str, Any] = {"axes": [*step.axes], "dim": step.dim, "to": step.to, "reduce": step.reduce}
        values |= {"view": list(step.view) if step.view is not None else None, "rows": step.rows}
        kwargs = {name: each for name, each in values.items() if each is not None}
        maker = copy.node
        node = Rewriter.make(step.op, (copy,), copy.type, like=maker or self._first, kwargs=kwargs)
        assert copy.spec is not None
        node.outs[0].spec, node.strategy = step.spec, Strategy((copy.spec,), (step.spec,))
        node.why = f"{copy.spec} is needed as {step.spec}"
        if at_end:
            self._rewriter.at_end(node)
        elif self.value.node is None and self._first is not None:
            self._rewriter.before(self._first, node)
        else:
            self._rewriter.after(maker, node)
        return node.outs[0]
