"""An exchange of rows under way while the inner part is computed: what needs no foreign row, then the rims, joined.

    y = convolution(halo(x)) : 64{h}     ->     a = convolution(x)       : 64 for 2{h} by 32o+1 to 32o+30
                                                b = convolution(halo(x)) : 64 for 2{h} by 32o to 32o
                                                c = convolution(halo(x)) : 64 for 2{h} by 32o+31 to 32o+31
                                                y = comm.join(a, b, c)   : 64{h}

Pieces are other placements of one value: some rows of each rank's tile, the same for all ranks, which a window says of
which each rank has one place. The exchange starts where its operand is made, and is waited for where the first rim is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from shardfx.ir.dim_sharding import DimSharding, Window
from shardfx.ir.graph import Node, Strategy, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.comm import join
from shardfx.ir.ops.comm_local import pieces_of
from shardfx.ir.rewriter import Rewriter
from shardfx.ir.rules.sharding_rule import Seen
from shardfx.ir.rules.strategy import FactorShardings
from shardfx.ir.shards import has_rows

from .placing import Placing

SPLIT = frozenset({torch.ops.aten.convolution.default})
"""Ops that take long enough for an exchange to travel beside them."""


def overlapped(placing: Placing, by_cost: bool) -> int:
    """MixedPrecision the inner part of each op whose operand is exchanged by itself (``by_cost``: where that takes
    less time); gives of how many ops."""
    graph = placing.costs.graph
    rewriter, count = Rewriter(graph), 0
    for node in graph.nodes:
        pieces = Pieces(placing, node)
        if node.op not in SPLIT or node.pin is not None or not pieces.made():
            continue
        if by_cost and pieces.saved() <= 0:
            continue
        for each in pieces.nodes:
            rewriter.before(node, each)
        old, new = node.outs[0], pieces.nodes[-1].outs[0]
        new.hint = old.hint
        rewriter.replace(old, new)
        rewriter.erase(node)
        count += 1
    rewriter.apply()
    return count


class Split(NamedTuple):
    """A dim of a result whose tiles are computed in pieces: the rows that need no foreign ones, and the rims."""

    leader: str
    dim: int
    inner: Window
    rims: tuple[Window, ...]


@dataclass
class Pieces:
    """The nodes that compute a node's result in pieces."""

    placing: Placing
    node: Node
    nodes: list[Node] = field(default_factory=list)

    def made(self) -> bool:
        """Make them; says whether that is possible, and of use: an operand is exchanged, and every rank has inner rows
        that need nothing of it."""
        splits = self._splits()
        return bool(splits) and self._in_pieces(splits, self.placing.shardings(self.node)) is not None

    def saved(self) -> float:
        """The seconds in which an exchange travels beside the inner piece, without what pieces take more than the whole
        result, and without the time to join them."""
        costs, sent = self.placing.costs, 0.0
        for value, need in zip(self.node.operands, self.placing.strategy(self.node).operands, strict=True):
            if not has_rows(self.placing.spec(value), need, value.shape, self._mesh):
                sent += costs.planner.seconds(value.type, self.placing.spec(value), need)
        whole, inner, *rest = (
            costs.prices.of(each).seconds(costs.machine, self._mesh) for each in (self.node, *self.nodes)
        )
        return min(sent, inner) - (inner + sum(rest) - whole)

    def _splits(self) -> list[Split]:
        """The dims to be split; none where the node's operands move otherwise than by exchanges of rows."""
        rule, shardings, found = self.placing.rule(self.node), self.placing.shardings(self.node), list[Split]()
        made = self.placing.strategy(self.node)
        for value, need, dims in zip(self.node.operands, made.operands, rule.operands, strict=True):
            spec = self.placing.spec(value)
            seen = {d: rule.windows[f] for d, factors in enumerate(dims) for f in factors if f in rule.windows}
            if not seen or has_rows(spec, need, value.shape, self._mesh):
                continue
            differ = [d for d, (a, b) in enumerate(zip(spec.dims, need.dims, strict=True)) if a != b]
            if spec.partial != need.partial or any(d not in seen or len(dims[d]) > 1 for d in differ):
                return []
            for d in differ:
                split = self._split(seen[d], shardings.get(seen[d].leader, DimSharding()), spec.dims[d], value.shape[d])
                if split is None:
                    return []
                found += [split] if split.rims else []
        return found

    @property
    def _mesh(self) -> Mesh:
        return self.placing.costs.graph.mesh

    def _split(self, seen: Seen, sharding: DimSharding, held: DimSharding, whole: int) -> Split | None:
        """How a dim that is sharded so is split, where ranks hold tiles of what it needs; None if it cannot be: pieces
        are
        the same rows of every tile."""
        rule = self.placing.rule(self.node)
        dims = [d for d, dim in enumerate(rule.results[0] or ()) if dim == (seen.leader,)]
        if not dims or not sharding.axes or sharding.rows or held.axes != sharding.axes:
            return None
        ranks = self._mesh.along(dict.fromkeys(self._mesh.names, 0), sharding.axes)
        size = rule.sizes[seen.leader]
        tiles = [sharding.span(size, self._mesh, at) for at in ranks]
        per = tiles[0][1]
        if any(start != number * per or not length for number, (start, length) in enumerate(tiles)):
            return None
        own = [
            _own_rows(seen.window, tile, held.span(whole, self._mesh, at), whole)
            for tile, at in zip(tiles, ranks, strict=True)
        ]
        first = max(begin for begin, _ in own)
        end = min(per if end == length else end for (_, end), (_, length) in zip(own, tiles, strict=True))
        if first >= min(end, tiles[-1][1]):
            return None
        last = tiles[-1][1] - 1  # a rim has a row that there is, also of the last tile, which may be smaller
        stretches = ((first, end), (0, first), (min(end, last), per if end < per else 0))
        inner, *rims = (Window(len(ranks), per, 1, a, b - 1) for a, b in stretches if a < b)
        pieces = [
            [DimSharding(sharding.axes, rows=w).span(size, self._mesh, at) for w in (inner, *rims)] for at in ranks
        ]
        if any(pieces_of(tile, each) is None for tile, each in zip(tiles, pieces, strict=True)):
            return None
        return Split(seen.leader, dims[0], inner, tuple(rims))

    def _in_pieces(self, splits: Sequence[Split], shardings: FactorShardings) -> Value | None:
        """The value, with the factors sharding so, and its dims split; None where a piece cannot be computed so."""
        if not splits:
            return self._piece(shardings)
        (leader, dim, inner, rims), axes = splits[0], shardings[splits[0].leader].axes
        parts = [self._in_pieces(splits[1:], {**shardings, leader: DimSharding(axes, rows=inner)})]
        parts += [self._piece({**shardings, leader: DimSharding(axes, rows=rim)}) for rim in rims]
        values = tuple(value for value in parts if value is not None)
        if len(values) < len(parts):
            return None
        specs = tuple(value.spec for value in values if value.spec is not None)
        made = Rewriter.make(join, values, values[0].type, like=self.node, kwargs={"axes": list(axes), "dim": dim})
        spec = join.place(specs[0], values[0].shape, self._mesh, axes=axes, dim=dim)
        made.why = "computed in pieces: the inner one while rows are exchanged"
        return self._add(made, Strategy(specs, (spec,)))

    def _piece(self, shardings: FactorShardings) -> Value | None:
        """The node's result in some rows; None where it cannot be computed so, or the first piece, which is the inner
        one, needs rows of others."""
        node = self.node
        made = self.placing.sharding(node, shardings)
        if made is None:
            return None
        moved = zip(node.operands, self.placing.strategy(node).operands, made.operands, strict=True)
        for value, before, need in moved if not self.nodes else ():
            if need != before and not has_rows(self.placing.spec(value), need, value.shape, self._mesh):
                return None
        piece = Rewriter.make(node.op, node.args, node.outs[0].type, like=node, kwargs=dict(node.kwargs))
        piece.attrs, piece.why = dict(node.attrs), node.why
        return self._add(piece, made)

    def _add(self, node: Node, made: Strategy) -> Value:
        node.strategy, node.outs[0].spec = made, made.results[0]
        self.nodes.append(node)
        return node.outs[0]


def _own_rows(window: Window, tile: tuple[int, int], held: tuple[int, int], whole: int) -> tuple[int, int]:
    """The first stretch of a tile's rows that need nothing but what is held (or does not exist): begin and end, counted
    from the tile's begin."""

    def own(row: int) -> bool:
        first, last = window.reach(tile[0] + row, 1)
        first, last = max(first, 0), min(last, whole - 1)
        return first > last or (held[0] <= first and last < held[0] + held[1])

    begin = next((row for row in range(tile[1]) if own(row)), tile[1])
    return begin, next((row for row in range(begin, tile[1]) if not own(row)), tile[1])
