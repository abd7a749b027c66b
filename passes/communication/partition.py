"""partition: placements that differ become communication.

Each operand whose value lies otherwise than its node needs it gets the cheapest sequence of ``comm`` steps. All
consumers that need the same thing share it, and a partial sum is reduced once: what else is needed of the value
starts from a reduced copy. A stored parameter is gathered before its first use.

    %3 = aten.mm(%1, %2) : f32[64{dp}, 512] +{tp}        %3 = aten.mm(%1, %2) : f32[64{dp}, 512] +{tp}
    %4 = aten.relu(%3)   needs f32[64{dp}, 512]     ->   %4 = comm.all_reduce(%3, axes=[tp], reduce=sum)
                                                         %5 = aten.relu(%4)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardfx.ir.graph import Graph, Node, Output, Strategy, Value
from shardfx.ir.ops import comm
from shardfx.ir.ops.redistribute import Redistribution, Step
from shardfx.ir.rewriter import Rewriter
from shardfx.ir.shards import has_rows
from shardfx.ir.spec import Spec
from shardfx.passes.base import COMM_EXPLICIT, SHARDED, Context, Pass


@dataclass(frozen=True)
class Partition(Pass):
    """Make communication explicit."""

    name: ClassVar[str] = "partition"
    requires: ClassVar[frozenset[str]] = frozenset({SHARDED})
    establishes: ClassVar[frozenset[str]] = frozenset({COMM_EXPLICIT})

    def run(self, graph: Graph, context: Context) -> bool:
        needs: dict[Value, dict[Spec, list[tuple[Node | Output, list[int]]]]] = {}
        for node in graph.nodes:
            assert node.strategy is not None
            for i, (value, spec) in enumerate(zip(node.operands, node.strategy.operands, strict=True)):
                _ask(needs, value, spec, node, i)
        for output, spec in graph.output_specs().items():
            _ask(needs, output.value, spec, output, 0)
        rewriter, users = Rewriter(graph), graph.users()
        for value in list(graph.values()):
            if value in needs:
                hint = value.hint if value.node is not None else None
                first = next(iter(users[value]), None)
                Copies(value, rewriter, context.planner, hint, first).serve(needs[value])
        changed = rewriter.apply()
        graph.rename()
        return changed


def _ask(
    needs: dict[Value, dict[Spec, list[tuple[Node | Output, list[int]]]]],
    value: Value,
    spec: Spec,
    user: Node | Output,
    position: int,
) -> None:
    users = needs.setdefault(value, {}).setdefault(spec, [])
    for known, positions in users:
        if known is user:
            positions.append(position)
            return
    users.append((user, [position]))


class Copies:
    """The copies of one value under different placements, each made once, by the cheapest steps from another.

    They stand behind the node that makes the value; those of an input before the ``first`` node that uses it.
    """

    def __init__(
        self, value: Value, rewriter: Rewriter, planner: Redistribution, hint: Spec | None, first: Node | None
    ) -> None:
        assert value.spec is not None
        self._first = first
        self.value, self._rewriter, self._planner = value, rewriter, planner
        self._at: dict[Spec, Value] = {value.spec: value}
        if hint is not None and hint != value.spec:
            held = self._make(hint)
            self._at = {hint: held}

    def serve(self, needs: dict[Spec, list[tuple[Node | Output, list[int]]]]) -> None:
        """Give every user the copy that it needs; those that keep the partial sum first, then the rest."""
        wanted = sorted(needs, key=lambda spec: self._cost(spec))
        for spec in wanted:
            wider = [each for each in wanted if self._has(each, spec) and any(sharding.rows for sharding in each.dims)]
            widest = next((each for each in wider if all(self._has(each, other) for other in wider)), spec)
            if widest != spec and widest not in self._at and not self._has(self.value.spec, spec):
                self._make(widest)
            leaves = all(isinstance(user, Output) for user, _ in needs[spec])
            copy = self._at.get(spec) or self._make(spec, leaves)
            if copy is self.value:
                continue
            for user, places in needs[spec]:
                self._rewriter.replace(self.value, copy, [user], places)

    def _sources(self, target: Spec) -> list[Spec]:
        """Copies to start from: once the value is reduced, never the partial sum again; of rows that overlap those that
        have the target's, or the value as it is made."""
        tiles = [s for s in self._at if self._has(s, target) or not any(sharding.rows for sharding in s.dims)]
        reduced = [s for s in tiles if len(s.partial) <= len(target.partial)]
        return reduced or tiles or list(self._at)[:1]

    def _cost(self, target: Spec) -> float:
        return min(self._planner.seconds(self.value.type, s, target) for s in self._at)

    def _has(self, source: Spec | None, target: Spec) -> bool:
        assert source is not None
        return has_rows(source, target, self.value.shape, self._planner.mesh)

    def _make(self, target: Spec, leaves: bool = False) -> Value:
        """A copy; where it ``leaves`` the program at once, it is gathered at the end, and what follows stands there."""
        type, at_end = self.value.type, False
        source = min(self._sources(target), key=lambda s: self._planner.seconds(type, s, target))
        copy = self._at[source]
        for step in self._planner.steps(type, source, target):
            known = self._at.get(step.spec)
            at_end |= leaves and step.op is comm.all_gather
            copy = known if known is not None else self._step(copy, step, at_end)
            if not at_end:
                self._at[step.spec] = copy
        return copy

    def _step(self, copy: Value, step: Step, at_end: bool) -> Value:
        kwargs = {
            "axes": list(step.axes),
            "dim": step.dim,
            "to": step.to,
            "reduce": step.reduce,
            "view": list(step.view) if step.view is not None else None,
            "rows": step.rows,
        }
        kwargs = {k: v for k, v in kwargs.items() if v is not None}
        maker = copy.node
        node = Rewriter.make(step.op, (copy,), copy.type, like=maker or self._first, kwargs=kwargs)
        node.results[0].spec = step.spec  # type: ignore[union-attr]
        assert copy.spec is not None
        node.strategy = Strategy((copy.spec,), (step.spec,))
        node.why = f"{copy.spec} is needed as {step.spec}"
        if at_end:
            self._rewriter.at_end(node)
        elif self.value.node is None and self._first is not None:
            self._rewriter.before(self._first, node)
        else:
            self._rewriter.after(maker, node)
        result = node.results[0]
        assert result is not None
        return result
