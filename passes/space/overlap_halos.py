"""Overlap of halo exchanges with compute: rows that need no halo are computed first, then the borders, then joined.

    y = convolution(halo(x)) : 64{h}     ->     a = convolution(x)       : 64 for 2{h} by 32o+1 to 32o+30
                                                b = convolution(halo(x)) : 64 for 2{h} by 32o to 32o
                                                c = convolution(halo(x)) : 64 for 2{h} by 32o+31 to 32o+31
                                                y = comm.join(a, b, c)   : 64{h}

Parts are other placements of one value: some rows of each rank's tile, the same for all ranks, which a window says of
which each rank has one place. The exchange starts where its operand is made, and is waited for at the first border.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from shardfx.ir.dim_sharding import DimSharding, Window
from shardfx.ir.graph import Node, Strategy, Value
from shardfx.ir.ops.comm import join
from shardfx.ir.ops.comm_local import shards_of
from shardfx.ir.rewriter import Rewriter
from shardfx.ir.rules.sharding_rule import SeenFactor
from shardfx.ir.rules.strategy import FactorShardings
from shardfx.ir.shards import has_rows

from .trial_placement import TrialPlacement

SPLIT = frozenset({torch.ops.aten.convolution.default})
"""Ops that take long enough for an exchange to overlap with them."""


def overlapped(placement: TrialPlacement, by_cost: bool) -> int:
    """Compute the inner part of each op whose operand is exchanged by itself (``by_cost``: where that takes less time);
    gives of how many ops."""
    rewriter, count = Rewriter(placement.costs.graph), 0
    for node in placement.costs.graph.nodes:
        parts = _Parts(placement, node)
        if node.op not in SPLIT or node.pin is not None or not parts.made() or (by_cost and parts.saved() <= 0):
            continue
        for each in parts.nodes:
            rewriter.before(node, each)
        old, new = node.outs[0], parts.nodes[-1].outs[0]
        new.hint = old.hint
        rewriter.replace(old, new)
        rewriter.erase(node)
        count += 1
    rewriter.apply()
    return count


class _Border(NamedTuple):
    """A dim of a result whose tiles are computed in parts: the rows that need no halo, and those at the borders."""

    leader: str
    dim: int
    inner: Window
    borders: tuple[Window, ...]


@dataclass
class _Parts:
    """The nodes that compute a node's result in parts."""

    placement: TrialPlacement
    node: Node
    nodes: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._mesh = self.placement.mesh

    def made(self) -> bool:
        """Make them; says whether that is possible, and of use: an operand is exchanged, and every rank has inner rows
        that need nothing of it."""
        splits = self._splits()
        return bool(splits) and self._split(splits, self.placement.shardings(self.node)) is not None

    def saved(self) -> float:
        """The seconds for which an exchange overlaps with the inner part, without what parts take more than the whole
        result, and without the time to join them."""
        costs, sent = self.placement.costs, 0.0
        for value, need in zip(self.node.operands, self.placement.strategy(self.node).operands, strict=True):
            if not has_rows(self.placement.spec(value), need, value.shape, self._mesh):
                sent += costs.planner.seconds(value.type, self.placement.spec(value), need)
        full, inner, *rest = map(costs.seconds, (self.node, *self.nodes))
        return min(sent, inner) - (inner + sum(rest) - full)

    def _splits(self) -> list[_Border]:
        """The dims to be split; none where the node's operands move otherwise than by halo exchanges."""
        rule, shardings, found = self.placement.rule(self.node), self.placement.shardings(self.node), list[_Border]()
        made = self.placement.strategy(self.node)
        for value, need, dims in zip(self.node.operands, made.operands, rule.operands, strict=True):
            spec = self.placement.spec(value)
            seen = {d: rule.windows[f] for d, factors in enumerate(dims) for f in factors if f in rule.windows}
            if not seen or has_rows(spec, need, value.shape, self._mesh):
                continue
            differ = [d for d, (a, b) in enumerate(zip(spec.dims, need.dims, strict=True)) if a != b]
            if spec.partial != need.partial or any(d not in seen or len(dims[d]) > 1 for d in differ):
                return []
            for d in differ:
                split = self._borders(
                    seen[d], shardings.get(seen[d].leader, DimSharding()), spec.dims[d], value.shape[d]
                )
                if split is None:
                    return []
                found += [split] if split.borders else []
        return found

    def _borders(self, seen: SeenFactor, sharding: DimSharding, operand: DimSharding, full: int) -> _Border | None:
        """How a dim that is sharded so is split, where ranks have tiles of what it needs; None if it cannot be: parts
        are the same rows of every tile."""
        rule = self.placement.rule(self.node)
        dims = [d for d, dim in enumerate(rule.results[0] or ()) if dim == (seen.leader,)]
        if not dims or not sharding.axes or sharding.rows or operand.axes != sharding.axes:
            return None
        ranks = self._mesh.along(dict.fromkeys(self._mesh.names, 0), sharding.axes)
        size = rule.sizes[seen.leader]
        tiles = [sharding.span(size, self._mesh, at) for at in ranks]
        per = tiles[0][1]
        if any(start != number * per or not length for number, (start, length) in enumerate(tiles)):
            return None
        inputs = [operand.span(full, self._mesh, at) for at in ranks]
        own = [_own_rows(seen.window, tile, there, full) for tile, there in zip(tiles, inputs, strict=True)]
        first = max(begin for begin, _ in own)
        end = min(per if end == length else end for (_, end), (_, length) in zip(own, tiles, strict=True))
        if first >= min(end, tiles[-1][1]):
            return None
        last = tiles[-1][1] - 1  # a border has a row that there is, also of the last tile, which may be smaller
        ranges = ((first, end), (0, first), (min(end, last), per if end < per else 0))
        inner, *borders = (Window(len(ranks), per, 1, a, b - 1) for a, b in ranges if a < b)
        parts = [
            [DimSharding(sharding.axes, rows=w).span(size, self._mesh, at) for w in (inner, *borders)] for at in ranks
        ]
        if any(shards_of(tile, each) is None for tile, each in zip(tiles, parts, strict=True)):
            return None
        return _Border(seen.leader, dims[0], inner, tuple(borders))

    def _split(self, splits: Sequence[_Border], shardings: FactorShardings) -> Value | None:
        """The value, with the factors sharded so, and its dims split; None where a part cannot be computed so."""
        if not splits:
            return self._part(shardings)
        (leader, dim, inner, borders), axes = splits[0], shardings[splits[0].leader].axes
        parts = [self._split(splits[1:], {**shardings, leader: DimSharding(axes, rows=inner)})]
        parts += [self._part({**shardings, leader: DimSharding(axes, rows=border)}) for border in borders]
        values = tuple(value for value in parts if value is not None)
        if len(values) < len(parts):
            return None
        specs = tuple(value.spec for value in values if value.spec is not None)
        made = Rewriter.make(join, values, values[0].type, like=self.node, kwargs={"axes": list(axes), "dim": dim})
        spec = join.place(specs[0], values[0].shape, self._mesh, axes=axes, dim=dim)
        made.why = "computed in parts: the inner one while halos are exchanged"
        return self._add(made, Strategy(specs, (spec,)))

    def _part(self, shardings: FactorShardings) -> Value | None:
        """The node's result in some rows; None where it cannot be computed so, or the first part, which is the inner
        one, needs rows of others."""
        node = self.node
        made = self.placement.shard(node, shardings)
        if made is None:
            return None
        moved = zip(node.operands, self.placement.strategy(node).operands, made.operands, strict=True)
        for value, before, need in moved if not self.nodes else ():
            if need != before and not has_rows(self.placement.spec(value), need, value.shape, self._mesh):
                return None
        part = Rewriter.make(node.op, node.args, node.outs[0].type, like=node, kwargs=dict(node.kwargs))
        part.attrs, part.why = dict(node.attrs), node.why
        return self._add(part, made)

    def _add(self, node: Node, made: Strategy) -> Value:
        node.strategy, node.outs[0].spec = made, made.results[0]
        self.nodes.append(node)
        return node.outs[0]


def _own_rows(window: Window, tile: tuple[int, int], own: tuple[int, int], full: int) -> tuple[int, int]:
    """The first contiguous range of a tile's rows that need nothing but a rank's own (or what does not exist): begin
    and end, counted from the tile's begin."""

    def is_own(row: int) -> bool:
        first, last = window.reach(tile[0] + row, 1)
        first, last = max(first, 0), min(last, full - 1)
        return first > last or (own[0] <= first and last < own[0] + own[1])

    begin = next((row for row in range(tile[1]) if is_own(row)), tile[1])
    return begin, next((row for row in range(begin, tile[1]) if not is_own(row)), tile[1])
