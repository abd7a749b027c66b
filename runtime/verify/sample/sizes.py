"""The same plan with small dims: what a large model is compared on, number by number.

Dims that some op's rule relates have one size (a factor of the rule), or one is the product of others (a view). Each
size that is no product is made as small as its cuts allow, two elements for each rank that shares it, and the sizes of
all values, of sub-dims of compounds, and of arguments that name a size follow. Kept as they are: dims that an op takes
apart by its arguments (half of a head for rotary positions), dims of constants, cuts that are not even. What comes out
is run on zeros: where an op does not fit, sizes that were equal stay equal, or stay what they were, and the rest is
solved again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardfx.ir.cut import Cut, Part
from shardfx.ir.graph import Graph, Node, Value
from shardfx.ir.ops.table import OwnOp, carried
from shardfx.ir.rules.book import RuleBook

aten = torch.ops.aten

SIZES = (4, 6, 10)
"""Sizes of dims that nothing cuts: different, so that one is not taken for another."""
TRIES = 40
BY_VALUE = {aten.index.Tensor, aten.gather.default, aten.index_select.default}
"""Ops that move elements to where other tensors say, not their arguments."""
Key = Any


@dataclass
class Unfit(Exception):
    """What must keep its size."""

    keys: list[Key]


@dataclass
class Sizes:
    """The sizes of all dims of some graphs, as equations."""

    book: RuleBook
    parent: dict[Key, Key] = field(default_factory=dict)
    size: dict[Key, int] = field(default_factory=dict)
    products: dict[Key, tuple[Key, ...]] = field(default_factory=dict)
    sums: list[tuple[Key, tuple[Key, ...]]] = field(default_factory=list)
    kept: set[Key] = field(default_factory=set)
    new: dict[Key, int] = field(default_factory=dict)
    _sum_of: dict[Key, tuple[Key, ...]] = field(default_factory=dict)
    _by_root: dict[Key, tuple[Key, ...]] = field(default_factory=dict)

    def find(self, key: Key) -> Key:
        """The size that stands for all that are equal to this one."""
        root = key
        while self.parent.get(root, root) != root:
            root = self.parent[root]
        while self.parent.get(key, key) != root:
            self.parent[key], key = root, self.parent[key]
        return root

    def unite(self, a: Key, b: Key) -> None:
        """Let two sizes be equal."""
        self.parent[self.find(a)] = self.find(b)

    def dims(self, value: Value) -> list[Key]:
        """The sizes of a value's dims, known from here on."""
        found = [(value, d) for d in range(value.type.ndim)]
        self.size.update(zip(found, value.shape, strict=True))
        return found

    # ---- equations --------------------------------------------------------------------------------------------

    def relate(self, graph: Graph) -> None:
        """Take in what the ops of a graph say of the sizes of its dims."""
        for value in graph.values():
            self.dims(value)
        for node in graph.nodes:
            if isinstance(node.op, OwnOp):
                for a, b in carried(node):
                    for x, y in zip(self.dims(a), self.dims(b), strict=True):
                        self.unite(x, y)
            else:
                self._rule(node)

    def _rule(self, node: Node) -> None:
        entry = self.book.entry(node.op)
        rule = entry.make(node) if entry is not None else None
        tensors = [*node.operands, *node.outs]
        if rule is None:
            self.kept.update(key for v in tensors for key in self.dims(v))
            return
        stays: set[Key] = {(node, f) for f in rule.windows.keys() | rule.leaders}
        self.size.update((key, rule.sizes[key[1]]) for key in stays)
        places = [*rule.operands, *(dims for dims in rule.results if dims is not None)]
        for value, dims in zip(tensors, places, strict=True):
            for key, dim in zip(self.dims(value), dims, strict=True):
                factors = [(node, f) for f in dim]
                self.size.update((k, rule.sizes[k[1]]) for k in factors)
                if len(factors) == 1 and self.size[key] == self.size[factors[0]]:
                    self.unite(key, factors[0])
                elif len(factors) > 1:
                    self.products[key] = tuple(factors)
                if rule.moves_only and node.op not in BY_VALUE and any(f in rule.whole for f in dim):
                    stays.update([key, *factors])
        if node.op in BY_VALUE:  # what is looked up must be there: a dim and the dims that count it stay equal
            for key in self.dims(node.operands[0]):
                for other in (other for v in tensors[1:] for other in self.dims(v)):
                    if self.size[key] == self.size[other] > 1:
                        self.unite(key, other)
        for key, parts in self._sums_of(node) if stays else ():
            rest = [part for part in parts if part[0] == "rest"]
            self.size.update((part, part[1]) for part in rest)
            self.kept.update(rest)
            self.sums.append((key, parts))
            stays.clear()
        if node.op is aten.slice.Tensor and all(
            a == b or b == 1 for a, b in zip(node.operands[0].shape, node.outs[0].shape, strict=True)
        ):
            stays.clear()  # one row of many: many may be fewer
        self.kept |= stays

    def _sums_of(self, node: Node) -> Iterator[tuple[Key, tuple[Key, ...]]]:
        """The dims that are the sum of others: what is joined, and what a slice leaves little of."""
        if node.op is aten.cat.default:
            dim = (node.args[1] if len(node.args) > 1 else 0) % node.outs[0].type.ndim
            parts = [(v, dim) for v in node.operands if v.type.ndim == node.outs[0].type.ndim]
            small = [key for key in parts if self.size[key] <= max(SIZES)]
            if len(small) == len(parts) - 1:
                yield (node.outs[0], dim), tuple(("rest", self.size[k]) if k in small else k for k in parts)
        elif node.op is aten.slice.Tensor:
            given, made = node.operands[0], node.outs[0]
            for dim, (a, b) in enumerate(zip(given.shape, made.shape, strict=True)):
                if 0 < a - b <= max(SIZES):
                    yield (given, dim), ((made, dim), ("rest", a - b))

    # ---- solving ----------------------------------------------------------------------------------------------

    def leaves(self, key: Key, depth: int = 0) -> list[Key]:
        """The sizes whose product a size is, major first."""
        root = self.find(key)
        parts = self._by_root.get(root)
        if parts is None or depth > 8:
            return [root]
        return [leaf for part in parts for leaf in self.leaves(part, depth + 1)]

    def _settle(self) -> None:
        """One product for each size: products of one size are aligned, part by part."""
        open_ = [(key, tuple(p for p in parts if self.size[p] > 1)) for key, parts in self.products.items()]
        changed = True
        while changed:
            changed = False
            self._by_root = {}
            for key, parts in list(open_):
                root = self.find(key)
                if root in map(self.find, parts):
                    continue
                if len(parts) == 1:
                    self.unite(root, parts[0])
                    changed = True
                elif root not in self._by_root:
                    self._by_root[root] = parts
                else:
                    for a, b in self._aligned(self._by_root[root], parts):
                        if len(a) == len(b) == 1 and self.find(a[0]) != self.find(b[0]):
                            self.unite(a[0], b[0])
                            changed = True
                        elif len(a) != len(b) and min(len(a), len(b)) == 1:
                            one, more = (a[0], b) if len(a) == 1 else (b[0], a)
                            if (one, more) not in open_:
                                open_.append((one, more))
                                changed = True

        changed = True
        while changed:
            changed = False
            self._sum_of = {}
            for key, parts in self.sums:
                known = self._sum_of.setdefault(self.find(key), parts)
                left = [p for p in parts if not any(self._same(p, q) for q in known)]
                other = [q for q in known if not any(self._same(p, q) for p in parts)]
                if len(left) == len(other) == 1 and self.size[left[0]] == self.size[other[0]]:
                    self.unite(left[0], other[0])
                    changed = True

    def _same(self, a: Key, b: Key) -> bool:
        return self.find(a) == self.find(b) or self.size[a] == self.size[b] == 1

    def _aligned(self, a: Sequence[Key], b: Sequence[Key]) -> Iterator[tuple[tuple[Key, ...], tuple[Key, ...]]]:
        """The parts of two products of one size, in the smallest groups of one size."""
        ends = [list(itertools.accumulate((self.size[p] for p in parts), lambda x, y: x * y)) for parts in (a, b)]
        at = [0, 0]
        for end in sorted(set(ends[0]) & set(ends[1])):
            to = [each.index(end) + 1 for each in ends]
            yield tuple(a[at[0] : to[0]]), tuple(b[at[1] : to[1]])
            at = to

    def solve(self, graph: Graph) -> None:
        """Find the new sizes of a graph's dims.

        Raises:
            Unfit: a product and its factors do not come out equal, or a cut does not fit the sub-dims.
        """
        self._settle()
        kept = {leaf for key in self.kept for leaf in self.leaves(key)}
        extents: dict[Key, int] = {}
        for value in graph.values():
            for key, cut in zip(self.dims(value), value.spec.dims if value.spec else (), strict=False):
                for part, leaves in self.parts(key, cut):
                    extent = graph.mesh.extent(part.axes)
                    for leaf in leaves:
                        if extent == 1:
                            break
                        share = math.gcd(extent, self.size[leaf])
                        extents[leaf] = math.lcm(extents.get(leaf, 1), share)
                        extent //= share
                    if extent > 1:
                        kept.update(leaves)
        kept -= set(self._sum_of)
        free = itertools.cycle(SIZES)
        self.new = {}
        for leaf in {self.find(k): None for k in self.size}:
            size = self.size[leaf]
            wanted = 2 * extents[leaf] if leaf in extents else next(free) if size > min(SIZES) else size
            self.new[leaf] = size if leaf in kept else min(size, wanted)
        for leaf in {self.find(key): None for key in self._sum_of}:
            self.new[leaf] = sum(self.of(part) for part in self._sum_of[leaf])
        for key, parts in self.products.items():
            a = math.prod(self.of(leaf) for leaf in self.leaves(key))
            b = math.prod(self.of(leaf) for part in parts for leaf in self.leaves(part))
            if a != b:
                raise Unfit([key, *parts])

    def of(self, key: Key) -> int:
        """The new size."""
        return math.prod(self.new[leaf] for leaf in self.leaves(key))

    def parts(self, key: Key, cut: Cut) -> Iterator[tuple[Part, list[Key]]]:
        """The sub-dims of a cut dim, each with the sizes whose product it is."""
        yield from zip(parts := cut.sub(self.size[key]), self.grouped([p.size for p in parts], [key]), strict=True)

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
        if united:
            return True
        more = {*keys, *(leaf for key in keys for leaf in self.leaves(key))} - self.kept
        self.kept |= more
        return bool(more)
