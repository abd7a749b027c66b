"""From cuts of factors to the placements of all tensors of a node."""

from __future__ import annotations

from collections.abc import Mapping

from shardfx.ir.cut import WHOLE, Cut, Part, compound
from shardfx.ir.graph import Strategy
from shardfx.ir.mesh import Mesh
from shardfx.ir.spec import Spec

from .sharding_rule import SAME, Dim, ShardingRule

Cuts = Mapping[str, Cut]


def place(dims: tuple[Dim, ...], cuts: Cuts, rule: ShardingRule, mesh: Mesh) -> tuple[Cut, ...]:
    """The cuts of a tensor's dims that follow from the cuts of the factors."""
    placed = []
    for dim in dims:
        if len(dim) == 1:
            placed.append(cuts.get(dim[0], WHOLE))
        elif not any(f in cuts for f in dim):
            placed.append(WHOLE)
        else:
            parts: list[Part] = []
            for f in dim:
                parts.extend(cuts.get(f, WHOLE).sub(rule.sizes[f]))
            placed.append(compound(parts, mesh))
    return tuple(placed)


def strategy(
    rule: ShardingRule,
    cuts: Cuts,
    mesh: Mesh,
    partial: Mapping[str, tuple[str, frozenset[int]]] | None = None,
) -> Strategy:
    """How a node is computed when its factors are cut so, and operands are partial so.

    Args:
        cuts: factor -> cut. Over all factors, an axis at most once.
        partial: axis -> (reduction, the operands that are partial over it), one of ``rule.linear``'s groups.
    """
    partial = partial or {}
    operands = []
    for i, dims in enumerate(rule.operands):
        held = tuple((axis, op) for axis, (op, group) in partial.items() if i in group)
        operands.append(Spec(place(dims, cuts, rule, mesh), held))
    passed = tuple((axis, op) for axis, (op, _) in partial.items())
    results = []
    for present, made_dims, kind in zip(rule.result_factors, rule.results, rule.reductions, strict=True):
        if made_dims is None:
            continue
        lost = (cut for f, cut in cuts.items() if f not in present) if kind != SAME else ()
        made = tuple((axis, kind) for cut in lost for axis in cut.axes)
        ordered = sorted(passed + made, key=lambda pair: mesh.order(pair[0]))
        results.append(Spec(place(made_dims, cuts, rule, mesh), tuple(ordered)))
    return Strategy(tuple(operands), tuple(results), tuple((f, c.axes) for f, c in cuts.items() if c.axes))
