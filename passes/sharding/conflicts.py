"""Which cut wins where the tensors of a node do not agree.

Two factors that want one axis, or two tensors that cut one factor differently, are a conflict: the cut that comes from
a hint on a parameter wins (it says how the op is cut; a hint on an activation says how it is held), else the cut of the
larger tensor, or the factor whose choice sends fewer bytes.

    %5 = mm(%3, %4)    %3 [., .{tp}]  %4 [., .{tp}]    k over tp, or n over tp?
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardfx.ir.cut import WHOLE, Cut, join, project, without
from shardfx.ir.errors import Error
from shardfx.ir.graph import Node, Value
from shardfx.ir.ops.redistribute import Redistribution
from shardfx.ir.reasons import Refused
from shardfx.ir.rules.sharding_rule import Dim, ShardingRule
from shardfx.ir.rules.strategy import wished

from .held import Held
from .pins import pinned


@dataclass
class Candidate:
    """A cut of a factor, the tensor that holds it, and whether a parameter's hint stands behind it."""

    cut: Cut
    value: Value
    strong: bool


@dataclass
class Conflicts:
    """Settles the cuts of a node's factors from what its tensors hold."""

    held: Held
    planner: Redistribution

    def resolve(self, node: Node, with_results: bool) -> tuple[dict[str, Cut], tuple[Refused, ...]]:
        """The cut of each factor, conflicts settled; and what was turned down, in words."""
        pins = pinned(node)
        found = {factor: each for factor, each in self._candidates(node, with_results).items() if factor not in pins}
        if not found and not pins:
            return {}, ()
        down: list[Refused] = []
        cuts = {factor: self._best(node, factor, options, down) for factor, options in found.items()}
        mesh = self.held.mesh
        for axis in (axis for cut in pins.values() for axis in cut.axes):
            for factor in (factor for factor, cut in cuts.items() if axis in cut.axes):
                down.append(Refused(f"axis {axis} on factor {factor}"))
                cuts[factor] = without(cuts[factor], axis, mesh)
        cuts |= pins
        wanted: dict[str, list[str]] = {}
        for factor, cut in cuts.items():
            for axis in cut.axes:
                wanted.setdefault(axis, []).append(factor)
        for axis, factors in wanted.items():
            still = [f for f in factors if axis in cuts[f].axes]
            if len(still) > 1:
                winner = self._settle(node, axis, still, cuts, found)
                for factor in still:
                    if factor != winner:
                        down.append(Refused(f"axis {axis} on factor {factor}"))
                        cuts[factor] = without(cuts[factor], axis, mesh)
        return {f: c for f, c in cuts.items() if c.axes}, tuple(down)

    def _candidates(self, node: Node, with_results: bool) -> dict[str, list[Candidate]]:
        """For each factor that may be cut, the cuts that the node's tensors hold of it."""
        rule, mesh = self.held.rules[node], self.held.mesh
        found: dict[str, list[Candidate]] = {}
        for value, dims, is_operand in self.held.tensors(node):
            held = self.held.cuts.get(value)
            if held is None or not (is_operand or with_results):
                continue
            for d, dim in enumerate(dims):
                if not held[d].axes:
                    continue
                for each, given in zip(dim, parted(held[d], dim, rule, self.held), strict=True):
                    factor, cut = wished(rule, each, given)
                    for axis in cut.axes if factor in rule.leaders else ():
                        if mesh[axis].time:  # turns do not exchange rows
                            cut = without(cut, axis, mesh)
                    if cut.axes and factor not in rule.whole and self.held.feeds(cut, rule.sizes[factor]):
                        strong = any(self.held.is_strong(value, a) for a in cut.axes)
                        found.setdefault(factor, []).append(Candidate(cut, value, strong))
        return found

    def _best(self, node: Node, factor: str, options: list[Candidate], down: list[Refused]) -> Cut:
        """The cut of one factor: all that the tensors hold of it, where they agree."""
        size, mesh = self.held.rules[node].sizes[factor], self.held.mesh
        best = options[0]
        for option in options[1:]:
            if option.cut == best.cut:
                continue
            joined = join(best.cut, option.cut, size, mesh)
            if joined is not None:
                best = Candidate(joined, best.value, best.strong or option.strong)
                continue
            winner = max(best, option, key=lambda c: (c.strong, c.value.type.nbytes))
            loser = option if winner is best else best
            down.append(Refused(loser.cut.text("."), loser.value))
            best = winner
        return best.cut

    def _settle(
        self, node: Node, axis: str, factors: list[str], cuts: dict[str, Cut], found: dict[str, list[Candidate]]
    ) -> str:
        """Which of the factors gets the axis: the one that was pinned in the forward, one cut by a parameter's hint,
        else the cheapest by bytes moved."""
        having = {f: [c.value for c in found[f] if axis in c.cut.axes] for f in factors}
        followed = [f for f, values in having.items() if any(self.held.follows(node, v, axis) for v in values)]
        strong = [f for f, values in having.items() if any(self.held.is_strong(v, axis) for v in values)]
        for sure in (followed, strong):
            if len(sure) == 1:
                return sure[0]
        mesh = self.held.mesh
        scored = []
        for i, factor in enumerate(factors):
            trial = {f: without(c, axis, mesh) if f in factors and f != factor else c for f, c in cuts.items()}
            try:
                scored.append((self.seconds(node, {f: c for f, c in trial.items() if c.axes}), i, factor))
            except Error:  # these cuts use an axis twice in one tensor: they are no choice
                continue
        return min(scored)[2] if scored else factors[0]

    def seconds(self, node: Node, cuts: dict[str, Cut]) -> float:
        """The time of the communication that a node implies when its factors are cut so."""
        made = self.held.cache.strategy(self.held.rules[node], cuts)
        total = 0.0
        for value, need in zip(node.operands, made.operands, strict=True):
            total += self.planner.seconds(value.type, self.held.spec(value), need)
        for value, given in zip(node.outs, made.results, strict=True):
            held = self.held.spec(value)
            if given != held:
                total += self.planner.seconds(value.type, given, held if held.axes else given.reduced())
        return total


def parted(cut: Cut, dim: Dim, rule: ShardingRule, held: Held) -> tuple[Cut, ...]:
    """The cuts of a dim's factors that a cut of it asks for. Tiles that end within a block are tiles of blocks then:
    64 rows for three ranks, of which a window reads 4 at a time, are 16 blocks for three ranks."""
    sizes, mesh = rule.dim_sizes(dim), held.mesh
    found = project(cut, math.prod(sizes), sizes, mesh)
    if found is not None or not dim:
        return found or ()
    blocks, space = Cut(cut.axes), not cut.parts and not any(mesh[axis].time for axis in cut.axes)
    fits = space and held.feeds(blocks, sizes[0])
    return (blocks if fits else WHOLE, *(WHOLE for _ in dim[1:]))
