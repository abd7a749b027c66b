"""Batch norms that normalise each of several equal parts of the batch apart, as each rank of data parallelism does.

    batch_norm(x[8, C])   ->   batch_norm(x[4, 2 C]), the parts side by side: part 0's channels, then part 1's

Running statistics take the mean of the parts' (for a variance: the mean within parts), or, where the parts are turns,
what one turn after the other makes of them. Where the batch is cut over the ranks into these parts, that is all that is
sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardfx.ir.errors import Error

aten = torch.ops.aten


@dataclass(frozen=True)
class BatchParts:
    """Into how many equal parts batch norms take a batch apart; ``one_by_one``: the parts are turns."""

    count: int = 1
    one_by_one: bool = False


ONE = BatchParts()


class NormByParts:
    """``aten.batch_norm`` in training, of the parts of the batch apart."""

    def __init__(self, parts: BatchParts) -> None:
        self.parts, self.one_by_one, self.__name__ = parts.count, parts.one_by_one, "batch_norm_by_parts"

    def __call__(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor | None,
        var: Tensor | None,
        training: bool,
        *how: Any,
    ) -> Tensor:
        """What the op gives for each part, one behind the other.

        Raises:
            Error: the parts are not equal, or of one row each.
        """
        if not training:
            made: Tensor = aten.batch_norm.default(x, weight, bias, mean, var, training, *how)
            return made
        rows, channels, rest = x.shape[0], x.shape[1], x.shape[2:]
        each = rows // self.parts
        if rows % self.parts:
            raise self._refused("wants equal parts", f"a multiple of {self.parts} rows", f"{rows}")
        if each * math.prod(rest) < 2:
            more = f"more than one, so more than {rows} rows in all"
            raise self._refused("has one value per channel", more, f"{self.parts} parts of {rows} rows")
        beside = x.reshape(self.parts, each, channels, *rest).transpose(0, 1)
        beside = beside.reshape(each, self.parts * channels, *rest)
        own = [None if given is None else given.repeat(self.parts) for given in (weight, bias, mean, var)]
        out: Tensor = aten.batch_norm.default(beside, *own, training, *how)
        for kept, new in zip((mean, var), own[2:], strict=True):
            if kept is not None and new is not None:
                kept.copy_(self._kept(kept, new.reshape(self.parts, channels), float(how[0])))
        return out.reshape(each, self.parts, channels, *rest).transpose(0, 1).reshape(x.shape)

    def _refused(self, what: str, expected: str, got: str) -> Error:
        return Error(
            f"a batch norm of each part of the batch {what}",
            where=f"Hints(batch_stats={'turn' if self.one_by_one else 'local'!r})",
            expected=expected,
            got=got,
            remedy="DataLoader(drop_last=True); or the whole batch's statistics: Hints(batch_stats=None)",
        )

    def _kept(self, old: Tensor, by_part: Tensor, momentum: float) -> Tensor:
        """The running statistics, from what each part alone makes of the old ones."""
        if not self.one_by_one:
            return by_part.mean(0)
        left = 1.0 - momentum
        weights = [left ** (self.parts - 1 - turn) for turn in range(self.parts)]
        late = by_part * torch.tensor(weights, dtype=old.dtype, device=old.device).unsqueeze(1)
        return late.sum(0) + old * (left**self.parts - left * sum(weights))


def normalise_by_parts(exported: torch.fx.GraphModule, parts: BatchParts) -> None:
    """Have the batch norms of an exported program do so."""
    for node in exported.graph.nodes:
        if node.target is aten.batch_norm.default:
            node.target = NormByParts(parts)
    exported.recompile()
