"""A planned node in small: the same op, cuts and divisibility on few elements and few ranks.

    mm(f32[8192, 4096], f32[4096, 1024])  m{dp} n{tp} on dp=64, tp=8
    mm(f64[4, 7], f64[7, 2])              m{dp} n{tp} on dp=2, tp=2

A node that is small already stays as it is. Of others the sizes of the rule's factors are made small: what is cut
evenly stays a multiple of its ranks, what is not stays none, equal sizes stay equal, and a compound dim is cut in the
same sub-dims. Numbers among the arguments that are sizes follow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardfx.ir.cut import Cut, Part, Window
from shardfx.ir.graph import Node, Strategy, Value, substitute
from shardfx.ir.mesh import Mesh
from shardfx.ir.oracle.instance import Instance, instance
from shardfx.ir.oracle.running.draws import FLOATS, Draw, of_dtype
from shardfx.ir.rules.book import RuleEntry
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.rules.strategy import factor_cuts, partial_operands, strategy

MOST_ELEMENTS = 20_000
MOST_RANKS = 8
ROWS = 6
"""Dims that are seen through windows keep so many rows at least."""
KEPT = 5
"""Sizes up to this stay as they are where they are not cut: they may mean something."""


@dataclass(frozen=True)
class SmallShare:
    """An instance, and the strategy by which it is to be computed on a mesh."""

    of: Instance
    made: Strategy
    mesh: Mesh
    as_it_stands: bool
    """Whether shapes and ranks are those of the plan."""


def small_share(node: Node, entry: RuleEntry, mesh: Mesh) -> SmallShare | None:
    """A planned node in small, or None if there is none that behaves as the node does."""
    rule = entry.make(node)
    if rule is None or node.strategy is None:
        return None
    used = used_axes(node.strategy)
    if mesh.extent(used) <= MOST_RANKS and _elements(node) <= MOST_ELEMENTS:
        of = _made(node, {})
        if of is not None:
            return SmallShare(of, node.strategy, _mesh(mesh, used, mesh.size), True)
    few = _mesh(mesh, used, 2)
    cuts = factor_cuts(rule, node, mesh)
    sizes, small_cuts = _factors(rule, cuts, mesh, few)
    sizes |= _seen(rule, cuts, mesh, few)
    small_cuts = _rows(small_cuts, sizes)
    for found in _ways(node, rule, sizes):
        of = _made(node, found)
        if of is None or _elements(of.node) > MOST_ELEMENTS:
            continue
        own = entry.make(of.node)
        if own is None or any(own.sizes.get(f) != sizes[f] for f in cuts):
            continue
        return SmallShare(of, strategy(own, small_cuts, few, partial_operands(node.strategy)), few, False)
    return None


def used_axes(made: Strategy) -> tuple[str, ...]:
    """The axes that a strategy speaks of."""
    specs = (*made.operands, *made.results)
    return tuple(dict.fromkeys(a for spec in specs for a in (*spec.axes, *spec.partial_axes)))


def _mesh(mesh: Mesh, used: tuple[str, ...], most: int) -> Mesh:
    """The axes that are used, each with at most so many ranks."""
    return Mesh(links=None, **{axis.name: min(axis.size, most) for axis in mesh.axes if axis.name in used})


def _elements(node: Node) -> int:
    return sum(math.prod(value.shape) for value in (*node.operands, *node.outs))


def _factors(
    rule: ShardingRule, cuts: Mapping[str, Cut], mesh: Mesh, few: Mesh
) -> tuple[dict[str, int], dict[str, Cut]]:
    """A small size for every factor, equal ones for equal ones, and the cuts of those."""
    need: dict[int, int] = {}
    uneven: set[int] = set()
    parted: dict[int, tuple[Part, ...]] = {}
    for factor, cut in cuts.items():
        parts = []
        for part in cut.sub(rule.sizes[factor]):
            ranks = few.extent(part.axes)
            even = part.size % mesh.extent(part.axes) == 0
            parts.append(Part(2 * ranks if part.axes and even else 2 * ranks + 1 if part.axes else 3, part.axes))
        if cut.parts:
            parted[rule.sizes[factor]] = tuple(parts)
        else:
            size = rule.sizes[factor]
            need[size] = math.lcm(need.get(size, 1), few.extent(cut.axes))
            if size % mesh.extent(cut.axes):
                uneven.add(size)
    small: dict[int, int] = {}
    for number, size in enumerate(sorted(set(rule.sizes.values()))):
        if size in parted:
            small[size] = math.prod(part.size for part in parted[size])
        elif size in need:
            small[size] = (2 * need[size] + 1 if size in uneven else need[size] * (2 + number)) if size > 1 else 1
        else:
            small[size] = size if size <= KEPT else KEPT + 1 + number
    sizes = {factor: small[size] for factor, size in rule.sizes.items()}
    found = {}
    for factor, cut in cuts.items():
        known = parted[rule.sizes[factor]] if cut.parts else ()
        if len(known) == len(cut.parts):  # another factor of this size may be cut over other axes
            known = tuple(Part(each.size, part.axes) for each, part in zip(known, cut.parts, strict=True))
        found[factor] = Cut(cut.axes, known) if cut.parts else cut
    return sizes, found


def _rows(cuts: Mapping[str, Cut], sizes: Mapping[str, int]) -> dict[str, Cut]:
    """Rows that overlap, of the small sizes: as many beside a rank's own as there were, and one at least."""
    found = dict(cuts)
    for factor, cut in cuts.items():
        if cut.rows is not None:
            low, high = (end // max(abs(cut.rows.step), cut.rows.per) for end in (cut.rows.low, cut.rows.high))
            found[factor] = Cut(cut.axes, rows=Window(sizes[factor], 1, 1, min(low, -1), max(high, 1)))
    return found


def _seen(rule: ShardingRule, cuts: Mapping[str, Cut], mesh: Mesh, few: Mesh) -> dict[str, int]:
    """Small sizes for factors that see others through windows, and for these: as many rows less as the one has, the
    other has less by the window's step; so that what is left over at the end stays what it is."""
    groups: dict[tuple[int, int], list[str]] = {}
    for factor, (leader, _) in rule.windows.items():
        groups.setdefault((rule.sizes[leader], rule.sizes[factor]), []).append(factor)
    found: dict[str, int] = {}
    for (size, other), factors in groups.items():
        seen = [rule.windows[factor] for factor in factors]
        window = seen[0].window
        per = math.gcd(window.step, window.per)
        step, each = abs(window.step) // per, window.per // per
        cut = [cuts[leader].axes for leader, _ in seen if leader in cuts]
        ranks = math.lcm(*(few.extent(axes) for axes in cut))
        even = all(size % mesh.extent(axes) == 0 for axes in cut)
        times = max(min((size - max(ROWS, 2 * ranks)) // each, (other - ROWS) // step), 0)
        while times > 0 and even is not ((size - times * each) % ranks == 0):
            times -= 1
        found |= {leader: size - times * each for leader, _ in seen}
        found |= dict.fromkeys(factors, other - times * step)
    return found


def _ways(node: Node, rule: ShardingRule, sizes: Mapping[str, int]) -> Iterator[dict[int, int]]:
    """Maps from the node's sizes to small ones: those that are factors too, or those of dims alone."""
    dims: dict[int, int] = {}
    results = [dims for dims in rule.results if dims is not None]
    values = (*node.operands, *node.outs)
    for value, places in zip(values, (*rule.operands, *results), strict=True):
        for size, factors in zip(value.shape, places, strict=True):
            if dims.setdefault(size, math.prod(sizes[f] for f in factors)) != math.prod(sizes[f] for f in factors):
                return
    yield {**{rule.sizes[f]: small for f, small in sizes.items()}, **dims}
    yield dims


def _made(node: Node, sizes: Mapping[int, int]) -> Instance | None:
    """The instance of a node in other sizes, on the first values that it takes; None if it gives other shapes."""
    draw = torch.Generator().manual_seed(0)

    def number(arg: Any) -> Any:
        if isinstance(arg, (list, tuple)):
            return type(arg)(number(a) for a in arg) if type(arg) in (list, tuple) else [number(a) for a in arg]
        return sizes.get(arg, arg) if isinstance(arg, int) and not isinstance(arg, bool) and arg > 1 else arg

    def attempt(floats: Draw, dtype: torch.dtype | None) -> Instance | None:
        def tensor(value: Value) -> torch.Tensor:
            shape = tuple(sizes.get(s, s) for s in value.shape)
            kind = value.type.dtype
            if kind.is_floating_point or kind.is_complex:
                return of_dtype(floats, shape, dtype if dtype is not None and kind.is_floating_point else kind, draw)
            return torch.randint(0, 2, shape, generator=draw).to(kind)

        args = substitute(tuple(number(arg) for arg in node.args), tensor)
        kwargs = {k: substitute(number(a), tensor) for k, a in node.kwargs.items()}
        try:
            made = instance(node.op, args, kwargs)
        except Exception:  # whatever the op says of its arguments
            return None
        return made if _fits(made, node, sizes) else None

    for dtype in (torch.float64, None):
        for floats in (FLOATS[0], FLOATS[-1]):
            made = attempt(floats, dtype)
            if made is not None:
                return made
    return None


def _fits(made: Instance, node: Node, sizes: Mapping[int, int]) -> bool:
    """Whether the results have the shapes of the node's, in the small sizes; leaves out those that the node does."""
    if len(made.results) != len(node.results):
        return False
    for result, value in zip(made.results, node.results, strict=True):
        if value is None:
            continue
        if result is None or result.is_meta or tuple(result.shape) != tuple(sizes.get(s, s) for s in value.shape):
            return False
        if result.is_floating_point() and bool(result.isnan().any()):
            return False
    for value, wanted in zip(made.node.results, node.results, strict=True):
        if wanted is None and value is not None:
            made.node.results[value.index] = None
    return True
