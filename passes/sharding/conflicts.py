"""Which sharded wins where the tensors of a node do not agree.

Two factors that want one axis, or two tensors that shard one factor differently, are a conflict: the sharding that
comes from a hint on a parameter wins (it says how the op is sharded; a hint on an activation says how it is held), else
the sharding of the larger tensor, or the factor whose choice sends fewer bytes.

    %5 = mm(%3, %4)    %3 [., .{tp}]  %4 [., .{tp}]    k over tp, or n over tp?
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardfx.ir.dim_sharding import WHOLE, DimSharding, join, project, without
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
    """A sharding of a factor, the tensor that holds it, and whether a parameter's hint stands behind it."""

    sharding: DimSharding
    value: Value
    strong: bool


@dataclass
class Conflicts:
    """Settles the shardings of a node's factors from what its tensors hold."""

    held: Held
    planner: Redistribution

    def resolve(self, node: Node, with_results: bool) -> tuple[dict[str, DimSharding], tuple[Refused, ...]]:
        """The sharding of each factor, conflicts settled; and what was turned down, in words."""
        pins = pinned(node)
        found = {factor: each for factor, each in self._candidates(node, with_results).items() if factor not in pins}
        if not found and not pins:
            return {}, ()
        down: list[Refused] = []
        shardings = {factor: self._best(node, factor, options, down) for factor, options in found.items()}
        mesh = self.held.mesh
        for axis in (axis for sharding in pins.values() for axis in sharding.axes):
            for factor in (factor for factor, sharding in shardings.items() if axis in sharding.axes):
                down.append(Refused(f"axis {axis} on factor {factor}"))
                shardings[factor] = without(shardings[factor], axis, mesh)
        shardings |= pins
        wanted: dict[str, list[str]] = {}
        for factor, sharding in shardings.items():
            for axis in sharding.axes:
                wanted.setdefault(axis, []).append(factor)
        for axis, factors in wanted.items():
            still = [f for f in factors if axis in shardings[f].axes]
            if len(still) > 1:
                winner = self._settle(node, axis, still, shardings, found)
                for factor in still:
                    if factor != winner:
                        down.append(Refused(f"axis {axis} on factor {factor}"))
                        shardings[factor] = without(shardings[factor], axis, mesh)
        return {f: c for f, c in shardings.items() if c.axes}, tuple(down)

    def _candidates(self, node: Node, with_results: bool) -> dict[str, list[Candidate]]:
        """For each factor that may be sharded, the shardings that the node's tensors hold of it."""
        rule, mesh = self.held.rules[node], self.held.mesh
        found: dict[str, list[Candidate]] = {}
        for value, dims, is_operand in self.held.tensors(node):
            held = self.held.shardings.get(value)
            if held is None or not (is_operand or with_results):
                continue
            for d, dim in enumerate(dims):
                if not held[d].axes:
                    continue
                for each, given in zip(dim, parted(held[d], dim, rule, self.held), strict=True):
                    factor, sharding = wished(rule, each, given)
                    for axis in sharding.axes:
                        rows = factor in rule.leaders and mesh[axis].loop  # iterations do not exchange rows
                        if rows or not self.held.chunks.has(node, axis):
                            sharding = without(sharding, axis, mesh)
                    if sharding.axes and factor not in rule.whole and self.held.feeds(sharding, rule.sizes[factor]):
                        strong = any(self.held.is_strong(value, a) for a in sharding.axes)
                        found.setdefault(factor, []).append(Candidate(sharding, value, strong))
        return found

    def _best(self, node: Node, factor: str, options: list[Candidate], down: list[Refused]) -> DimSharding:
        """The sharding of one factor: all that the tensors hold of it, where they agree."""
        size, mesh = self.held.rules[node].sizes[factor], self.held.mesh
        best = options[0]
        for option in options[1:]:
            if option.sharding == best.sharding:
                continue
            joined = join(best.sharding, option.sharding, size, mesh)
            if joined is not None:
                best = Candidate(joined, best.value, best.strong or option.strong)
                continue
            winner = max(best, option, key=lambda c: (c.strong, c.value.type.nbytes))
            loser = option if winner is best else best
            down.append(Refused(loser.sharding.text("."), loser.value))
            best = winner
        return best.sharding

    def _settle(
        self,
        node: Node,
        axis: str,
        factors: list[str],
        shardings: dict[str, DimSharding],
        found: dict[str, list[Candidate]],
    ) -> str:
        """Which of the factors gets the axis: the one that was pinned in the forward, one sharded by a parameter's
        hint,
        else the cheapest by bytes moved."""
        having = {f: [c.value for c in found[f] if axis in c.sharding.axes] for f in factors}
        followed = [f for f, values in having.items() if any(self.held.follows(node, v, axis) for v in values)]
        strong = [f for f, values in having.items() if any(self.held.is_strong(v, axis) for v in values)]
        for sure in (followed, strong):
            if len(sure) == 1:
                return sure[0]
        mesh = self.held.mesh
        scored = []
        for i, factor in enumerate(factors):
            trial = {f: without(c, axis, mesh) if f in factors and f != factor else c for f, c in shardings.items()}
            try:
                scored.append((self.seconds(node, {f: c for f, c in trial.items() if c.axes}), i, factor))
            except Error:  # these shards use an axis twice in one tensor: they are no choice
                continue
        return min(scored)[2] if scored else factors[0]

    def seconds(self, node: Node, shardings: dict[str, DimSharding]) -> float:
        """The time of the communication that a node implies when its factors are sharded so."""
        made = self.held.cache.strategy(self.held.rules[node], shardings)
        total = 0.0
        for value, need in zip(node.operands, made.operands, strict=True):
            total += self.planner.seconds(value.type, self.held.spec(value), need)
        for value, given in zip(node.outs, made.results, strict=True):
            held = self.held.spec(value)
            if given != held:
                total += self.planner.seconds(value.type, given, held if held.axes else given.reduced())
        return total


def parted(sharding: DimSharding, dim: Dim, rule: ShardingRule, held: Held) -> tuple[DimSharding, ...]:
    """The shardings of a dim's factors that a sharding of it asks for. Tiles that end within a block are tiles of
    blocks then:
    64 rows for three ranks, of which a window reads 4 at a time, are 16 blocks for three ranks."""
    sizes, mesh = rule.dim_sizes(dim), held.mesh
    found = project(sharding, math.prod(sizes), sizes, mesh)
    if found is not None or not dim:
        return found or ()
    blocks, space = (
        DimSharding(sharding.axes),
        not sharding.parts and not any(mesh[axis].loop for axis in sharding.axes),
    )
    fits = space and held.feeds(blocks, sizes[0])
    return (blocks if fits else WHOLE, *(WHOLE for _ in dim[1:]))
