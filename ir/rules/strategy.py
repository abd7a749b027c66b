"""From cuts of factors to the placements of all tensors of a node, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

from shardfx.ir.cut import WHOLE, Cut, Part, Window, compound, in_stretches, project
from shardfx.ir.errors import Error
from shardfx.ir.graph import Node, Strategy
from shardfx.ir.mesh import Mesh
from shardfx.ir.shards import rows_for
from shardfx.ir.spec import Spec

from .sharding_rule import SAME, Dim, ShardingRule

Cuts = Mapping[str, Cut]
Partial = Mapping[str, tuple[str, frozenset[int]]]
"""By axis the reduction, and the operands that are partial over it."""


def cut_of(factor: str, cuts: Cuts, rule: ShardingRule, mesh: Mesh) -> Cut:
    """How a factor is held: as it is cut, or in the rows that the chunks of its leader need."""
    seen = rule.windows.get(factor)
    if seen is None or factor in cuts:
        return cuts.get(factor, WHOLE)
    leader = cuts.get(seen.leader, WHOLE)
    if leader.rows is None:
        return rows_for(leader.axes, seen.window, rule.sizes[factor], mesh)
    made = rows_for(leader.axes, seen.window.within(leader.rows), rule.sizes[factor], mesh)
    if not _covers(made, rule.sizes[factor], seen.window, leader, rule.sizes[seen.leader], mesh):
        raise Error(
            f"a rank has no rows of the factor {factor!r} for the one of {seen.leader!r} that it holds",
            expected="tiles, or rows of which each rank has some",
            got=leader.text(rule.sizes[seen.leader]),
        )
    return made


@lru_cache(maxsize=4096)
def _covers(made: Cut, size: int, window: Window, leader: Cut, leaders: int, mesh: Mesh) -> bool:
    """Whether ranks hold what the leader's rows are made of, the one row also that a rank has where its chunk needs
    none."""
    for coords in mesh.along(dict.fromkeys(mesh.names, 0), leader.axes):
        (start, length), (first, count) = made.span(size, mesh, coords), leader.span(leaders, mesh, coords)
        needed, rows = window.rows(first, count, size)
        if not start <= needed <= needed + rows <= start + length:
            return False
    return True


def wishes(rule: ShardingRule, cuts: Cuts) -> dict[str, Cut]:
    """The cuts, and for what is seen through windows tiles over the same axes: how it is best held."""
    seen = {f: Cut(cuts[each.leader].axes) for f, each in rule.windows.items() if each.leader in cuts}
    return {**cuts, **seen}


def wished(rule: ShardingRule, factor: str, cut: Cut) -> tuple[str, Cut]:
    """The factor that is to be cut where a tensor holds a cut of one, and how: a leader in tiles over the same axes."""
    seen = rule.windows.get(factor)
    if seen is None and factor not in rule.leaders:
        return factor, cut
    return factor if seen is None else seen.leader, WHOLE if in_stretches(cut) else Cut(cut.axes)


def implied(rule: ShardingRule, factor: str, cut: Cut, mesh: Mesh) -> tuple[str, Cut] | None:
    """The factor that is cut where a tensor holds this cut of one, and how; None where that follows from no cut."""
    seen = rule.windows.get(factor)
    if seen is None:
        return factor, cut
    made = rows_for(cut.axes, seen.window, rule.sizes[factor], mesh)
    return (seen.leader, Cut(cut.axes)) if cut == made else None


def place(dims: tuple[Dim, ...], cuts: Cuts, rule: ShardingRule, mesh: Mesh) -> tuple[Cut, ...]:
    """The cuts of a tensor's dims that follow from the cuts of the factors."""
    placed = []
    for dim in dims:
        if len(dim) == 1:
            placed.append(cut_of(dim[0], cuts, rule, mesh))
        elif not any(f in cuts for f in dim):
            placed.append(WHOLE)
        else:
            placed.append(_joined(dim, cuts, rule, mesh))
    return tuple(placed)


def _joined(dim: Dim, cuts: Cuts, rule: ShardingRule, mesh: Mesh) -> Cut:
    """The cut of a dim of several factors; rows that overlap are rows of the dim where the others are of size one."""
    parts: list[Part] = []
    for f in dim:
        cut = cuts.get(f, WHOLE)
        if cut.rows is not None and math.prod(rule.dim_sizes(dim)) == rule.sizes[f]:
            return cut
        if cut.rows is not None:
            raise Error(
                f"rows of the factor {f!r} that overlap are no rows of a dim of several factors",
                expected="tiles",
                got=cut.text(rule.sizes[f]),
            )
        parts.extend(cut.sub(rule.sizes[f]))
    return compound(parts, mesh)


