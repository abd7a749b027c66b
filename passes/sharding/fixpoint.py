"""Propagation of cuts through the factors of op rules: a fixpoint in an order of confidence.

Every value *holds* a cut per dim (:mod:`.held`). A node projects what its tensors hold onto the factors of its rule,
settles conflicts (:mod:`.conflicts`), and hands the result on. What is surest goes first:

    0  ops that only move elements or work on each alone (both ways)
    1  from the operands of any op to its results and to its other operands
    2  from the results of any op back to its operands

and all of the forward pass before the backward. A hint is never overwritten; but what is made within turns is so,
though a hint on it says of ranks alone how it is cut. A pin (:mod:`.pins`) says how a node is
cut, whatever its tensors hold.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardfx.ir.cut import WHOLE, Cut, join, project
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
    """Hands cuts on from value to value, and remembers why."""

    held: Held
    conflicts: Conflicts
    decisions: dict[Value, list[Decision]] = field(default_factory=dict)
    swapped: dict[Value, Value] = field(default_factory=dict)
    """What stands for a value now."""

    def seed(self, seeds: Iterable[Seed]) -> None:
        """Start from these values."""
        for seed in seeds:
            self.held.cuts[seed.value] = list(seed.spec.dims)
            if seed.closed:
                self.held.closed.add(seed.value)
            for dim, cut in enumerate(seed.spec.dims):
                for axis in cut.axes:
                    self.held.origin[seed.value, axis] = Origin(seed.name, seed.operator)
                if cut.axes:
                    hint = "" if seed.by_pass else seed.name
                    self._note(Decision(seed.value, dim, cut, f"by {seed.name}", hint))

    def take_over(self, old: Value, new: Value) -> None:
        """``new`` stands for ``old`` from now on: it holds the same, for the same reasons."""
        if old in self.held.cuts:
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
        """Hand cuts on until nothing changes, from all values that hold one, or from ``start``."""
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
        for value in list(held.cuts if start is None else start):
            if any(cut.axes for cut in held.of(value)):
                touch(value)
        while queue:
            _, level, _, node = heapq.heappop(queue)
            queued.discard((level, node))
            cuts, refused = self.conflicts.resolve(node, with_results=level != 1)
            if not cuts:
                continue
            cuts = wishes(held.rules[node], cuts)
            for value, dims, _ in held.tensors(node):
                later = node.phase is not Phase.FORWARD and (value.node is None or value.node.phase is Phase.FORWARD)
                if later or (value in held.closed and value.node is None):
                    continue
                given = held.in_turns(value, cuts, node) if value in held.closed else cuts
                if self._extend(value, dims, given, node, level, refused):
                    touch(value)
                    for gradient in gradients.get(value, ()):
                        if self._follow(gradient, value):
                            touch(gradient)

    def _extend(
        self,
        value: Value,
        dims: tuple[Dim, ...],
        cuts: dict[str, Cut],
        node: Node,
        level: int,
        refused: tuple[Refused, ...],
    ) -> bool:
        """Give ``value`` the cuts that it does not hold yet; says whether it changed."""
        rule, held, changed = self.held.rules[node], self.held.of(value), False
        for d, dim in enumerate(dims):
            wanted = [axis for f in dim if f in cuts for axis in cuts[f].axes]
            if all(axis in held[d].axes for axis in wanted):
                continue
            cut = self._longer(value, d, dim, cuts, rule)
            if cut is None and self.held.turns:  # turns in which it is made stay, whoever wins the ranks
                turns = {f: self.held.turns_of(each, rule.sizes[f]) for f, each in cuts.items()}
                cut = self._longer(value, d, dim, turns, rule)
            if cut is None:
                continue
            fresh = set(cut.axes) - set(held[d].axes)
            held[d] = cut
            hint = ""
            carriers: list[Carrier] = []
            causes: list[Decision] = []
            for axis in sorted(fresh):
                factor = next(f for f in dim if f in cuts and axis in cuts[f].axes)
                having = self._origin(value, node, axis, factor)
                made = [next(each for each in those if axis in each.cut.axes) for v in having if (those := self._of(v))]
                causes += made
                carriers += self._carriers(node, axis, factor, having)
            if not carriers and node.pin is not None:
                hint = node.pin.by
            back = bool(carriers) and carriers[-1].value.node is node
            how = LEVELS[level and (2 if back else 1)]
            op = op_name(node.op)
            self._note(Decision(value, d, cut, how, hint, refused, op, node.where, tuple(carriers), tuple(causes)))
            changed = True
        return changed

    def _longer(self, value: Value, d: int, dim: Dim, cuts: Mapping[str, Cut], rule: ShardingRule) -> Cut | None:
        """What a value's dim holds, with what there is more in the cuts of its factors; None where that is nothing, or
        goes with nothing that the value holds."""
        mesh, held = self.held.mesh, self.held.of(value)
        current = project(held[d], value.shape[d], rule.dim_sizes(dim), mesh)
        if current is None:
            return None
        merged = {}
        for f, now in zip(dim, current, strict=True):
            merged[f] = join(now, cuts.get(f, WHOLE), rule.sizes[f], mesh) or now
        (cut,) = place((dim,), merged, rule, mesh)
        fresh, used = set(cut.axes) - set(held[d].axes), {axis for each in held for axis in each.axes}
        return cut if fresh and not fresh & used and set(held[d].axes) <= set(cut.axes) else None

    def _follow(self, gradient: Value, parameter: Value) -> bool:
        """A gradient is cut as its parameter is, where that comes from a pin; says whether it changed."""
        held = self.held
        by_pin = all(held.is_pinned(parameter, axis) for cut in held.of(parameter) for axis in cut.axes)
        if not by_pin or gradient in held.closed or held.of(gradient) == held.of(parameter):
            return False
        held.cuts[gradient] = list(held.of(parameter))
        for made in self.decisions.get(parameter, ()):
            carriers = tuple([Carrier(axis, parameter, made.dim) for axis in made.cut.axes])
            self._note(Decision(gradient, made.dim, made.cut, "gradient of it", carriers=carriers, causes=(made,)))
            for axis in made.cut.axes:
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
        """The first tensor that was cut over the axis on the factor for a reason, and its dim."""
        dims = {value: dims for value, dims, _ in self.held.tensors(node)}
        kin = self.held.rules[node].kin(factor)
        for value in having:
            for d, each in enumerate(dims[value]):
                made_here = (made for made in self._of(value) if made.dim == d)
                if not kin.isdisjoint(each) and any(axis in made.cut.axes for made in made_here):
                    yield Carrier(axis, value, d)
                    return

    def _of(self, value: Value) -> Sequence[Decision]:
        return self.decisions.get(value, ())

    def _note(self, made: Decision) -> None:
        self.decisions.setdefault(made.value, []).append(made)
