"""How a node is computed if its operands stay as they are placed."""

from __future__ import annotations

from collections.abc import Callable

from shardfx.ir.dim_sharding import DimSharding, project
from shardfx.ir.graph import Node, Strategy, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.spec import Spec

from .sharding_rule import ShardingRule
from .strategy import strategy, wished

APPROXIMATE = "approximate"
"""The attribute of a node by which a pass says that partial sums may pass it, though the sum is then a rounded one."""
REDUCE_AFTER = "reduce_after"
"""The attribute of a node by which is said that partial sums pass it, if they go nowhere else: a cast to the dtype in
which they are to be added."""


def passes_partial(rule: ShardingRule, node: Node, kind: str, group: frozenset[int], along: str = "") -> bool:
    """Whether the node may be computed with these operands partial, over an axis that shards a factor (``along``) or
    none: what it gives is then partial too."""
    if node.attrs.get(APPROXIMATE):
        return True
    return rule.passes(kind, group, along) is not None


def as_placed(
    rule: ShardingRule, node: Node, mesh: Mesh, seen: Callable[[Value], Spec | None] = lambda value: value.spec
) -> Strategy:
    """The strategy of a node that is sharded as its operands are, as far as its rule allows; ``seen`` says how they
    are.

    Where two operands want one axis or factor, it is sharded as the first; what is not allowed is needed whole, or
    reduced.
    """
    shardings: dict[str, DimSharding] = {}
    taken: set[str] = set()
    asked: dict[tuple[str, str], set[int]] = {}
    for index, (value, dims) in enumerate(zip(node.operands, rule.operands, strict=True)):
        spec = seen(value)
        if spec is None:
            continue
        for d, dim in enumerate(dims):
            projected = project(spec.dims[d], value.shape[d], rule.dim_sizes(dim), mesh)
            for held, given in zip(dim, projected or (), strict=False):
                factor, sharding = wished(rule, held, given)
                if (
                    sharding.axes
                    and factor not in rule.whole
                    and factor not in shardings
                    and not taken & set(sharding.axes)
                ):
                    shardings[factor] = sharding
                    taken.update(sharding.axes)
        for pair in spec.partial:
            asked.setdefault(pair, set()).add(index)
    partial = {
        axis: (kind, frozenset(group))
        for (axis, kind), group in asked.items()
        if axis not in taken and passes_partial(rule, node, kind, frozenset(group))
    }
    return strategy(rule, shardings, mesh, partial)
