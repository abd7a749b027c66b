"""Smaller shapes for nodes and plans, on which they can be executed: the same ops, shardings and relations of sizes.

    mm(f32[8192, 4096], f32[4096, 1024])  m{dp} n{tp} on dp=64, tp=8
    mm(f64[4, 7], f64[7, 2])              m{dp} n{tp} on dp=2, tp=2

- :func:`small_instance`: a node without a rule. Equal sizes stay equal, multiples stay multiples.
- :func:`small_share`: a planned node. The sizes of its rule's factors are made small: what is sharded evenly stays a
  multiple of its ranks, what is not stays none, a compound dim is sharded in the same sub-dims.
- :func:`shrink_plan`: whole graphs. Dims that some op's rule relates have one size, or one is the product of others.

Numbers among the arguments follow where they are sizes. What comes out is run: where it does not fit, it is rejected.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from networkx.utils import UnionFind

from shardfx.ir.builder import makes_of_nothing
from shardfx.ir.dim_sharding import DimSharding, Part, Window
from shardfx.ir.errors import DOES_NOT_RUN
from shardfx.ir.graph import Graph, InputKind, Node, Strategy, Value, substitute
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.table import OwnOp, carried
from shardfx.ir.rules.book import RuleBook, RuleEntry
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.rules.strategy import factor_shardings, partial_operands, strategy
from shardfx.ir.spec import Spec, TensorType

from .draws import both_signs, of_dtype, positive
from .instance import Instance, instance, keep_results, numbers

aten = torch.ops.aten
KEPT = 5
"""Sizes up to this stay as they are: they may mean something (three colours, two halves)."""
SAME_RATIO = 4
LARGEST = 400
MOST_ELEMENTS = 20_000
MOST_RANKS = 8
ROWS = 6
"""Dims that are seen through windows keep so many rows at least."""
SizeMap = Mapping[int, int]


# ---- nodes -----------------------------------------------------------------------------------------------------------


def small_instance(node: Node) -> Instance | None:
    """A small instance of a node on random values, or None if there is none that behaves as the node does."""
    for sizes in _ways_by_multiples(node):
        if sum(math.prod(sizes.get(s, s) for s in v.shape) for v in (*node.operands, *node.outs)) <= MOST_ELEMENTS:
            made = _resized(node, sizes, exact=True)
            if made is not None:
                return made
    return None


def _ways_by_multiples(node: Node) -> Iterator[SizeMap]:
    """Maps from the node's sizes to small ones, the most faithful first."""
    sizes = {s for value in node.operands for s in value.shape}
    given = {n for n in numbers((node.args, *node.kwargs.values())) if isinstance(n, int) and n > 1}
    divisors = {n for n in given if n in sizes or any(s % n == 0 for s in sizes)}
    for free, fixed in ((sizes | divisors, set()), (sizes - divisors, divisors)):
        found = small_sizes(free, fixed)
        if found is not None:
            yield found
    yield {s: min(s, KEPT + 1 + i) for i, s in enumerate(sorted(s for s in sizes if s > KEPT))}
    yield {}


