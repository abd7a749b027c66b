"""Shrinking of nodes to small shapes on which they can be executed: the same ops, shardings and relations of sizes.

    mm(f32[8192, 4096], f32[4096, 1024])  m{dp} n{tp} on dp=64, tp=8
    mm(f64[4, 7], f64[7, 2])              m{dp} n{tp} on dp=2, tp=2

- :func:`small_instance`: a node without a rule. Equal sizes stay equal, multiples stay multiples.
- :func:`small_share`: a planned node. The factor sizes of its rule are made small: even shardings stay even, uneven
ones uneven, and a compound dim is sharded in the same sub-dims.

Numbers among the arguments follow if they are sizes. The result is executed, and rejected if its shapes do not match.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from shardfx.ir.dim_sharding import DimSharding, Part, Window
from shardfx.ir.graph import Node, Strategy, Value, substitute
from shardfx.ir.mesh import Mesh
from shardfx.ir.rules.book import RuleEntry
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.rules.strategy import factor_shardings, partial_operands, strategy
from shardfx.ir.rules.template import argument

from .draws import both_signs, of_dtype, positive
from .instance import Instance, instance, keep_results, numbers

aten = torch.ops.aten
KEPT = 5
"""The largest size that is never shrunk: such sizes may have a meaning (three colours, two halves)."""
SAME_RATIO = 4
LARGEST = 400
MOST_ELEMENTS = 50_000
MOST_RANKS = 8
ROWS = 6
"""The minimum number of rows of windowed dims."""
SizeMap = Mapping[int, int]
Shapes = Mapping[Value, tuple[int, ...]]


# ---- nodes -----------------------------------------------------------------------------------------------------------


def small_instance(node: Node) -> Instance | None:
    """A small instance of a node on random values, or None if there is none that behaves like the node."""
    for sizes in _ways_by_multiples(node):
        if sum(math.prod(sizes.get(s, s) for s in v.shape) for v in (*node.operands, *node.outs)) <= MOST_ELEMENTS:
            made = _resized(node, sizes, exact=True)
            if made is not None:
                return made
    return None


def _ways_by_multiples(node: Node) -> Iterator[SizeMap]:
    """Candidate maps from the node's sizes to small ones, the most faithful first."""
    sizes = {s for value in node.operands for s in value.shape}
    integers = {n for n in numbers((node.args, *node.kwargs.values())) if isinstance(n, int) and n > 1}
    divisors = {n for n in integers if n in sizes or any(s % n == 0 for s in sizes)}
    for free, fixed in ((sizes | divisors, set()), (sizes - divisors, divisors)):
        found = small_sizes(free, fixed)
        if found is not None:
            yield found
    yield {s: min(s, KEPT + 1 + i) for i, s in enumerate(sorted(s for s in sizes if s > KEPT))}
    yield {}


def small_sizes(sizes: Iterable[int], fixed: Iterable[int] = ()) -> dict[int, int] | None:
    """Map sizes to small ones, so that one divides another where it did; None if there are none up to LARGEST.

    Example::

        small_sizes([3, 64, 1024, 3072])    # {3: 3, 64: 7, 1024: 14, 3072: 42}
    """
    found = {s: s for s in fixed}
    for size in sorted(set(sizes) - set(found)):
        least = max([KEPT, *(small for s, small in found.items() if s < size and s not in fixed)])
        options = (size,) if size <= KEPT else range(least + 1, min(size, LARGEST) + 1)
        small = next((o for o in options if _same_multiples(size, o, found)), None)
        if small is None:
            return None
        found[size] = small
    return found


def _same_multiples(size: int, small: int, found: SizeMap) -> bool:
    """Whether ``small`` has the same multiples and divisors among the small sizes as ``size`` among the originals."""
    for other, other_small in found.items():
        if other < 2 or other > size:
            continue
        divides = size % other == 0
        if divides != (small % other_small == 0):
            return False
        if divides and size // other <= SAME_RATIO and size // other != small // other_small:
            return False
    return True


