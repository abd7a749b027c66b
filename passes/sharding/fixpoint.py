"""Propagation of shardings through the factors of op rules: a fixpoint in an order of confidence.

Every value *holds* a sharding per dim (:mod:`.held`). A node projects what its tensors hold onto the factors of its
rule, settles conflicts (:mod:`.conflicts`), and hands the result on. What is surest goes first:

    0  ops that only move elements or work on each alone (both ways)
    1  from the operands of any op to its results and to its other operands
    2  from the results of any op back to its operands

and all of the forward pass before the backward. A hint is never overwritten; but what is made within iterations is so,
though a hint on it says of ranks alone how it is sharded. A pin (:mod:`.pins`) says how a node is
sharded, whatever its tensors hold.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardfx.ir.dim_sharding import WHOLE, DimSharding, join, project
from shardfx.ir.graph import Node, Phase, Value, op_name
from shardfx.ir.reasons import Carrier, Decision, Reasons, Refused
from shardfx.ir.rules.sharding_rule import Dim, ShardingRule
from shardfx.ir.rules.strategy import place, wishes

from .conflicts import Conflicts
from .held import Held, Origin
from .pins import pinned
from .seeds import Seed

LEVELS = ("elementwise", "operands to results", "results to operands")


@dataclass
class Propagation:
    """Hands shards on from value to value, and remembers why."""

    held: Held
    conflicts: Conflicts
    decisions: dict[Value, list[Decision]] = field(default_factory=dict)
    swapped: dict[Value, Value] = field(default_factory=dict)
    """What stands for a value now."""

    def seed(self, seeds: Iterable[Seed]) -> None:
        """Start from these values."""
        for seed in seeds:
            self.held.shardings[seed.value] = list(seed.spec.dims)
            if seed.closed:
                self.held.closed.add(seed.value)
            for dim, sharding in enumerate(seed.spec.dims):
                for axis in sharding.axes:
                    self.held.origin[seed.value, axis] = Origin(seed.name, seed.operator)
                if sharding.axes:
                    hint = "" if seed.by_pass else seed.name
                    self._note(Decision(seed.value, dim, sharding, f"by {seed.name}", hint))

    def take_over(self, old: Value, new: Value) -> None:
        """``new`` stands for ``old`` from now on: it holds the same, for the same reasons."""
        if old in self.held.shardings:
            self.decisions[new] = self.decisions.pop(old, [])
        self.swapped[old] = new
        self.held.take_over(old, new)

    def reasons(self) -> Reasons:
        """The decisions, of what stands in the graph now."""

        def now(value: Value) -> Value:
            while value in self.swapped:
                value = self.swapped[value]
            return value

        return Reasons(self.decisions).moved(now)

    def run(self, start: Iterable[Value] | None = None) -> None:
        """Hand shards on until nothing changes, from all values that hold one, or from ``start``."""
        held = self.held
        users = held.graph.users()
        order = {node: i for i, node in enumerate(held.graph.nodes)}
        queue: list[tuple[int, int, int, Node]] = []
        queued: set[tuple[int, Node]] = set()
        gradients = held.gradients()

        def visit(node: Node) -> None:
            rule = held.rules[node]
            for level in (0,) if rule.transparent or rule.moves_only else (1, 2):
                if (level, node) not in queued:
                    queued.add((level, node))
                    heapq.heappush(queue, (node.phase is not Phase.FORWARD, level, order[node], node))

        def touch(value: Value) -> None:
            for node in [*users[value], *([value.node] if value.node is not None else [])]:
                visit(node)

        for node in order:
            if pinned(node):
                visit(node)
        for value in list(held.shardings if start is None else start):
            if any(sharding.axes for sharding in held.of(value)):
                touch(value)
        while queue:
            _, level, _, node = heapq.heappop(queue)
            queued.discard((level, node))
            shardings, refused = self.conflicts.resolve(node, with_results=level != 1)
            if not shardings:
                continue
            shardings = wishes(held.rules[node], shardings)
            for value, dims, _ in held.tensors(node):
                later = node.phase is not Phase.FORWARD and (value.node is None or value.node.phase is Phase.FORWARD)
                if later or (value in held.closed and value.node is None):
                    continue
                given = held.in_iterations(value, shardings, node) if value in held.closed else shardings
                if self._extend(value, dims, given, node, level, refused):
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
        """Give ``value`` the shardings that it does not hold yet; says whether it changed."""
        rule, held, changed = self.held.rules[node], self.held.of(value), False
        for d, dim in enumerate(dims):
            wanted = [axis for f in dim if f in shardings for axis in shardings[f].axes]
            if all(axis in held[d].axes for axis in wanted):
                continue
            sharding = self._longer(value, d, dim, shardings, rule)
            if sharding is None and self.held.iterations:  # iterations in which it is made stay, whoever wins the ranks
                iterations = {f: self.held.loop_of(each, rule.sizes[f]) for f, each in shardings.items()}
                sharding = self._longer(value, d, dim, iterations, rule)
            if sharding is None:
                continue
            fresh = set(sharding.axes) - set(held[d].axes)
            held[d] = sharding
            hint = ""
            carriers: list[Carrier] = []
            causes: list[Decision] = []
            for axis in sorted(fresh):
                factor = next(f for f in dim if f in shardings and axis in shardings[f].axes)
                having = self._origin(value, node, axis, factor)
                made = [
                    next(each for each in those if axis in each.sharding.axes) for v in having if (those := self._of(v))
                ]
                causes += made
                carriers += self._carriers(node, axis, factor, having)
            if not carriers and node.pin is not None:
                hint = node.pin.by
            back = bool(carriers) and carriers[-1].value.node is node
            how = LEVELS[level and (2 if back else 1)]
            op = op_name(node.op)
            self._note(Decision(value, d, sharding, how, hint, refused, op, node.where, tuple(carriers), tuple(causes)))
            changed = True
        return changed

    def _longer(
        self, value: Value, d: int, dim: Dim, shardings: Mapping[str, DimSharding], rule: ShardingRule
    ) -> DimSharding | None:
        """What a value's dim holds, with what there is more in the shardings of its factors; None where that is
        nothing, or
        goes with nothing that the value holds."""
        mesh, held = self.held.mesh, self.held.of(value)
        current = project(held[d], value.shape[d], rule.dim_sizes(dim), mesh)
        if current is None:
            return None
        merged = {}
        for f, now in zip(dim, current, strict=True):
            merged[f] = join(now, shardings.get(f, WHOLE), rule.sizes[f], mesh) or now
        (sharding,) = place((dim,), merged, rule, mesh)
        fresh, used = set(sharding.axes) - set(held[d].axes), {axis for each in held for axis in each.axes}
        return sharding if fresh and not fresh & used and set(held[d].axes) <= set(sharding.axes) else None

    def _follow(self, gradient: Value, parameter: Value) -> bool:
        """A gradient is sharded as its parameter is, where that comes from a pin; says whether it changed."""
        held = self.held
        by_pin = all(held.is_pinned(parameter, axis) for sharding in held.of(parameter) for axis in sharding.axes)
        if not by_pin or gradient in held.closed or held.of(gradient) == held.of(parameter):
            return False
        held.shardings[gradient] = list(held.of(parameter))
        for made in self.decisions.get(parameter, ()):
            carriers = tuple([Carrier(axis, parameter, made.dim) for axis in made.sharding.axes])
            self._note(Decision(gradient, made.dim, made.sharding, "gradient of it", carriers=carriers, causes=(made,)))
            for axis in made.sharding.axes:
                held.origin[gradient, axis] = held.origin[parameter, axis]
        return True

    def _origin(self, value: Value, node: Node, axis: str, factor: str) -> list[Value]:
        """Remember which hint an axis of a value came from; gives the tensors that it came from."""
        if node.pin is not None and axis in pinned(node).get(factor, WHOLE).axes:
            self.held.origin[value, axis] = Origin(node.pin.by, operator=True, pinned=node.where)
            return []
        having = self.held.having(node, axis, factor)
        origins = [self.held.origin[v, axis] for v in having if (v, axis) in self.held.origin]
        if origins:
            self.held.origin.setdefault((value, axis), next((o for o in origins if o.operator), origins[0]))
        return [v for v in having if v is not value]

    def _carriers(self, node: Node, axis: str, factor: str, having: Iterable[Value]) -> Iterator[Carrier]:
        """The first tensor that was sharded over the axis on the factor for a reason, and its dim."""
        dims = {value: dims for value, dims, _ in self.held.tensors(node)}
        kin = self.held.rules[node].kin(factor)
        for value in having:
            for d, each in enumerate(dims[value]):
                made_here = (made for made in self._of(value) if made.dim == d)
                if not kin.isdisjoint(each) and any(axis in made.sharding.axes for made in made_here):
                    yield Carrier(axis, value, d)
                    return

    def _of(self, value: Value) -> Sequence[Decision]:
        return self.decisions.get(value, ())

    def _note(self, made: Decision) -> None:
        self.decisions.setdefault(made.value, []).append(made)