def small_sizes(sizes: Iterable[int], fixed: Iterable[int] = ()) -> dict[int, int] | None:
    """For each size a small one, so that one divides another where it did; None if there are none below LARGEST.

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
    """Whether ``small`` is a multiple of the other small sizes as ``size`` is of the others."""
    for other, other_small in found.items():
        if other < 2 or other > size:
            continue
        divides = size % other == 0
        if divides != (small % other_small == 0):
            return False
        if divides and size // other <= SAME_RATIO and size // other != small // other_small:
            return False
    return True


def _resized(node: Node, sizes: SizeMap, exact: bool = False) -> Instance | None:
    """The instance of a node in other sizes, on the first values that it takes; None if it gives other shapes.

    Args:
        exact: with digits, and numbers among the results, that tell a right sharding from one that is off by little.
    """
    draw = torch.Generator().manual_seed(0)

    def number(arg: Any) -> Any:
        if isinstance(arg, (list, tuple)):
            return type(arg)(number(a) for a in arg) if type(arg) in (list, tuple) else [number(a) for a in arg]
        return sizes.get(arg, arg) if isinstance(arg, int) and not isinstance(arg, bool) and arg > 1 else arg

    for dtype, floats in itertools.product((torch.float64, None), (both_signs, positive)):
        if dtype is None and exact and any(_is_coarse(value.type.dtype) for value in node.operands):
            return None

        def tensor(value: Value, floats: Any = floats, dtype: torch.dtype | None = dtype) -> torch.Tensor:
            shape, kind = tuple(sizes.get(s, s) for s in value.shape), value.type.dtype
            if kind.is_floating_point or kind.is_complex:
                return of_dtype(floats, shape, dtype if dtype is not None and kind.is_floating_point else kind, draw)
            return torch.randint(0, 2, shape, generator=draw).to(kind)

        args = tuple(substitute(number(arg), tensor) for arg in node.args)
        try:
            made = instance(node.op, args, {k: substitute(number(a), tensor) for k, a in node.kwargs.items()})
        except Exception:  # whatever the op says of its arguments
            continue
        if _fits(made, node, sizes, exact):
            keep_results(made.node, node)
            return made
    return None


def _is_coarse(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and torch.finfo(dtype).eps > 1e-5


def _fits(made: Instance, node: Node, sizes: SizeMap, exact: bool) -> bool:
    """Whether the results have the shapes of the node's, in the small sizes, and no NaN or zeros that hide a fault."""
    if len(made.results) != len(node.results):
        return False
    known = dict(sizes)
    for result, value in zip(made.results, node.results, strict=True):
        if value is None:
            continue
        if result is None or result.is_meta or result.dim() != value.type.ndim:
            return False  # on meta: an op whose own arguments say so has no numbers to look at
        if any(known.setdefault(s, small) != small for s, small in zip(value.shape, result.shape, strict=True)):
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
    """An instance, and the strategy by which it is to be computed on a mesh."""

    of: Instance
    made: Strategy
    mesh: Mesh
    as_it_stands: bool
    """Whether shapes and ranks are those of the plan."""