def _resized(node: Node, sizes: SizeMap, exact: bool = False, shapes: Shapes | None = None) -> Instance | None:
    """The instance of a node in other sizes, on the first values that it accepts; None if its shapes do not match.

    Args:
        shapes: of operands and results, where dims of one size become different ones; by ``sizes`` by default.
        exact: require high precision and non-zero results, which tell a right sharding from one that is off by little.
    """
    draw = torch.Generator().manual_seed(0)

    def number(arg: Any) -> Any:
        return pytree.tree_map_only(int, lambda n: sizes.get(n, n) if n > 1 else n, arg)

    for dtype, floats in itertools.product((torch.float64, None), (both_signs, positive)):
        if dtype is None and exact and any(_is_coarse(value.type.dtype) for value in node.operands):
            return None

        def tensor(value: Value, floats: Any = floats, dtype: torch.dtype | None = dtype) -> torch.Tensor:
            shape = shapes[value] if shapes else tuple(sizes.get(s, s) for s in value.shape)
            kind = value.type.dtype
            if kind.is_floating_point or kind.is_complex:
                return of_dtype(floats, shape, dtype if dtype is not None and kind.is_floating_point else kind, draw)
            return torch.randint(0, 2, shape, generator=draw).to(kind)

        args = tuple(substitute(number(arg), tensor) for arg in node.args)
        try:
            made = instance(node.op, args, {k: substitute(number(a), tensor) for k, a in node.kwargs.items()})
        except Exception:  # whatever the op says of its arguments
            continue
        if _fits(made, node, sizes, exact, shapes):
            keep_results(made.node, node)
            return made
    return None


