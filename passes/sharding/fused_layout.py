"""How a fused weight is best laid out: ``3 * 64`` rows of q, k and v sharded over heads are ``(3 64{tp})``."""

from __future__ import annotations

from collections.abc import Mapping

from shardfx.ir.dim_sharding import DimSharding, Part, compound, project
from shardfx.ir.graph import Node, Phase, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.passes.rule_cache import RuleCache

MOST_STEPS = 12
"""A dim is followed through so many ops."""


def fused_layout(
    value: Value,
    dim: int,
    sharding: DimSharding,
    operator: set[str],
    rules: RuleCache,
    users: Mapping[Value, list[Node]],
    mesh: Mesh,
) -> DimSharding:
    """The sharding of a stored dim for which a hint says ``sharding``; ``operator`` are its axes that shard ops.

    Follows the dim to the first op that takes it apart (a split, a view); where the plain sharding does not survive
    that, but a sharding of one of its parts does, each rank stores its share of every part.
    """
    if not operator:
        return sharding
    size, at = value.shape[dim], dim
    for _ in range(MOST_STEPS):
        step = _follow(value, at, rules, users)
        if step is None:
            return sharding
        factors, rule, value, at = step
        if len(factors) == 1:
            continue
        sizes = rule.dim_sizes(factors)
        plain = project(sharding, size, sizes, mesh)
        if plain is not None and not any(c.axes and f in rule.whole for f, c in zip(factors, plain, strict=True)):
            return sharding
        extent = mesh.extent(sharding.axes)
        for i, factor in enumerate(factors):
            if factor not in rule.whole and sizes[i] % extent == 0:
                parts = [Part(s, sharding.axes if j == i else ()) for j, s in enumerate(sizes)]
                return compound(parts, mesh)
        return sharding
    return sharding


def _follow(
    value: Value, dim: int, rules: RuleCache, users: Mapping[Value, list[Node]]
) -> tuple[tuple[str, ...], ShardingRule, Value, int] | None:
    """The next forward value that carries the dim on, where it stands there, and its factors on the way."""
    for node in users[value]:
        if node.phase is not Phase.FORWARD:
            continue
        rule = rules.rule(node)
        factors = rule.operands[node.operands.index(value)][dim]
        if len(factors) != 1:
            return factors, rule, value, dim
        for result, dims in zip(node.results, rule.results, strict=True):
            for d, names in enumerate(dims or ()):
                if names == factors and result is not None:
                    return factors, rule, result, d
    return None
