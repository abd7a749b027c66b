"""Strategies of a node: from shardings of factors to the placements of all tensors, and back; and their enumeration.

mm, Mesh(a=2)     [4, 6], [6, 5] -> [4, 5]              m{a}: [4{a}, 6], [6, 5] -> [4{a}, 5]
                  k{a}: [4, 6{a}], [6{a}, 5] -> [4, 5] +{a}              [4, 6] +{a}, [6, 5] -> [4, 5] +{a}   ...
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from shardfx.ir.dim_sharding import REPLICATED, DimSharding, Part, Window, compound, is_strided, project, smallest
from shardfx.ir.errors import Error
from shardfx.ir.graph import Node, Strategy, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.shards import rows_for
from shardfx.ir.spec import Spec

from .sharding_rule import SAME, Dim, ShardingRule

FactorShardings = Mapping[str, DimSharding]
Partial = Mapping[str, tuple[str, frozenset[int]]]
"""The reduction by axis, and the operands that are partial over it."""
APPROXIMATE = "approximate"
"""Node attribute set by a pass to let partial sums through, although the result is then a rounded sum."""
REDUCE_AFTER = "reduce_after"
"""Node attribute of a cast to the dtype in which partial sums are to be reduced: they pass it, if they are not used
otherwise."""
MOST_IGNORED = 4
"""Up to this many ignored operands all subsets are partial sums; of more, each alone and all together."""


def sharding_of(factor: str, shardings: FactorShardings, rule: ShardingRule, mesh: Mesh) -> DimSharding:
    """The sharding of a factor: its own, or the rows with halo that the chunks of its leader need."""
    seen = rule.windows.get(factor)
    if seen is None or factor in shardings:
        return shardings.get(factor, REPLICATED)
    leader = shardings.get(seen.leader, REPLICATED)
    if leader.rows is None:
        return rows_for(leader.axes, seen.window, rule.sizes[factor], mesh)
    made = rows_for(leader.axes, seen.window.within(leader.rows), rule.sizes[factor], mesh)
    if not _covers(made, rule.sizes[factor], seen.window, leader, rule.sizes[seen.leader], mesh):
        what = f"a rank has no rows of the factor {factor!r} for the one of {seen.leader!r} that it holds"
        expected = "tiles, or rows of which each rank has some"
        raise Error(what, expected=expected, got=leader.text(rule.sizes[seen.leader]))
    return made


@lru_cache(maxsize=4096)
def _covers(made: DimSharding, size: int, window: Window, leader: DimSharding, leaders: int, mesh: Mesh) -> bool:
    """Whether shards cover the rows that the leader's chunks read, also for a rank whose chunk needs none."""
    for coords in mesh.along(dict.fromkeys(mesh.names, 0), leader.axes):
        (start, length), (first, count) = made.span(size, mesh, coords), leader.span(leaders, mesh, coords)
        needed, rows = window.rows(first, count, size)
        if not start <= needed <= needed + rows <= start + length:
            return False
    return True


def wishes(rule: ShardingRule, shardings: FactorShardings) -> dict[str, DimSharding]:
    """The preferred shardings: factors seen through windows are tiled over the axes of their leaders."""
    seen = {f: DimSharding(shardings[each.leader].axes) for f, each in rule.windows.items() if each.leader in shardings}
    return {**shardings, **seen}


def wished(rule: ShardingRule, factor: str, sharding: DimSharding) -> tuple[str, DimSharding]:
    """The factor to shard for a tensor's sharding of one, and its sharding: a leader is tiled over the same axes."""
    seen = rule.windows.get(factor)
    if seen is None and factor not in rule.leaders:
        return factor, sharding
    return factor if seen is None else seen.leader, REPLICATED if is_strided(sharding) else DimSharding(sharding.axes)


def implied(rule: ShardingRule, factor: str, sharding: DimSharding, mesh: Mesh) -> tuple[str, DimSharding] | None:
    """The factor whose sharding implies a tensor's sharding of another, and its sharding; None if there is none."""
    seen = rule.windows.get(factor)
    if seen is None:
        return factor, sharding
    made = rows_for(sharding.axes, seen.window, rule.sizes[factor], mesh)
    return (seen.leader, DimSharding(sharding.axes)) if sharding == made else None


