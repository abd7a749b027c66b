"""Rules with sliding windows over a dim, and the padding and cropping of a rank's rows.

For output rows [o0, o1) a convolution reads input rows [o0 s - p, (o1 - 1) s - p + d (k - 1) + 1). A rank has those
that exist (:class:`shardfx.ir.dim_sharding.Window`); the rest is padding, at the global
border only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from shardfx.ir.dim_sharding import Window

from .local import Emit
from .sharding_rule import SeenFactor, ShardingRule

aten = torch.ops.aten


def seeing(rule: ShardingRule, windows: Mapping[str, tuple[str, Window]], alone: bool = False) -> ShardingRule:
    """A rule whose factors are seen through windows of others: ``{"h": ("p", window)}``; ``alone``: they may also be
    sharded by themselves."""
    found = {factor: SeenFactor(*seen) for factor, seen in windows.items()}
    return replace(rule, windows=found, alone=frozenset(found) if alone else frozenset())


def down(small: int, kernel: int, stride: int, padding: int, dilation: int = 1) -> Window:
    """The window of an output row of a convolution, of ``small`` rows, over the input."""
    return Window(small, stride, 1, -padding, dilation * (kernel - 1) - padding)


def reverse(window: Window, rows: int) -> Window:
    """The inverse window, for gradients: the windows that read a row of a dim of ``rows`` rows."""
    step, per = window.step, window.per
    if step == 0:
        return Window(rows, 0, 1, 0, window.size - 1)
    return Window(rows, per, step, step - 1 - window.high, per - 1 - window.low)


class RowRange(NamedTuple):
    """A conversion of rows ``start`` to ``end`` of a tensor's dim to rows ``first`` to ``last`` (ends exclusive)."""

    dim: int
    start: int
    end: int
    first: int
    last: int

    @property
    def kept(self) -> tuple[int, int]:
        """Start and end of the rows that remain."""
        begin, end = max(self.first, self.start), min(self.last, self.end)
        return (begin - self.start, end - self.start) if begin < end else (0, 0)

    @property
    def added(self) -> tuple[int, int]:
        """The numbers of rows padded before and behind."""
        begin, end = self.kept
        if begin == end:
            return self.last - self.first, 0
        return begin + self.start - self.first, self.last - end - self.start

    @property
    def reverse(self) -> RowRange:
        """The inverse conversion, for gradients."""
        return RowRange(self.dim, self.first, self.last, self.start, self.end)


def grows(ranges: Sequence[RowRange]) -> bool:
    """Whether any dim is padded."""
    return any(any(each.added) for each in ranges)


def fitted(emit: Emit, x: Any, ranges: Sequence[RowRange], value: float = 0.0) -> Any:
    """``x`` converted to other rows of some dims: cropped, and padded with a value."""
    for each in ranges:
        begin, end = each.kept
        if end - begin != each.end - each.start:
            x = emit.call(aten.slice.Tensor, x, each.dim, begin, end)
    if not grows(ranges):
        return x
    by_dim = {each.dim: each.added for each in ranges}
    first = min(by_dim)
    ndim = max(len(v.shape) for v in (*emit.node.operands, *emit.node.outs))
    pads = [n for dim in reversed(range(first, ndim)) for n in by_dim.get(dim, (0, 0))]
    return emit.call(aten.constant_pad_nd.default, x, pads, value)
