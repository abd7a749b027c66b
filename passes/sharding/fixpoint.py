"""Propagation of cuts through the factors of op rules: a fixpoint in an order of confidence.

Every value *holds* a cut per dim. A node projects what its tensors hold onto the factors of its rule, settles
conflicts, and hands the result on. What is surest goes first:

    0  ops that only move elements or work on each alone (both ways)
    1  from the operands of any op to its results and to its other operands
    2  from the results of any op back to its operands

and all of the forward pass before the backward. A hint is never overwritten. Two factors that want one axis are
a conflict: the cut that comes from a hint on a parameter wins (it says how the op is cut; a hint on an
activation says how it is held), else the one that moves fewer bytes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardfx.ir.cut import WHOLE, Cut, join, project, smallest, without
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Node, Phase, Strategy, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.redistribute import Redistribution
from shardfx.ir.rules.sharding_rule import Dim, ShardingRule
from shardfx.ir.rules.strategy import place, strategy
from shardfx.ir.spec import Spec
from shardfx.passes.base import Decision


class Tensor(NamedTuple):
    """A tensor of a node, with the factors of its dims."""

    value: Value
    dims: tuple[Dim, ...]
    is_operand: bool


TurnedDown = tuple[tuple[str, Value | None], ...]
LEVELS = ("elementwise", "operands to results", "results to operands")


@dataclass(frozen=True)
class Seed:
    """Where propagation starts: a value, how it is cut, and the hint that says so.

    ``operator`` seeds are parameters: their cuts decide conflicts. A ``closed`` value is never changed.
    """

    value: Value
    spec: Spec
    name: str
    operator: bool = False
    closed: bool = True


@dataclass(frozen=True)
class Origin:
    hint: str
    operator: bool


@dataclass
class Candidate:
    cut: Cut
    value: Value
    strong: bool


@dataclass
class Propagation:
    """The state of one propagation over a graph."""

    graph: Graph
    rules: dict[Node, ShardingRule]
    planner: Redistribution
    held: dict[Value, list[Cut]] = field(default_factory=dict)
    closed: set[Value] = field(default_factory=set)
    origin: dict[tuple[Value, str], Origin] = field(default_factory=dict)
    decisions: dict[Value, list[Decision]] = field(default_factory=dict)
    _tensors: dict[Node, list[Tensor]] = field(default_factory=dict)
    _strategies: dict[object, Strategy] = field(default_factory=dict)

    def seed(self, seeds: Iterable[Seed]) -> None:
        for seed in seeds:
            self.held[seed.value] = list(seed.spec.dims)
            if seed.closed:
                self.closed.add(seed.value)
            for dim, cut in enumerate(seed.spec.dims):
                for axis in cut.axes:
                    self.origin[seed.value, axis] = Origin(seed.name, seed.operator)
                if cut.axes:
                    self._note(Decision(seed.value, dim, cut, hint=seed.name))

    def forget_tensors(self) -> None:
        """The graph was changed: operands are looked up anew."""
        self._tensors.clear()

    def tensors(self, node: Node) -> list[Tensor]:
        """The operands and results of a node with their factors."""
        found = self._tensors.get(node)
        if found is None:
            rule = self.rules[node]
            found = [Tensor(v, dims, True) for v, dims in zip(node.operands, rule.operands, strict=True)]
            pairs = zip(node.results, rule.results, strict=True)
            found += [Tensor(v, dims, False) for v, dims in pairs if v is not None and dims is not None]
            self._tensors[node] = found
        return found

    def strategy(self, node: Node, cuts: Mapping[str, Cut], partial: Mapping[str, Any] | None = None) -> Strategy:
        """The node's strategy under some cuts; nodes alike share it."""
        rule = self.rules[node]
        key = (id(rule), tuple(cuts.items()), tuple(partial.items()) if partial else None)
        found = self._strategies.get(key)
        if found is None:
            found = self._strategies[key] = strategy(rule, cuts, self.graph.mesh, partial)
        return found

    def take_over(self, old: Value, new: Value) -> None:
        """``new`` stands for ``old`` from now on: it holds the same."""
        if old in self.held:
            self.held[new] = self.held.pop(old)
            self.decisions[new] = self.decisions.pop(old, [])
        if old in self.closed:
            self.closed.add(new)
        for axis in self.graph.mesh.names:
            if (old, axis) in self.origin:
                self.origin[new, axis] = self.origin.pop((old, axis))

    def cuts_of(self, value: Value) -> list[Cut]:
        held = self.held.get(value)
        if held is None:
            held = self.held[value] = [WHOLE] * value.type.ndim
        return held

    def spec_of(self, value: Value) -> Spec:
        return Spec(tuple(self.cuts_of(value)))

    # ---- the fixpoint ---------------------------------------------------------------------------------------

    def run(self, start: Iterable[Value] | None = None) -> None:
        """Hand cuts on until nothing changes, from all values that hold one, or from ``start``."""
        users = self.graph.users()
        self.forget_tensors()
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        queue: list[tuple[int, int, int, Node]] = []
        queued: set[tuple[int, Node]] = set()

        def touch(value: Value) -> None:
            near = [*users[value], *([value.node] if value.node is not None else [])]
            for node in near:
                rule = self.rules[node]
                for level in (0,) if rule.transparent or rule.moves_only else (1, 2):
                    if (level, node) not in queued:
                        queued.add((level, node))
                        heapq.heappush(queue, (node.phase is not Phase.FORWARD, level, order[node], node))

        for value in list(self.held if start is None else start):
            if any(cut.axes for cut in self.cuts_of(value)):
                touch(value)
        while queue:
            _, level, _, node = heapq.heappop(queue)
            queued.discard((level, node))
            rule = self.rules[node]
            cuts, turned_down = self.resolve(node, rule, with_results=level != 1)
            if not cuts:
                continue
            for value, dims, _ in self.tensors(node):
                later = node.phase is not Phase.FORWARD and (value.node is None or value.node.phase is Phase.FORWARD)
                if value in self.closed or later:
                    continue
                if self._extend(value, dims, cuts, rule, node, level, turned_down):
                    touch(value)

    def _extend(
        self,
        value: Value,
        dims: tuple[tuple[str, ...], ...],
        cuts: dict[str, Cut],
        rule: ShardingRule,
        node: Node,
        level: int,
        turned_down: TurnedDown,
    ) -> bool:
        """Give ``value`` the cuts that it does not hold yet; says whether it changed."""
        mesh = self.graph.mesh
        held = self.cuts_of(value)
        changed = False
        for d, dim in enumerate(dims):
            wanted = [axis for f in dim if f in cuts for axis in cuts[f].axes]
            if all(axis in held[d].axes for axis in wanted):
                continue
            used = {axis for cut in held for axis in cut.axes}
            current = project(held[d], value.shape[d], rule.dim_sizes(dim), mesh)
            if current is None:
                continue
            merged = {}
            for f, now in zip(dim, current, strict=True):
                merged[f] = join(now, cuts.get(f, WHOLE), rule.sizes[f], mesh) or now
            (cut,) = place((dim,), merged, rule, mesh)
            fresh = set(cut.axes) - set(held[d].axes)
            if not fresh or fresh & used or not set(held[d].axes) <= set(cut.axes):
                continue
            held[d] = cut
            changed = True
            near = None
            causes: list[Decision] = []
            for axis in sorted(fresh):
                factor = next(f for f in dim if f in cuts and axis in cuts[f].axes)
                having = self._having(node, axis, factor)
                near = next((v for v in having if v is not value), near)
                made = (self.decisions.get(v, []) for v in having if v is not value)
                causes += [next(d for d in each if axis in d.cut.axes) for each in made if each]
                origins = [self.origin[v, axis] for v in having if (v, axis) in self.origin]
                if origins:
                    self.origin.setdefault((value, axis), next((o for o in origins if o.operator), origins[0]))
            self._note(Decision(value, d, cut, LEVELS[level], "", turned_down, node, near, tuple(causes)))
        return changed

    def _having(self, node: Node, axis: str, factor: str) -> list[Value]:
        """The tensors of a node that hold a cut of a factor over an axis."""
        found = []
        for value, dims, _ in self.tensors(node):
            held = self.held.get(value, ())
            if any(axis in cut.axes and factor in dims[d] for d, cut in enumerate(held)):
                found.append(value)
        return found

    def _note(self, made: Decision) -> None:
        self.decisions.setdefault(made.value, []).append(made)

    # ---- one node -------------------------------------------------------------------------------------------

    def candidates(self, node: Node, rule: ShardingRule, with_results: bool) -> dict[str, list[Candidate]]:
        """For each factor that may be cut, the cuts that the node's tensors hold of it."""
        mesh = self.graph.mesh
        found: dict[str, list[Candidate]] = {}
        for value, dims, is_operand in self.tensors(node):
            held = self.held.get(value)
            if held is None or not (is_operand or with_results):
                continue
            for d, dim in enumerate(dims):
                if not held[d].axes:
                    continue
                projected = project(held[d], value.shape[d], rule.dim_sizes(dim), mesh)
                for factor, cut in zip(dim, projected or (), strict=False):
                    if cut.axes and factor not in rule.whole and feeds_all(cut, rule.sizes[factor], mesh):
                        strong = any(self.origin.get((value, a), WEAK).operator for a in cut.axes)
                        found.setdefault(factor, []).append(Candidate(cut, value, strong))
        return found

    def resolve(self, node: Node, rule: ShardingRule, with_results: bool) -> tuple[dict[str, Cut], TurnedDown]:
        """The cut of each factor, conflicts settled; and what was turned down, in words."""
        found = self.candidates(node, rule, with_results)
        if not found:
            return {}, ()
        cuts: dict[str, Cut] = {}
        down: list[tuple[str, Value | None]] = []
        for factor, options in found.items():
            best = options[0]
            for option in options[1:]:
                if option.cut == best.cut:
                    continue
                joined = join(best.cut, option.cut, rule.sizes[factor], self.graph.mesh)
                if joined is not None:
                    best = Candidate(joined, best.value, best.strong or option.strong)
                    continue
                winner = max(best, option, key=lambda c: (c.strong, c.value.type.nbytes))
                loser = option if winner is best else best
                down.append((loser.cut.text("."), loser.value))
                best = winner
            cuts[factor] = best.cut
        wanted: dict[str, list[str]] = {}
        for factor, cut in cuts.items():
            for axis in cut.axes:
                wanted.setdefault(axis, []).append(factor)
        for axis, factors in wanted.items():
            still = [f for f in factors if axis in cuts[f].axes]
            if len(still) > 1:
                winner_factor = self._settle(node, rule, axis, still, cuts, found)
                for factor in still:
                    if factor != winner_factor:
                        down.append((f"axis {axis} on factor {factor}", None))
                        cuts[factor] = without(cuts[factor], axis, self.graph.mesh)
        return {f: c for f, c in cuts.items() if c.axes}, tuple(down)

    def _settle(
        self,
        node: Node,
        rule: ShardingRule,
        axis: str,
        factors: list[str],
        cuts: dict[str, Cut],
        found: dict[str, list[Candidate]],
    ) -> str:
        """Which of the factors gets the axis: one cut by a parameter's hint, else the cheapest by bytes moved."""
        strong = [
            f
            for f in factors
            if any(axis in c.cut.axes and self.origin.get((c.value, axis), WEAK).operator for c in found[f])
        ]
        if len(strong) == 1:
            return strong[0]
        scored = []
        for i, factor in enumerate(factors):
            trial = {
                f: without(c, axis, self.graph.mesh) if f in factors and f != factor else c for f, c in cuts.items()
            }
            trial = {f: c for f, c in trial.items() if c.axes}
            try:
                scored.append((self.seconds(node, rule, trial), i, factor))
            except Error:
                continue
        return min(scored)[2] if scored else factors[0]

    def seconds(self, node: Node, rule: ShardingRule, cuts: dict[str, Cut]) -> float:
        """The time of the communication that a node implies when its factors are cut so."""
        made = self.strategy(node, cuts)
        total = 0.0
        for value, need in zip(node.operands, made.operands, strict=True):
            total += self.planner.seconds(value.type, self.spec_of(value), need)
        for value, given in zip(node.outs, made.results, strict=True):
            held = self.spec_of(value)
            if given != held:
                goal = held if held.axes else given.reduced()
                total += self.planner.seconds(value.type, given, goal)
        return total


WEAK = Origin("", False)


def feeds_all(cut: Cut, size: int, mesh: Mesh) -> bool:
    """Whether every rank gets something: most kernels refuse empty tensors."""
    return all(smallest(part.size, part.axes, mesh) > 0 for part in cut.sub(size))