def strategy(
    rule: ShardingRule,
    cuts: Cuts,
    mesh: Mesh,
    partial: Partial | None = None,
) -> Strategy:
    """How a node is computed when its factors are cut so, and operands are partial so.

    Args:
        cuts: factor -> cut. Over all factors, an axis at most once.
        partial: axis -> (reduction, the operands that are partial over it), one of ``rule.linear``'s groups. An axis
            that shards a factor as well is one along which the rule lets them be.

    Raises:
        Error: a factor that sees others through windows is not cut plainly; rows that overlap would count twice in a
            sum; an axis stands twice in one placement; it shards a factor, and operands are partial over it for which
            the rule does not say so.
    """
    partial = partial or {}
    for factor in (rule.leaders | rule.alone) & cuts.keys():
        if cuts[factor].parts:
            raise Error(
                f"the factor {factor!r} sees others through windows",
                expected="one chunk of it for each rank",
                got=cuts[factor].text(rule.sizes[factor]),
            )
    operands = []
    for i, dims in enumerate(rule.operands):
        held = tuple((axis, op) for axis, (op, group) in partial.items() if i in group)
        operands.append(Spec(place(dims, cuts, rule, mesh), held))
    along = {axis: factor for factor, cut in cuts.items() for axis in cut.axes}
    passed = []
    for axis, (op, group) in partial.items():
        factor = along.get(axis, "")
        numbers = rule.passes(op, group, factor)
        if factor and (numbers is None or not _alike(cuts[factor], axis, partial, rule)):
            raise Error(
                f"mesh axis {axis!r} shards the factor {factor!r}, and operands are partial over it",
                expected="one of both, or operands that are partial sums over all axes of the factor",
                got=f"operands {sorted(group)}, {op}",
            )
        passed.append((axis, op, numbers))
    results = []
    for i, (made_dims, kind) in enumerate(zip(rule.results, rule.reductions, strict=True)):
        if made_dims is None:
            continue
        present = rule.result_factors[i]
        through = tuple((axis, op) for axis, op, numbers in passed if numbers is None or i in numbers)
        lost = {f: c for f, c in cuts.items() if f not in present and i not in rule.unread.get(f, ()) and kind != SAME}
        twice = next((f for f, cut in lost.items() if cut.rows is not None), None)
        if twice is not None:
            expected, got = "tiles, in which each row is once", cuts[twice].text(rule.sizes[twice])
            raise Error(f"a {kind} over the factor {twice!r} counts rows twice", expected=expected, got=got)
        made = tuple((axis, kind) for cut in lost.values() for axis in cut.axes)
        ordered = sorted({*through, *made}, key=lambda pair: mesh.order(pair[0]))
        results.append(Spec(place(made_dims, cuts, rule, mesh), tuple(ordered)))
    return Strategy(tuple(operands), tuple(results), tuple((f, c.axes) for f, c in cuts.items() if c.axes))


def _alike(cut: Cut, axis: str, partial: Partial, rule: ShardingRule) -> bool:
    """Whether operands that are read are partial over all axes of a factor as they are over one."""
    groups = {partial[each][1] - rule.ignored if each in partial else frozenset() for each in cut.axes}
    return groups == {partial[axis][1] - rule.ignored}


def factor_cuts(rule: ShardingRule, node: Node, mesh: Mesh) -> dict[str, Cut]:
    """The cuts of the factors by which a node's strategy was made: the inverse of :func:`strategy`.

    The strategy names the axes of each factor; where they cut a sub-dim of it, that is read off a tensor that has it.
    """
    made = node.strategy
    assert made is not None
    cuts = {}
    for factor, axes in made.cuts:
        cuts[factor] = Cut(axes)
        for is_operand, t, d, place in rule.factors[factor]:
            specs, dims = (made.operands, rule.operands) if is_operand else (_specs(rule, made), rule.results)
            tensor, spec = dims[t], specs[t]
            assert tensor is not None and spec is not None
            sizes = rule.dim_sizes(tensor[d])
            found = project(spec.dims[d], math.prod(sizes), sizes, mesh)
            if found is not None and found[place].axes == axes:
                cuts[factor] = found[place]
                break
    return cuts


def _specs(rule: ShardingRule, made: Strategy) -> list[Spec | None]:
    """What a strategy gives to each result, and None to those that are no tensors."""
    given = iter(made.results)
    return [None if dims is None else next(given) for dims in rule.results]


def partial_operands(made: Strategy) -> dict[str, tuple[str, frozenset[int]]]:
    """axis -> (reduction, the operands that are partial over it), as :func:`strategy` takes it."""
    found: dict[str, tuple[str, frozenset[int]]] = {}
    for i, spec in enumerate(made.operands):
        for axis, kind in spec.partial:
            found[axis] = (kind, found.get(axis, (kind, frozenset[int]()))[1] | {i})
    return found
