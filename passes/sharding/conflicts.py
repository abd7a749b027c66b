"""Resolution of conflicts between the shardings of a node's tensors.

Two factors that want one axis, or two tensors that shard one factor differently, are a conflict: what comes from a hint
on a parameter wins (it says how the op is sharded; a hint on an activation says how it is stored), else the sharding of
the larger tensor, or the factor whose choice sends fewer bytes.

    %5 = mm(%3, %4)    %3 [., .{tp}]  %4 [., .{tp}]    k over tp, or n over tp?
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from shardfx.ir.dim_sharding import REPLICATED, DimSharding, join, project, without
from shardfx.ir.errors import Error
from shardfx.ir.graph import Node, Value
from shardfx.ir.ops.redistribute import Redistribution
from shardfx.ir.reasons import Refused
from shardfx.ir.rules.sharding_rule import Dim, ShardingRule
from shardfx.ir.rules.strategy import FactorShardings, wished

from .pins import pinned
from .sharding_state import ShardingState


class Proposal(NamedTuple):
    """A sharding of a factor, the tensor that has it, and whether a parameter's hint stands behind it."""

    sharding: DimSharding
    value: Value
    strong: bool


@dataclass
class Conflicts:
    """Settles the shardings of a node's factors from those of its tensors."""

    state: ShardingState
    planner: Redistribution

    def resolve(self, node: Node, with_results: bool) -> tuple[dict[str, DimSharding], tuple[Refused, ...]]:
        """The sharding of each factor, conflicts settled; and the rejected ones, in words."""
        pins = pinned(node)
        found = {factor: each for factor, each in self._proposals(node, with_results).items() if factor not in pins}
        if not found and not pins:
            return {}, ()
        rejected: list[Refused] = []
        shardings = {factor: self._best(node, factor, options, rejected) for factor, options in found.items()}

        def drop(factor: str, axis: str) -> None:
            rejected.append(Refused(f"axis {axis} on factor {factor}"))
            shardings[factor] = without(shardings[factor], axis, self.state.mesh)

        for axis in (axis for sharding in pins.values() for axis in sharding.axes):
            for factor in (factor for factor, sharding in shardings.items() if axis in sharding.axes):
                drop(factor, axis)
        shardings |= pins
        for axis in dict.fromkeys(axis for sharding in shardings.values() for axis in sharding.axes):
            factors = [factor for factor, sharding in shardings.items() if axis in sharding.axes]
            winner = self._settle(node, axis, factors, shardings, found) if len(factors) > 1 else ""
            for factor in factors if winner else ():
                if factor != winner:
                    drop(factor, axis)
        return {f: c for f, c in shardings.items() if c.axes}, tuple(rejected)

    def _proposals(self, node: Node, with_results: bool) -> dict[str, list[Proposal]]:
        """The shardings of each shardable factor by the node's tensors."""
        state = self.state
        rule, mesh = state.rules[node], state.mesh
        found: dict[str, list[Proposal]] = {}
        for value, dims, is_operand in state.tensors(node):
            shardings = state.shardings.get(value)
            if shardings is None or not (is_operand or with_results):
                continue
            for d, dim in enumerate(dims):
                if not shardings[d].axes:
                    continue
                for each, own in zip(dim, factor_shardings(shardings[d], dim, rule, state), strict=True):
                    factor, sharding = wished(rule, each, own)
                    for axis in sharding.axes:
                        rows = factor in rule.leaders and mesh[axis].loop  # iterations do not exchange halos
                        if rows or not state.chunks.has(node, axis):
                            sharding = without(sharding, axis, mesh)
                    if sharding.axes and factor not in rule.replicated and state.feeds(sharding, rule.sizes[factor]):
                        strong = any(state.origin_of(value, a).operator for a in sharding.axes)
                        found.setdefault(factor, []).append(Proposal(sharding, value, strong))
        return found

    def _best(self, node: Node, factor: str, options: list[Proposal], rejected: list[Refused]) -> DimSharding:
        """The sharding of one factor: the union of its tensors' shardings, where they agree."""
        size, best = self.state.rules[node].sizes[factor], options[0]
        for option in options[1:]:
            if option.sharding == best.sharding:
                continue
            joined = join(best.sharding, option.sharding, size, self.state.mesh)
            if joined is not None:
                best = Proposal(joined, best.value, best.strong or option.strong)
                continue
            winner = max(best, option, key=lambda c: (c.strong, c.value.type.nbytes))
            loser = option if winner is best else best
            rejected.append(Refused(loser.sharding.text("."), loser.value))
            best = winner
        return best.sharding

    def _settle(
        self, node: Node, axis: str, factors: list[str], shardings: FactorShardings, found: dict[str, list[Proposal]]
    ) -> str:
        """The factor that gets a contested axis: one pinned in the forward, one of a parameter's hint, else the
        cheapest by bytes moved."""
        state, mesh = self.state, self.state.mesh
        having = {f: [c.value for c in found[f] if axis in c.sharding.axes] for f in factors}
        followed = [f for f, values in having.items() if any(state.follows(node, v, axis) for v in values)]
        strong = [f for f, values in having.items() if any(state.origin_of(v, axis).operator for v in values)]
        for sure in (followed, strong):
            if len(sure) == 1:
                return sure[0]
        scored = []
        for i, factor in enumerate(factors):
            trial = {f: without(c, axis, mesh) if f in factors and f != factor else c for f, c in shardings.items()}
            try:
                scored.append((self._seconds(node, {f: c for f, c in trial.items() if c.axes}), i, factor))
            except Error:  # these use an axis twice in one tensor: they are no choice
                continue
        return min(scored)[2] if scored else factors[0]

    def _seconds(self, node: Node, shardings: dict[str, DimSharding]) -> float:
        """The time of the communication that a node implies when its factors are sharded so."""
        made = self.state.cache.strategy(self.state.rules[node], shardings)
        total = 0.0
        for value, need in zip(node.operands, made.operands, strict=True):
            total += self.planner.seconds(value.type, self.state.spec(value), need)
        for value, gives in zip(node.outs, made.results, strict=True):
            spec = self.state.spec(value)
            if gives != spec:
                total += self.planner.seconds(value.type, gives, spec if spec.axes else gives.reduced())
        return total


def factor_shardings(
    sharding: DimSharding, dim: Dim, rule: ShardingRule, state: ShardingState
) -> tuple[DimSharding, ...]:
    """The shardings of a dim's factors that the dim's asks for. Tiles that end within a block are tiles of blocks then:
    64 rows for three ranks, of which a window reads 4 at a time, are 16 blocks for three ranks."""
    sizes, mesh = rule.dim_sizes(dim), state.mesh
    found = project(sharding, math.prod(sizes), sizes, mesh)
    if found is not None or not dim:
        return found or ()
    blocks, loops = DimSharding(sharding.axes), any(mesh[axis].loop for axis in sharding.axes)
    space = not sharding.parts and not loops
    fits = space and state.feeds(blocks, sizes[0])
    return (blocks if fits else REPLICATED, *(REPLICATED for _ in dim[1:]))
