"""Propagation of shardings through the factors of op rules: a fixpoint in an order of confidence.

A node projects the shardings of its tensors (:mod:`.sharding_state`) onto the factors of its rule, settles conflicts
(:mod:`.conflicts`), and hands the result on. What is surest goes first:

    0  ops that only move elements or work on each alone (both ways)
    1  from the operands of any op to its results and to its other operands
    2  from the results of any op back to its operands

and all of the forward pass before the backward. A hint is never overwritten; but what is made within a loop is so,
though a hint on it says of ranks alone how it is sharded. A pin (:mod:`.pins`) says how a node is sharded, whatever its
tensors are.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardfx.ir.dim_sharding import REPLICATED, DimSharding, join, project
from shardfx.ir.graph import Node, Phase, Value, op_name
from shardfx.ir.reasons import Carrier, Reasons, Refused, ShardingDecision
from shardfx.ir.rules.sharding_rule import Dim, ShardingRule
from shardfx.ir.rules.strategy import place, wishes

from .conflicts import Conflicts
from .pins import pinned
from .seeds import Seed
from .sharding_state import HintOrigin, ShardingState

LEVELS = ("elementwise", "operands to results", "results to operands")


@dataclass
class Propagation:
    """Propagates shardings from value to value, and records why."""

    state: ShardingState
    conflicts: Conflicts
    decisions: dict[Value, list[ShardingDecision]] = field(default_factory=dict)
    swapped: dict[Value, Value] = field(default_factory=dict)
    """What replaces a value now."""

    def seed(self, seeds: Iterable[Seed]) -> None:
        """Start from these seeds."""
        for seed in seeds:
            self.state.shardings[seed.value] = list(seed.spec.dims)
            if seed.closed:
                self.state.closed.add(seed.value)
            for dim, sharding in enumerate(seed.spec.dims):
                for axis in sharding.axes:
                    self.state.origin[seed.value, axis] = HintOrigin(seed.name, seed.operator)
                if sharding.axes:
                    hint = "" if seed.by_pass else seed.name
                    self._note(ShardingDecision(seed.value, dim, sharding, f"by {seed.name}", hint))

    def take_over(self, old: Value, new: Value) -> None:
        """Transfer the sharding of ``old`` and its reasons to ``new``, which replaces it."""
        if old in self.state.shardings:
            self.decisions[new] = self.decisions.pop(old, [])
        self.swapped[old] = new
        self.state.take_over(old, new)

    def reasons(self) -> Reasons:
        """The decisions for values of the current graph."""

        def now(value: Value) -> Value:
            while value in self.swapped:
                value = self.swapped[value]
            return value

        return Reasons(self.decisions).moved(now)

    def run(self, start: Iterable[Value] | None = None) -> None:
        """Propagate shardings to a fixpoint, from all values that have one, or from ``start``."""
        state = self.state
        users, gradients = state.graph.users(), state.gradients()
        order = {node: i for i, node in enumerate(state.nodes)}
        queue: list[tuple[int, int, int, Node]] = []
        queued: set[tuple[int, Node]] = set()

        def visit(node: Node) -> None:
            rule = state.rules[node]
            for level in (0,) if rule.transparent or rule.moves_only else (1, 2):
                if (level, node) not in queued:
                    queued.add((level, node))
                    heapq.heappush(queue, (node.phase is not Phase.FORWARD, level, order[node], node))

        def touch(value: Value) -> None:
            for node in [*users[value], value.node]:
                if node is not None and node in order:
                    visit(node)

        for node in order:
            if pinned(node):
                visit(node)
        for value in list(state.shardings if start is None else start):
            if any(sharding.axes for sharding in state.of(value)):
                touch(value)
        while queue:
            _, level, _, node = heapq.heappop(queue)
            queued.discard((level, node))
            shardings, refused = self.conflicts.resolve(node, with_results=level != 1)
            shardings = wishes(state.rules[node], shardings) if shardings else shardings
            for value, dims, _ in state.tensors(node) if shardings else ():
                later = node.phase is not Phase.FORWARD and (value.node is None or value.node.phase is Phase.FORWARD)
                if later or (value in state.closed and value.node is None):
                    continue
                known = state.of_closed(value, shardings, node) if value in state.closed else shardings
                if self._extend(value, dims, known, node, level, refused):
                    touch(value)
                    for gradient in gradients.get(value, ()):
                        if self._follow(gradient, value):
                            touch(gradient)

    def _extend(
        self,
        value: Value,
        dims: tuple[Dim, ...],
        shardings: dict[str, DimSharding],
        node: Node,
        level: int,
        refused: tuple[Refused, ...],
    ) -> bool:
        """Add the missing shardings to ``value``; returns whether it changed."""
        rule, current, changed = self.state.rules[node], self.state.of(value), False
        for d, dim in enumerate(dims):
            if all(axis in current[d].axes for f in dim if f in shardings for axis in shardings[f].axes):
                continue
            sharding = self._longer(value, d, dim, shardings, rule)
            if sharding is None and self.state.loops:  # loops in which it is made are kept, whoever wins the ranks
                loops = {f: self.state.loops_of(each, rule.sizes[f]) for f, each in shardings.items()}
                sharding = self._longer(value, d, dim, loops, rule)
            if sharding is None:
                continue
            fresh = set(sharding.axes) - set(current[d].axes)
            current[d] = sharding
            carriers: list[Carrier] = []
            causes: list[ShardingDecision] = []
            for axis in sorted(fresh):
                factor = next(f for f in dim if f in shardings and axis in shardings[f].axes)
                having = self._origin(value, node, axis, factor)
                of_those = (those for v in having if (those := self.decisions.get(v, [])))
                causes += [next(each for each in those if axis in each.sharding.axes) for those in of_those]
                carriers += self._carriers(node, axis, factor, having)
            hint = node.pin.by if node.pin is not None and not carriers else ""
            back = bool(carriers) and carriers[-1].value.node is node
            how, op = LEVELS[level and (2 if back else 1)], op_name(node.op)
            carried = tuple(carriers)
            self._note(ShardingDecision(value, d, sharding, how, hint, refused, op, node.where, carried, tuple(causes)))
            changed = True
        return changed

    def _longer(
        self, value: Value, d: int, dim: Dim, shardings: Mapping[str, DimSharding], rule: ShardingRule
    ) -> DimSharding | None:
        """The sharding of a value's dim, extended by those of its factors; None where nothing is added, or it does not
        fit the value's own."""
        mesh, current = self.state.mesh, self.state.of(value)
        parts = project(current[d], value.shape[d], rule.dim_sizes(dim), mesh)
        if parts is None:
            return None
        merged = {}
        for f, now in zip(dim, parts, strict=True):
            merged[f] = join(now, shardings.get(f, REPLICATED), rule.sizes[f], mesh) or now
        (sharding,) = place((dim,), merged, rule, mesh)
        fresh, used = set(sharding.axes) - set(current[d].axes), {axis for each in current for axis in each.axes}
        return sharding if fresh and not fresh & used and set(current[d].axes) <= set(sharding.axes) else None

    def _follow(self, gradient: Value, parameter: Value) -> bool:
        """Shard a gradient as its parameter is, where that comes from a pin; returns whether it changed."""
        state = self.state
        axes = [axis for sharding in state.of(parameter) for axis in sharding.axes]
        by_pin = all(state.origin_of(parameter, axis).pinned is not None for axis in axes)
        if not by_pin or gradient in state.closed or state.of(gradient) == state.of(parameter):
            return False
        state.shardings[gradient] = list(state.of(parameter))
        for made in self.decisions.get(parameter, ()):
            carriers = tuple([Carrier(axis, parameter, made.dim) for axis in made.sharding.axes])
            how = "gradient of it"
            self._note(ShardingDecision(gradient, made.dim, made.sharding, how, carriers=carriers, causes=(made,)))
            for axis in made.sharding.axes:
                state.origin[gradient, axis] = state.origin[parameter, axis]
        return True

    def _origin(self, value: Value, node: Node, axis: str, factor: str) -> list[Value]:
        """Record the hint from which an axis of a value came; returns the tensors that it came from."""
        state = self.state
        if node.pin is not None and axis in pinned(node).get(factor, REPLICATED).axes:
            state.origin[value, axis] = HintOrigin(node.pin.by, operator=True, pinned=node.where)
            return []
        having = state.having(node, axis, factor)
        origins = [state.origin[v, axis] for v in having if (v, axis) in state.origin]
        if origins:
            state.origin.setdefault((value, axis), next((o for o in origins if o.operator), origins[0]))
        return [v for v in having if v is not value]

    def _carriers(self, node: Node, axis: str, factor: str, having: Iterable[Value]) -> Iterator[Carrier]:
        """The first tensor that is sharded over the axis on the factor with a reason, and its dim."""
        dims = {value: dims for value, dims, _ in self.state.tensors(node)}
        kin = self.state.rules[node].kin(factor)
        for value in having:
            made: Sequence[ShardingDecision] = self.decisions.get(value, ())
            for d, each in enumerate(dims[value]):
                if not kin.isdisjoint(each) and any(m.dim == d and axis in m.sharding.axes for m in made):
                    yield Carrier(axis, value, d)
                    return

    def _note(self, made: ShardingDecision) -> None:
        self.decisions.setdefault(made.value, []).append(made)