def small_share(node: Node, entry: RuleEntry, mesh: Mesh) -> SmallShare | None:
    """A planned node on small shapes and few ranks, or None if there is none that behaves as the node does."""
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
    for found in _ways_by_factors(node, rule, sizes):
        of = _resized(node, found)
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
    """A small size for every factor, equal ones for equal ones, and their shardings."""
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
        axes = [shardings[leader].axes for leader, _ in seen if leader in shardings]
        ranks = math.lcm(*map(few.extent, axes))
        even = all(size % mesh.extent(each) == 0 for each in axes)
        times = max(min((size - max(ROWS, 2 * ranks)) // each, (other - ROWS) // step), 0)
        while times > 0 and even is not ((size - times * each) % ranks == 0):
            times -= 1
        found |= {leader: size - times * each for leader, _ in seen}
        found |= dict.fromkeys(factors, other - times * step)
    return found


def _ways_by_factors(node: Node, rule: ShardingRule, sizes: Mapping[str, int]) -> Iterator[dict[int, int]]:
    """Maps from the node's sizes to small ones: those that are factors too, or those of dims alone."""
    dims: dict[int, int] = {}
    places = (*rule.operands, *(dims for dims in rule.results if dims is not None))
    for value, factors_of in zip((*node.operands, *node.outs), places, strict=True):
        for size, factors in zip(value.shape, factors_of, strict=True):
            small = math.prod(sizes[f] for f in factors)
            if dims.setdefault(size, small) != small:
                return
    yield {**{rule.sizes[f]: small for f, small in sizes.items()}, **dims}
    yield dims


# ---- plans -----------------------------------------------------------------------------------------------------------

FREE_SIZES = (4, 6, 10)
"""Sizes of dims that nothing shards: different, so that one is not taken for another."""
TRIES = 40
TRIED_ON_META = 1 << 20
"""An op on more elements is tried on ``meta``."""
INDEXING = {aten.index.Tensor, aten.gather.default, aten.index_select.default}
"""Ops that move elements to where other tensors say, not their arguments."""
Key = Any


@dataclass(frozen=True)
class SmallPlan:
    """A plan on small shapes, and how many sizes were made smaller."""

    before: Graph
    after: Graph
    sizes: int

    def known(self, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Of tensors that are known by content, those that the small plan can use: indices may be too large for it."""
        shapes = {g.name: g.value.shape for g in self.after.of_kind(InputKind.BUFFER)}
        return {name: t for name, t in stored.items() if shapes.get(name) == tuple(t.shape)}


def shrink_plan(before: Graph, after: Graph, book: RuleBook) -> SmallPlan | None:
    """The plan on small shapes, or None where no size can be made smaller.

    Each size that is no product becomes as small as its sharding allows, two elements a rank. Kept as they are: dims
    that an op slices by its arguments (half of a head for rotary positions), dims of constants, uneven shardings. Where
    an op does not fit, sizes that were equal stay equal, or stay what they were, and the rest is solved again.
    """
    sizes = DimSizes(book)
    for graph in (before, after):
        sizes.relate(graph)
        sizes.kept.update(key for g in graph.of_kind(InputKind.CONSTANT) for key in sizes.dims(g.value))
    for old, new in ((before.inputs, after.inputs), (before.outputs, after.outputs)):
        twins = {(each.kind, each.name): each.value for each in new}
        for each in old:
            if (each.kind, each.name) in twins:
                sizes.unite_all(sizes.dims(each.value), sizes.dims(twins[each.kind, each.name]))
    for _ in range(TRIES):
        try:
            sizes.solve(after)
            small = [sizes.graph(each) for each in (before, after)]
        except Unfit as unfit:
            if not sizes.restrict(unfit.keys):
                return None
            continue
        smaller = {leaf for leaf, size in sizes.new.items() if size < sizes.size[leaf]}
        return SmallPlan(small[0], small[1], len(smaller)) if smaller else None
    return None


@dataclass
class Unfit(Exception):
    """Dims that have to keep their sizes."""

    keys: list[Key]


@dataclass
class DimSizes:
    """The sizes of all dims of some graphs, as equations."""

    book: RuleBook
    size: dict[Key, int] = field(default_factory=dict)
    kept: set[Key] = field(default_factory=set)
    new: dict[Key, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        equal = UnionFind()
        self.find: Callable[[Key], Key] = equal.__getitem__
        self.unite: Callable[[Key, Key], None] = equal.union
        self.products: dict[Key, tuple[Key, ...]] = {}
        self.sums: list[tuple[Key, tuple[Key, ...]]] = []
        self._sum_of: dict[Key, tuple[Key, ...]] = {}
        self._product_of: dict[Key, tuple[Key, ...]] = {}

    def unite_all(self, a: Iterable[Key], b: Iterable[Key]) -> None:
        """Let sizes be equal, one by one."""
        for x, y in zip(a, b, strict=True):
            self.unite(x, y)

    def dims(self, value: Value) -> list[Key]:
        """The sizes of a value's dims, known from here on."""
        found = [(value, d) for d in range(value.type.ndim)]
        self.size.update(zip(found, value.shape, strict=True))
        return found

    # ---- equations ----

    def relate(self, graph: Graph) -> None:
        """Take in what the ops of a graph say of the sizes of its dims."""
        for value in graph.values():
            self.dims(value)
        for node in graph.nodes:
            if isinstance(node.op, OwnOp):
                for a, b in carried(node):
                    self.unite_all(self.dims(a), self.dims(b))
            else:
                self._rule(node)

    def _rule(self, node: Node) -> None:
        entry = self.book.entry(node.op)
        rule = entry.make(node) if entry is not None else None
        tensors = [*node.operands, *node.outs]
        if rule is None:
            self.kept.update(key for v in tensors for key in self.dims(v))
            return
        self.size.update(((node, f), size) for f, size in rule.sizes.items())
        kept: set[Key] = {(node, f) for f in rule.windows.keys() | rule.leaders}
        places = [*rule.operands, *(dims for dims in rule.results if dims is not None)]
        for value, dims in zip(tensors, places, strict=True):
            for key, dim in zip(self.dims(value), dims, strict=True):
                factors = [(node, f) for f in dim]
                if len(factors) == 1 and self.size[key] == self.size[factors[0]]:
                    self.unite(key, factors[0])
                elif len(factors) > 1:
                    self.products[key] = tuple(factors)
                if rule.moves_only and node.op not in INDEXING and any(f in rule.whole for f in dim):
                    kept.update([key, *factors])
        if node.op in INDEXING:  # what is looked up must be there: a dim and the dims that count it stay equal
            for key in self.dims(node.operands[0]):
                for other in (other for v in tensors[1:] for other in self.dims(v)):
                    if self.size[key] == self.size[other] > 1:
                        self.unite(key, other)
        for key, parts in self._sums_of(node) if kept else ():
            rest = [part for part in parts if part[0] == "rest"]
            self.size.update((part, part[1]) for part in rest)
            self.kept.update(rest)
            self.sums.append((key, parts))
            kept.clear()
        if node.op is aten.slice.Tensor and all(
            a == b or b == 1 for a, b in zip(node.operands[0].shape, node.outs[0].shape, strict=True)
        ):
            kept.clear()  # one row of many: many may be fewer
        self.kept |= kept

    def _sums_of(self, node: Node) -> Iterator[tuple[Key, tuple[Key, ...]]]:
        """The dims that are the sum of others: what is concatenated, and what a slice leaves little of."""
        if node.op is aten.cat.default:
            dim = (node.args[1] if len(node.args) > 1 else 0) % node.outs[0].type.ndim
            parts = [(v, dim) for v in node.operands if v.type.ndim == node.outs[0].type.ndim]
            small = [key for key in parts if self.size[key] <= max(FREE_SIZES)]
            if len(small) == len(parts) - 1:
                yield (node.outs[0], dim), tuple(("rest", self.size[k]) if k in small else k for k in parts)
        elif node.op is aten.slice.Tensor:
            given, made = node.operands[0], node.outs[0]
            for dim, (a, b) in enumerate(zip(given.shape, made.shape, strict=True)):
                if 0 < a - b <= max(FREE_SIZES):
                    yield (given, dim), ((made, dim), ("rest", a - b))

    # ---- solving ----

    def leaves(self, key: Key, depth: int = 0) -> list[Key]:
        """The sizes whose product a size is, major first."""
        root = self.find(key)
        parts = self._product_of.get(root)
        if parts is None or depth > 8:
            return [root]
        return [leaf for part in parts for leaf in self.leaves(part, depth + 1)]

    def _settle(self) -> None:
        """One product for each size: products of one size are aligned, part by part; then one sum for each size."""
        products = [(key, tuple(p for p in parts if self.size[p] > 1)) for key, parts in self.products.items()]
        changed = True
        while changed:
            changed, self._product_of = False, {}
            for key, parts in list(products):
                root = self.find(key)
                if root in map(self.find, parts):
                    continue
                if len(parts) == 1:
                    self.unite(root, parts[0])
                    changed = True
                    continue
                for a, b in _aligned(self._product_of.setdefault(root, parts), parts, self.size):
                    if len(a) == len(b) == 1 and self.find(a[0]) != self.find(b[0]):
                        self.unite(a[0], b[0])
                        changed = True
                    elif len(a) != len(b) and min(len(a), len(b)) == 1:
                        more = (a[0], b) if len(a) == 1 else (b[0], a)
                        if more not in products:
                            products.append(more)
                            changed = True
        changed = True
        while changed:
            changed, self._sum_of = False, {}
            for key, parts in self.sums:
                known = self._sum_of.setdefault(self.find(key), parts)
                left = [p for p in parts if not any(self._same(p, q) for q in known)]
                other = [q for q in known if not any(self._same(p, q) for p in parts)]
                if len(left) == len(other) == 1 and self.size[left[0]] == self.size[other[0]]:
                    self.unite(left[0], other[0])
                    changed = True

    def _same(self, a: Key, b: Key) -> bool:
        return self.find(a) == self.find(b) or self.size[a] == self.size[b] == 1

    def solve(self, graph: Graph) -> None:
        """Find the new sizes of a graph's dims.

        Raises:
            Unfit: a product and its factors do not come out equal, or a sharding does not fit the sub-dims.
        """
        self._settle()
        kept = {leaf for key in self.kept for leaf in self.leaves(key)}
        extents: dict[Key, int] = {}
        for value in graph.values():
            for key, sharding in zip(self.dims(value), value.spec.dims if value.spec else (), strict=False):
                for part, leaves in self.parts(key, sharding):
                    extent = graph.mesh.extent(part.axes)
                    for leaf in leaves if extent > 1 else ():
                        share = math.gcd(extent, self.size[leaf])
                        extents[leaf] = math.lcm(extents.get(leaf, 1), share)
                        extent //= share
                    if extent > 1:
                        kept.update(leaves)
        kept -= set(self._sum_of)
        free = itertools.cycle(FREE_SIZES)
        self.new = {}
        for leaf in {self.find(k): None for k in self.size}:
            size = self.size[leaf]
            wanted = 2 * extents[leaf] if leaf in extents else next(free) if size > min(FREE_SIZES) else size
            self.new[leaf] = size if leaf in kept else min(size, wanted)
        for leaf in {self.find(key): None for key in self._sum_of}:
            self.new[leaf] = sum(self.of(part) for part in self._sum_of[leaf])
        for key, parts in self.products.items():
            if self.of(key) != math.prod(map(self.of, parts)):
                raise Unfit([key, *parts])

    def of(self, key: Key) -> int:
        """The new size."""
        return math.prod(self.new[leaf] for leaf in self.leaves(key))

    def parts(self, key: Key, sharding: DimSharding) -> Iterator[tuple[Part, list[Key]]]:
        """The sub-dims of a sharded dim, each with the sizes whose product it is."""
        parts = sharding.sub(self.size[key])
        yield from zip(parts, self.grouped([p.size for p in parts], [key]), strict=True)

    def grouped(self, sizes: Sequence[int], keys: Sequence[Key]) -> list[list[Key]]:
        """The leaves of some sizes, in groups of given products."""
        leaves = [leaf for key in keys for leaf in self.leaves(key) if self.size[leaf] > 1]
        found, at = [], 0
        for size in sizes:
            group: list[Key] = []
            while math.prod(self.size[leaf] for leaf in group) < size and at < len(leaves):
                group.append(leaves[at])
                at += 1
            if math.prod(self.size[leaf] for leaf in group) != size:
                raise Unfit(leaves)
            found.append(group)
        return found

    def restrict(self, keys: Sequence[Key]) -> bool:
        """Let sizes that were equal stay equal; or else stay what they are. False: they do already."""
        first: dict[int, Key] = {}
        united = False
        for key in keys:
            other = first.setdefault(self.size[key], key)
            if self.size[key] > 1 and self.find(key) != self.find(other) and self.of(key) != self.of(other):
                self.unite(key, other)
                united = True
        more = {*keys, *(leaf for key in keys for leaf in self.leaves(key))} - self.kept
        if not united:
            self.kept |= more
        return united or bool(more)

    # ---- graphs in the new sizes ----

    def graph(self, graph: Graph) -> Graph:
        """The graph in the new sizes."""
        made = graph.copy()
        for old, new in zip(graph.values(), made.values(), strict=True):
            new.type = TensorType(tuple(map(self.of, self.dims(old))), old.type.dtype)
            new.spec = None if old.spec is None else self._spec(old, old.spec)
        for node, twin in zip(graph.nodes, made.nodes, strict=True):
            if node.strategy is not None:
                operands, results = (
                    tuple(map(self._spec, values, specs))
                    for values, specs in ((node.operands, node.strategy.operands), (node.outs, node.strategy.results))
                )
                twin.strategy = type(node.strategy)(operands, results, node.strategy.shardings)
            if not isinstance(node.op, OwnOp):
                self._arguments(node, twin)
            elif "view" in node.kwargs:
                groups = self.grouped(node.kwargs["view"], self.dims(node.operands[0]))
                view = tuple(math.prod(map(self.of, group)) for group in groups)
                twin.kwargs = {**twin.kwargs, "view": type(node.kwargs["view"])(view)}
        return made

    def _spec(self, value: Value, spec: Spec) -> Spec:
        """The placement of a value, with the new sizes of sub-dims."""
        shardings = []
        for key, sharding in zip(self.dims(value), spec.dims, strict=True):
            if sharding.parts:
                parts = [Part(math.prod(map(self.of, leaves)), part.axes) for part, leaves in self.parts(key, sharding)]
                sharding = DimSharding(sharding.axes, tuple(parts))
            shardings.append(sharding)
        return Spec(tuple(shardings), spec.partial)

    def _arguments(self, node: Node, twin: Node) -> None:
        """Arguments that are sizes of dims: where dims of one size get several, those that the op takes."""
        entry = self.book.entry(node.op)
        keys = [key for v in [*node.outs, *node.operands] for key in self.dims(v)]
        options: dict[int, dict[int, None]] = {}
        for key in keys:
            if self.size[key] > 1:
                options.setdefault(self.size[key], {})[self.of(key)] = None
        args, kwargs = twin.args, twin.kwargs
        for chosen in itertools.islice(itertools.product(*options.values()), TRIES):
            change = dict(zip(options, chosen, strict=True))
            twin.args, twin.kwargs = _renumbered(args, change), {k: _renumbered(a, change) for k, a in kwargs.items()}
            at = entry.shape_arg if entry is not None else None
            if at is not None and at < len(node.args):
                twin.args = (*twin.args[:at], list(twin.outs[0].shape), *twin.args[at + 1 :])
            if _runs(twin):
                return
        raise Unfit(keys)


def _aligned(
    a: Sequence[Key], b: Sequence[Key], size: Mapping[Key, int]
) -> Iterator[tuple[tuple[Key, ...], tuple[Key, ...]]]:
    """The parts of two products of one size, in the smallest groups of one size."""
    ends = [list(itertools.accumulate((size[p] for p in parts), lambda x, y: x * y)) for parts in (a, b)]
    at = [0, 0]
    for end in sorted(set(ends[0]) & set(ends[1])):
        to = [each.index(end) + 1 for each in ends]
        yield tuple(a[at[0] : to[0]]), tuple(b[at[1] : to[1]])
        at = to


def _runs(node: Node) -> bool:
    """Whether the op gives results of the shapes that it should: on zeros, and where these are many on ``meta``."""
    device = "cpu" if sum(v.type.numel for v in [*node.operands, *node.outs]) <= TRIED_ON_META else "meta"

    def zeros(value: Value) -> torch.Tensor:
        return torch.zeros(value.shape, dtype=value.type.dtype, device=device)

    op = aten.reshape.default if node.op is aten.view.default else node.op
    kwargs = {k: substitute(a, zeros) for k, a in node.kwargs.items()}
    if makes_of_nothing(op):
        kwargs["device"] = torch.device(device)
    try:
        out = op(*substitute(node.args, zeros), **kwargs)
    except DOES_NOT_RUN:
        return False
    pairs = zip(node.results, out if isinstance(out, (tuple, list)) else [out], strict=False)
    return all(value is None or tuple(result.shape) == value.shape for value, result in pairs)


def _renumbered(arg: Any, sizes: SizeMap) -> Any:
    """An argument with other sizes."""
    if isinstance(arg, (list, tuple)):
        return type(arg)(_renumbered(a, sizes) for a in arg)
    return sizes.get(arg, arg) if isinstance(arg, int) and not isinstance(arg, bool) else arg