def place(dims: tuple[Dim, ...], shardings: FactorShardings, rule: ShardingRule, mesh: Mesh) -> tuple[DimSharding, ...]:
    """The shardings of a tensor's dims that result from the shardings of the factors."""
    placed = []
    for dim in dims:
        if len(dim) == 1:
            placed.append(sharding_of(dim[0], shardings, rule, mesh))
        elif not any(f in shardings for f in dim):
            placed.append(REPLICATED)
        else:
            placed.append(_joined(dim, shardings, rule, mesh))
    return tuple(placed)


def _joined(dim: Dim, shardings: FactorShardings, rule: ShardingRule, mesh: Mesh) -> DimSharding:
    """The sharding of a dim of several factors; a halo of a factor is one of the dim if the others have size
    one."""
    parts: list[Part] = []
    for f in dim:
        sharding = shardings.get(f, REPLICATED)
        if sharding.rows is not None and math.prod(rule.dim_sizes(dim)) == rule.sizes[f]:
            return sharding
        if sharding.rows is not None:
            what = f"rows of the factor {f!r} that overlap are no rows of a dim of several factors"
            raise Error(what, expected="tiles", got=sharding.text(rule.sizes[f]))
        parts.extend(sharding.sub(rule.sizes[f]))
    return compound(parts, mesh)


def strategy(rule: ShardingRule, shardings: FactorShardings, mesh: Mesh, partial: Partial | None = None) -> Strategy:
    """The strategy of a node from the shardings of its factors, and the partial operands.

    Args:
        shardings: factor -> sharding. Over all factors, an axis at most once.
        partial: axis -> (reduction, the operands that are partial over it), one of ``rule.linear``'s groups. An axis
        may shard a factor as well, if the rule allows them ``along`` it.

    Raises:
        Error: a leader of windows is not sharded plainly; overlapping rows would count twice in a sum; an axis is used
        twice in one placement; an axis shards a factor, and the rule does not allow operands to be partial
        along it.
    """
    partial = partial or {}
    for factor in (rule.leaders | rule.alone) & shardings.keys():
        if shardings[factor].parts:
            what = f"the factor {factor!r} sees others through windows"
            raise Error(what, expected="one chunk of it for each rank", got=shardings[factor].text(rule.sizes[factor]))
    operands = []
    for i, dims in enumerate(rule.operands):
        partials = tuple((axis, op) for axis, (op, group) in partial.items() if i in group)
        operands.append(Spec(place(dims, shardings, rule, mesh), partials))
    along = {axis: factor for factor, sharding in shardings.items() for axis in sharding.axes}
    passed = []
    for axis, (op, group) in partial.items():
        factor = along.get(axis, "")
        numbers = rule.passes(op, group, factor)
        if factor and (numbers is None or not _alike(shardings[factor], axis, partial, rule)):
            what = f"mesh axis {axis!r} shards the factor {factor!r}, and operands are partial over it"
            expected = "one of both, or operands that are partial sums over all axes of the factor"
            raise Error(what, expected=expected, got=f"operands {sorted(group)}, {op}")
        passed.append((axis, op, numbers))
    results = []
    for i, (made_dims, kind) in enumerate(zip(rule.results, rule.reductions, strict=True)):
        if made_dims is None:
            continue
        present = rule.result_factors[i]
        through = tuple((axis, op) for axis, op, numbers in passed if numbers is None or i in numbers)
        lost = {
            f: c for f, c in shardings.items() if f not in present and i not in rule.unread.get(f, ()) and kind != SAME
        }
        twice = next((f for f, sharding in lost.items() if sharding.rows is not None), None)
        if twice is not None:
            expected, got = "tiles, in which each row is once", shardings[twice].text(rule.sizes[twice])
            raise Error(f"a {kind} over the factor {twice!r} counts rows twice", expected=expected, got=got)
        made = tuple((axis, kind) for sharding in lost.values() for axis in sharding.axes)
        ordered = sorted({*through, *made}, key=lambda pair: mesh.order(pair[0]))
        results.append(Spec(place(made_dims, shardings, rule, mesh), tuple(ordered)))
    return Strategy(tuple(operands), tuple(results), tuple((f, c.axes) for f, c in shardings.items() if c.axes))


