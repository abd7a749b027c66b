"""All strategies of one node on a mesh, by its rule: each axis shards a factor, or finds operands partial, or neither.

mm, Mesh(a=2)     [4, 6], [6, 5] -> [4, 5]              m{a}: [4{a}, 6], [6, 5] -> [4{a}, 5]
                  k{a}: [4, 6{a}], [6{a}, 5] -> [4, 5] +{a}              [4, 6] +{a}, [6, 5] -> [4, 5] +{a}   ...
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from shardfx.ir.dim_sharding import DimSharding, smallest
from shardfx.ir.errors import Error
from shardfx.ir.graph import Node, Strategy
from shardfx.ir.mesh import Mesh

from .sharding_rule import ShardingRule
from .strategy import strategy

MOST_IGNORED = 4
"""Of more operands at whose values an op does not look, each alone and all together are partial sums."""


class OnAxis(NamedTuple):
    """What one mesh axis does to a node: the factor that it shards, the operands that are partial sums over it."""

    factor: str = ""
    group: frozenset[int] = frozenset()


def strategies(rule: ShardingRule, node: Node, mesh: Mesh) -> Iterator[Strategy]:
    """Every strategy of a node on the axes of ranks of a mesh, each once; that with nothing sharded comes first.

    A factor is sharded plainly, and so that each rank has some of it. Of reductions, operands are partial by sums.
    """
    axes = [axis.name for axis in mesh.space if axis.size > 1]
    options = list(on_axis(rule, [value.type.dtype for value in node.operands]))
    seen = set()
    for chosen in itertools.product(options, repeat=len(axes)):
        partial = {axis: ("sum", each.group) for axis, each in zip(axes, chosen, strict=True) if each.group}
        over: dict[str, list[str]] = {}
        for axis, each in zip(axes, chosen, strict=True):
            if each.factor:
                over.setdefault(each.factor, []).append(axis)
        for shardings in _in_all_orders(over):
            if any(smallest(rule.sizes[f], sharding.axes, mesh) < 1 for f, sharding in shardings.items()):
                continue
            try:
                made = strategy(rule, shardings, mesh, partial)
            except Error:  # an axis twice in one placement, or a dim of several factors that is no product of shards
                continue
            key = (made.operands, made.results)
            if key not in seen:
                seen.add(key)
                yield made


def on_axis(rule: ShardingRule, dtypes: Sequence[torch.dtype]) -> Iterator[OnAxis]:
    """What one axis may do, whatever the others do; by the dtypes of the operands, of which whole numbers are no terms
    of sums."""
    numbers = {i for i, dtype in enumerate(dtypes) if dtype.is_floating_point or dtype.is_complex}
    ignored = sorted(rule.ignored & numbers)
    counts = range(len(ignored) + 1) if len(ignored) <= MOST_IGNORED else sorted({0, 1, len(ignored)})
    extra = [frozenset(each) for n in counts for each in itertools.combinations(ignored, n)]
    groups = [each for each in rule.linear if each.operands <= numbers and each.results != frozenset()]
    alone = [frozenset[int](), *(each.operands - rule.ignored for each in groups if not each.along)]
    found = [OnAxis("", group | more) for group in alone for more in extra]
    for factor in rule.factors:
        if rule.sizes[factor] < 2 or factor in rule.windows.keys() - rule.alone:
            continue
        moved = (factor,) if factor in rule.windows else rule.kin(factor)
        sharded = {tensor for each in moved for is_operand, tensor, _, _ in rule.factors.get(each, ()) if is_operand}
        joined = [each.operands - rule.ignored for each in groups if factor in each.along]
        free = [] if factor in rule.whole else [frozenset[int]()]
        found += [OnAxis(factor, group | more) for group in (*free, *joined) for more in extra if not sharded & more]
    yield from dict.fromkeys(found)


def _in_all_orders(over: Mapping[str, list[str]]) -> Iterator[dict[str, DimSharding]]:
    """Shardings of factors over their axes, of which any may be the major one."""
    for orders in itertools.product(*(itertools.permutations(axes) for axes in over.values())):
        yield {factor: DimSharding(axes) for factor, axes in zip(over, orders, strict=True)}