def _is_coarse(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and torch.finfo(dtype).eps > 1e-5


def _fits(made: Instance, node: Node, sizes: SizeMap, exact: bool, shapes: Shapes | None) -> bool:
    """Whether the results have the node's shapes, in small sizes, and no NaN (``exact``: no infinity, not all zero)."""
    if len(made.results) != len(node.results):
        return False
    known = dict(sizes)
    for result, value in zip(made.results, node.results, strict=True):
        if value is None:
            continue
        if result is None or result.is_meta or result.dim() != value.type.ndim:
            return False  # on meta: an op whose own arguments say so has no numbers to look at
        if shapes and shapes[value] != result.shape:
            return False
        if not shapes and any(known.setdefault(s, n) != n for s, n in zip(value.shape, result.shape, strict=True)):
            return False
        if result.is_floating_point():
            if exact and not (bool(torch.isfinite(result).all()) and bool((result != 0).any())):
                return False
            if bool(result.isnan().any()):
                return False
    return True


# ---- planned nodes ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SmallShare:
    """A small instance of a planned node, with its strategy on a small mesh."""

    of: Instance
    made: Strategy
    mesh: Mesh
    as_it_stands: bool
    """Whether shapes and shardings are those of the plan, not shrunk."""


def small_share(node: Node, entry: RuleEntry, mesh: Mesh) -> SmallShare | None:
    """A planned node on small shapes and few ranks, or None if there is none that behaves like the node."""
    rule = entry.make(node)
    if rule is None or node.strategy is None:
        return None
    used = used_axes(node.strategy)
    if mesh.extent(used) <= MOST_RANKS and _elements(node) <= MOST_ELEMENTS:
        of = _resized(node, {s: s for v in (*node.operands, *node.outs) for s in v.shape})
        if of is not None:
            return SmallShare(of, node.strategy, _small_mesh(mesh, used, mesh.size), True)
    few = _small_mesh(mesh, used, 2)
    shardings = factor_shardings(rule, node, mesh)
    sizes, small_shardings = _factor_sizes(rule, shardings, mesh, few)
    sizes |= _window_sizes(rule, shardings, mesh, few)
    for factor, sharding in shardings.items():
        if sharding.rows is not None:  # as many rows beside a rank's own as there were, and one at least
            low, high = (
                end // max(abs(sharding.rows.step), sharding.rows.per)
                for end in (sharding.rows.low, sharding.rows.high)
            )
            small_shardings[factor] = DimSharding(
                sharding.axes, rows=Window(sizes[factor], 1, 1, min(low, -1), max(high, 1))
            )
    for found, shapes in _ways_by_factors(node, rule, sizes):
        of = _resized(node, found, shapes=shapes)
        if of is None or _elements(of.node) > MOST_ELEMENTS:
            continue
        own = entry.make(of.node)
        if own is not None and all(own.sizes.get(f) == sizes[f] for f in shardings):
            return SmallShare(of, strategy(own, small_shardings, few, partial_operands(node.strategy)), few, False)
    return None


def used_axes(made: Strategy) -> tuple[str, ...]:
    """The axes of a strategy's shardings and partial sums."""
    specs = (*made.operands, *made.results)
    return tuple(dict.fromkeys(a for spec in specs for a in (*spec.axes, *spec.partial_axes)))


def _small_mesh(mesh: Mesh, used: Sequence[str], most: int) -> Mesh:
    return Mesh(links=None, **{axis.name: min(axis.size, most) for axis in mesh.axes if axis.name in used})


def _elements(node: Node) -> int:
    return sum(math.prod(value.shape) for value in (*node.operands, *node.outs))


def _factor_sizes(
    rule: ShardingRule, shardings: Mapping[str, DimSharding], mesh: Mesh, few: Mesh
) -> tuple[dict[str, int], dict[str, DimSharding]]:
    """Small sizes of all factors, equal for those of equal size, and their shardings."""
    need: dict[int, int] = {}
    uneven: set[int] = set()
    parted: dict[int, tuple[Part, ...]] = {}
    for factor, sharding in shardings.items():
        size = rule.sizes[factor]
        parts = []
        for part in sharding.sub(size):
            ranks, even = few.extent(part.axes), part.size % mesh.extent(part.axes) == 0
            parts.append(Part((2 * ranks if even else 2 * ranks + 1) if part.axes else 3, part.axes))
        if sharding.parts:
            parted[size] = tuple(parts)
            continue
        need[size] = math.lcm(need.get(size, 1), few.extent(sharding.axes))
        if size % mesh.extent(sharding.axes):
            uneven.add(size)
    small: dict[int, int] = {}
    for number, size in enumerate(sorted(set(rule.sizes.values()))):
        if size in parted:
            small[size] = math.prod(part.size for part in parted[size])
        elif size in need:
            small[size] = (2 * need[size] + 1 if size in uneven else need[size] * (2 + number)) if size > 1 else 1
        else:
            small[size] = size if size <= KEPT else KEPT + 1 + number
    found = {}
    for factor, sharding in shardings.items():
        known = parted[rule.sizes[factor]] if sharding.parts else ()
        if len(known) == len(sharding.parts):  # another factor of this size may be sharded over other axes
            known = tuple(Part(each.size, part.axes) for each, part in zip(known, sharding.parts, strict=True))
        found[factor] = DimSharding(sharding.axes, known) if sharding.parts else sharding
    return {factor: small[size] for factor, size in rule.sizes.items()}, found


def _window_sizes(rule: ShardingRule, shardings: Mapping[str, DimSharding], mesh: Mesh, few: Mesh) -> dict[str, int]:
    """Small sizes of windowed factors and of their leaders: the leader shrinks by as many rows as the other does, times
    the window's step; so that the remainder at the end is unchanged."""
    groups: dict[tuple[int, int], list[str]] = {}
    for factor, (leader, _) in rule.windows.items():
        groups.setdefault((rule.sizes[leader], rule.sizes[factor]), []).append(factor)
    found: dict[str, int] = {}
    for (size, other), factors in groups.items():
        seen = [rule.windows[factor] for factor in factors]
        window = seen[0].window
        per = math.gcd(window.step, window.per)
        step, each = abs(window.step) // per, window.per // per
        axes = [shardings[leader].axes for leader, _ in seen if leader in shardings]
        ranks = math.lcm(*map(few.extent, axes))
        even = all(size % mesh.extent(each) == 0 for each in axes)
        times = max(min((size - max(ROWS, 2 * ranks)) // each, (other - ROWS) // step), 0)
        while times > 0 and even is not ((size - times * each) % ranks == 0):
            times -= 1
        found |= {leader: size - times * each for leader, _ in seen}
        found |= dict.fromkeys(factors, other - times * step)
    return found


def _ways_by_factors(node: Node, rule: ShardingRule, sizes: Mapping[str, int]) -> Iterator[tuple[SizeMap, Shapes]]:
    """Candidate maps from the node's sizes to small ones (of factors and dims, or of dims alone), and its small shapes.

    Dims of one size may become different ones (64 samples, 64 heads of 8 groups) if no argument is that size.
    """
    shapes: dict[Value, tuple[int, ...]] = {}
    dims: dict[int, set[int]] = {}
    places = (*rule.operands, *(dims for dims in rule.results if dims is not None))
    for value, factors_of in zip((*node.operands, *node.outs), places, strict=True):
        shape = tuple(math.prod(sizes[f] for f in factors) for factors in factors_of)
        if shapes.setdefault(value, shape) != shape:
            return
        for size, small in zip(value.shape, shape, strict=True):
            dims.setdefault(size, set()).add(small)
    ambiguous = {size for size, small in dims.items() if len(small) > 1}
    if ambiguous.intersection(numbers((node.args, *node.kwargs.values()))):
        return
    of_dims = {size: min(small) for size, small in dims.items()}
    of_dims |= dict.fromkeys(argument(node, "window") or (), 1)  # of keys that are seen, among few
    yield {**{rule.sizes[f]: small for f, small in sizes.items()}, **of_dims}, shapes
    yield of_dims, shapes
