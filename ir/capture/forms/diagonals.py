"""``x[arange(B), index]``: of each row something of its own. That is a lookup within rows, which need not be together.

aten.index(x, [arange(8), %i])             ->   aten.gather(x, 1, ...)        8 rows may be cut, in x and in %i
aten.index_put(x, [arange(8), %i], v, True)   ->   aten.scatter_add(x, 1, ..., v)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from shardfx.ir.builder import GraphBuilder
from shardfx.ir.graph import Value

aten = torch.ops.aten
ARANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)
LOOKS = (aten.view.default, aten.unsqueeze.default, aten.expand.default)
"""Ops behind which a range is still one, if its first dim is all of it."""


def within_rows(builder: GraphBuilder, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], types: Any) -> Any:
    """The call in canonical form: as a lookup (or a write) within rows where it is one, else as it stands."""
    x, indices, *rest = args
    places = _places(builder, x, indices)
    if places is None:
        return builder.add(op, args, types, **kwargs)
    if not rest:
        return _seen(builder, builder.add(aten.gather.default, (x, 1, places)), types.shape)
    values, adds = rest[0], len(rest) > 1 and rest[1]
    shape = [*torch.broadcast_shapes(*(index.shape for index in indices if index is not None)), *x.shape[2:]]
    if list(values.shape) != shape:
        values = builder.add(aten.expand.default, (values, shape))
    values = _seen(builder, values, places.shape)
    return builder.add(aten.scatter_add.default if adds else aten.scatter.src, (x, 1, places, values), types)


def _places(builder: GraphBuilder, x: Value, indices: Sequence[Value | None]) -> Value | None:
    """For each row of x where in it to look, in the shape of what is found, ``[B, K, ...]``; None if that is not it."""
    if len(indices) < 2 or any(index is not None for index in indices[2:]):
        return None
    rows, places = indices[:2]
    if rows is None or places is None or places.type.dtype not in (torch.int32, torch.int64):
        return None
    shape = torch.broadcast_shapes(rows.shape, places.shape)
    if not _is_range(rows, x.shape[0]) or rows.type.ndim != len(shape):
        return None
    if places.shape != shape:
        places = builder.add(aten.expand.default, (places, list(shape)))
    if places.type.dtype is not torch.int64:
        places = builder.add(aten._to_copy.default, (places,), dtype=torch.int64)
    below = builder.add(aten.lt.Scalar, (places, 0))
    places = builder.add(aten.where.self, (below, builder.add(aten.add.Tensor, (places, x.shape[1])), places))
    size, each = math.prod(shape[1:]), x.shape[2:]
    flat = _seen(builder, places, [shape[0], size, *[1] * len(each)])
    wide: Value = builder.add(aten.expand.default, (flat, [shape[0], size, *each])) if each else flat
    return wide


def _is_range(index: Value, size: int) -> bool:
    """Whether an index counts the rows: ``arange(size)``, with dims of one element behind it."""
    if index.shape[:1] != (size,) or index.type.numel != size:
        return False
    node = index.node
    while node is not None and node.op in LOOKS:
        node = node.args[0].node
    if node is None or node.op not in ARANGES:
        return False
    numbers = {aten.arange.default: [0, *node.args, 1], aten.arange.start: [*node.args, 1]}.get(node.op, node.args)
    return list(numbers) in ([0, size, 1], [0, size])


def _seen(builder: GraphBuilder, x: Value, shape: Sequence[int]) -> Value:
    """The value in another shape."""
    if tuple(x.shape) == tuple(shape):
        return x
    made: Value = builder.add(aten.view.default, (x, list(shape)))
    return made
