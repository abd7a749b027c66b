"""Embedding bags as lookups and sums, so that their tables and batches are sharded as those of any lookup.

F.embedding_bag(ids [b, l], w)              ->   aten.sum(aten.embedding(w, ids), [1])
F.embedding_bag(ids [n], w, offsets [b])    ->   %bag = aten.searchsorted(offsets, arange(n), right=True) - 1
                                                 aten.embedding_dense_backward(aten.embedding(w, ids), %bag, b)

The second sum is the transpose of a lookup: row i goes to bag i, and an empty bag is zero. So the gradient of either is
one of a lookup. A maximum stays the fused op, and so does what divides gradients by counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardfx.ir.builder import GraphBuilder
from shardfx.ir.graph import Value
from shardfx.ir.ops.traits import with_defaults

aten = torch.ops.aten
MEAN, MAX = 1, 2
"""Values of the argument ``mode``."""


@dataclass(frozen=True)
class Bags:
    """The ids of bags, ``[b, l]`` or ``[n]``; then ``bag`` is that of each."""

    builder: GraphBuilder
    ids: Value
    size: int
    padding: int
    bag: Value | None = None

    @staticmethod
    def of(builder: GraphBuilder, named: dict[str, Any]) -> Bags:
        """The bags of a call; ``offset2bag`` of its backward is what the forward gives as such."""
        ids, offsets, padding = named["indices"], named["offsets"], named["padding_idx"]
        length = _length(ids, offsets)
        if length:
            size = offsets.shape[0]
            source = ids.node.operands[0] if ids.node is not None and ids.node.op is aten.view.default else ids
            if source.shape != (size, length):
                source = builder.add(aten.view.default, (ids, [size, length]))
            return Bags(builder, source, size, padding)
        size = offsets.shape[0] - bool(named.get("include_last_offset"))
        bag = named.get("offset2bag")
        if bag is None:
            if size < offsets.shape[0]:
                offsets = builder.add(aten.slice.Tensor, (offsets, 0, 0, size))
            at = builder.add(aten.arange.start_step, (0, ids.shape[0], 1), dtype=offsets.type.dtype)
            above = builder.add(aten.searchsorted.Tensor, (offsets, at), right=True)
            bag = builder.add(aten.sub.Tensor, (above, 1))
        return Bags(builder, ids, size, padding, bag)

    def rows(self, table: Value, weights: Value | None, sparse: bool = False) -> Value:
        """The rows that are looked up, of padding zeros, weighted."""
        how = (self.padding, False, True) if sparse else ()
        return self.weighted(self._add(aten.embedding.default, table, self.ids, *how), weights)

    def weighted(self, rows: Value, weights: Value | None) -> Value:
        """Rows, those of padding as zeros, the others times their weights."""
        add = self._add
        if self.padding >= 0:
            skipped = add(aten.unsqueeze.default, add(aten.eq.Scalar, self.ids, self.padding), -1)
            rows = add(aten.masked_fill.Scalar, rows, skipped, 0)
        if weights is not None:
            each = add(aten.view.default, weights, [*self.ids.shape]) if weights.shape != self.ids.shape else weights
            rows = add(aten.mul.Tensor, rows, add(aten.unsqueeze.default, each, -1))
        return rows

    def total(self, rows: Value) -> Value:
        """The sums of rows by bag."""
        if self.bag is None:
            return self._add(aten.sum.dim_IntList, rows, [1])
        return self._add(aten.embedding_dense_backward.default, rows, self.bag, self.size, -1, False)

    def each(self, values: Value) -> Value:
        """The row of its bag for each id: the transpose of :meth:`total`."""
        if self.bag is not None:
            return self._add(aten.embedding.default, values, self.bag)
        column = self._add(aten.unsqueeze.default, values, 1)
        return self._add(aten.expand.default, column, [*self.ids.shape, values.shape[1]])

    def lengths(self, dtype: torch.dtype) -> Value:
        """The number of ids of each bag, 1 where it has none: a column."""
        ones = self.builder.add(aten.full.default, ([*self.ids.shape, 1], 1.0), dtype=dtype)
        return self._add(aten.clamp.default, self.total(self.weighted(ones, None)), 1.0)

    def _add(self, op: Any, *args: Any) -> Value:
        made: Value = self.builder.add(op, args)
        return made


def _length(ids: Value, offsets: Value) -> int:
    """The ids of each bag, where offsets are multiples of it; else 0."""
    node = offsets.node
    if node is None or node.op is not aten.arange.start_step:
        return 0
    start, end, *step = node.args
    length = step[0] if step else 1
    return length if start == 0 and end == ids.shape[0] and length > 0 and end % length == 0 else 0


def _forward(builder: GraphBuilder, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], types: Any) -> Any:
    named = with_defaults(op, args, kwargs)
    if _stays_fused(named):
        return builder.add(op, args, types, **kwargs)
    bags, count = Bags.of(builder, named), None
    made = bags.total(bags.rows(named["weight"], named["per_sample_weights"], named["sparse"]))
    if named["mode"] == MEAN:
        count = bags.lengths(made.type.dtype)
        made = builder.add(aten.div.Tensor, (made, count))
    return [made, bags.bag, count, None]


def _backward(builder: GraphBuilder, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], types: Any) -> Any:
    named = with_defaults(op, args, kwargs)
    if _stays_fused(named):
        return builder.add(op, args, types, **kwargs)
    bags, grad = Bags.of(builder, named), named["grad"]
    if named["mode"] == MEAN:
        grad = builder.add(aten.div.Tensor, (grad, named["bag_size"]))
    rows = bags.weighted(bags.each(grad), named["per_sample_weights"])
    made = (rows, bags.ids, named["num_weights"], named["padding_idx"], False)
    return builder.add(aten.embedding_dense_backward.default, made)


def _weights_backward(builder: GraphBuilder, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], types: Any) -> Any:
    named = with_defaults(op, args, kwargs)
    bags = Bags.of(builder, named)
    products = builder.add(aten.mul.Tensor, (bags.rows(named["weight"], None), bags.each(named["grad"])))
    made = builder.add(aten.sum.dim_IntList, (products, [-1]))
    flat: Sequence[int] = named["indices"].shape
    return made if made.shape == flat else builder.add(aten.view.default, (made, [*flat]))


class SparseLookup(torch.autograd.Function):
    """``aten.embedding`` with ``sparse=True``, whose gradient is dense; that its rows alone count, the forward says."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        """Look up rows; the arguments are those of ``aten.embedding``."""
        table, ids, *_ = args
        ctx.save_for_backward(ids)
        ctx.how = (table.shape[0], *args[2:4])
        found: Tensor = aten.embedding.default(*args)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The dense gradient of the table."""
        return aten.embedding_dense_backward.default(grads[0], *ctx.saved_tensors, *ctx.how), None, None, None, None


def sparse_lookup(*args: Any) -> Any:
    """The call of :class:`SparseLookup` that a traced graph has: one that torch finds by its module."""
    apply: Any = SparseLookup.apply
    return apply(*args)


def _stays_fused(named: dict[str, Any]) -> bool:
    """Whether an op stays: a maximum; or gradients are divided by counts, which torch's kernel does in its own way."""
    return named["mode"] == MAX or bool(named["scale_grad_by_freq"])


OF_BAGS = {
    aten._embedding_bag.default: _forward,
    aten._embedding_bag_forward_only.default: _forward,
    aten._embedding_bag_backward.default: _backward,
    aten._embedding_bag_per_sample_weights_backward.default: _weights_backward,
}
"""The canonical form of bags, by op of torch."""