def _alike(sharding: DimSharding, axis: str, partial: Partial, rule: ShardingRule) -> bool:
    """Whether the operands that the op reads are partial over all axes of a factor, or over none."""
    groups = {partial[each][1] - rule.ignored if each in partial else frozenset() for each in sharding.axes}
    return groups == {partial[axis][1] - rule.ignored}


def factor_shardings(rule: ShardingRule, node: Node, mesh: Mesh) -> dict[str, DimSharding]:
    """The inverse of :func:`strategy`: the shardings of the factors.

    The strategy names the axes of each factor; if they shard a sub-dim of it, that is read off one of its tensors.
    """
    made = node.strategy
    assert made is not None
    results = iter(made.results)
    of_results = [None if dims is None else next(results) for dims in rule.results]
    shardings = {}
    for factor, axes in made.shardings:
        shardings[factor] = DimSharding(axes)
        for is_operand, t, d, place in rule.factors[factor]:
            specs, dims = (made.operands, rule.operands) if is_operand else (of_results, rule.results)
            tensor, spec = dims[t], specs[t]
            assert tensor is not None and spec is not None
            sizes = rule.dim_sizes(tensor[d])
            found = project(spec.dims[d], math.prod(sizes), sizes, mesh)
            if found is not None and found[place].axes == axes:
                shardings[factor] = found[place]
                break
    return shardings


def partial_operands(made: Strategy) -> dict[str, tuple[str, frozenset[int]]]:
    """axis -> (reduction, the operands that are partial over it), as :func:`strategy` takes it."""
    found: dict[str, tuple[str, frozenset[int]]] = {}
    for i, spec in enumerate(made.operands):
        for axis, kind in spec.partial:
            found[axis] = (kind, found.get(axis, (kind, frozenset[int]()))[1] | {i})
    return found


def passes_partial(rule: ShardingRule, node: Node, kind: str, group: frozenset[int], along: str = "") -> bool:
    """Whether the node maps these partial operands to partial results, over an axis that shards a factor (``along``),
    or none."""
    if node.attrs.get(APPROXIMATE):
        return True
    return rule.passes(kind, group, along) is not None


def as_placed(
    rule: ShardingRule, node: Node, mesh: Mesh, seen: Callable[[Value], Spec | None] = lambda value: value.spec
) -> Strategy:
    """The strategy of a node that keeps its operands' placements, as far as its rule allows; ``seen`` returns each
    placement.

    On a conflict of two operands over an axis or factor, the first wins; what is not allowed has to be replicated, or
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
            for stored, own in zip(dim, projected or (), strict=False):
                factor, sharding = wished(rule, stored, own)
                if (
                    sharding.axes
                    and factor not in rule.replicated
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


# ---- all strategies -----------------------------------------------------------------------------------------------


class OnAxis(NamedTuple):
    """An option for one mesh axis: the factor that it shards, and the operands that are partial sums over it."""

    factor: str = ""
    group: frozenset[int] = frozenset()


def strategies(rule: ShardingRule, node: Node, mesh: Mesh) -> Iterator[Strategy]:
    """All strategies of a node over the axes of ranks of a mesh, each once; the replicated one comes first.

    Factors are sharded plainly, without empty shards. Partial operands are sums.
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
        for orders in itertools.product(*map(itertools.permutations, over.values())):  # any axis may be the major one
            shardings = {factor: DimSharding(each) for factor, each in zip(over, orders, strict=True)}
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
    """The options for one axis, independent of the others; integer operands (by their dtypes) are no partial sums."""
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
        free = [] if factor in rule.replicated else [frozenset[int]()]
        found += [OnAxis(factor, group | more) for group in (*free, *joined) for more in extra if not sharded & more]
    yield from dict.fromkeys(found)
