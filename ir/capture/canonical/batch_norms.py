"""Batch norms as captured: by parts of the batch, with wide statistics, and without other processes.

    batch_norm(x[8, C])   ->   batch_norm(x[4, 2 C]), the parts side by side: part 0's channels, then part 1's

Each of several equal parts of the batch may be normalised by itself, as each rank of data parallelism does. Running
statistics take the mean of the parts' (for a variance: the mean within parts), or, where the parts are micro-batches,
what one after the other makes of them. Where the batch is sharded into these parts, that is all that is sent.

    batch_norm(x: bf16, weight: bf16, ..., mean: bf16)   ->   batch_norm(x, weight: f32, ..., mean: f32), mean cast back

Torch's kernels for 16-bit inputs differ by device: on CPUs their statistics are rounded to 16 bits. Here they are in
float32, as torch's types say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardfx.ir.errors import Error

aten = torch.ops.aten


@dataclass(frozen=True)
class BatchParts:
    """The number of equal parts of the batch that batch norms normalise; ``one_by_one``: the parts are
    micro-batches."""

    count: int = 1
    one_by_one: bool = False


ONE = BatchParts()


NARROW = (torch.bfloat16, torch.float16)


class BatchNorm:
    """``aten.batch_norm``, in training of each part of the batch, and with float32 statistics of 16-bit inputs."""

    __name__ = "batch_norm_of_parts"

    def __init__(self, parts: BatchParts) -> None:
        self.parts, self.one_by_one = parts.count, parts.one_by_one

    def __call__(self, x: Tensor, *args: Any) -> Tensor:
        """The results of the parts, concatenated; the running statistics are replaced.

        Raises:
            Error: the parts are not equal, or of one row each.
        """
        tensors, (training, *how) = args[:4], args[4:]
        if not training:
            made: Tensor = aten.batch_norm.default(x, *args)
            return made
        wide = [*tensors]
        if x.dtype in NARROW:
            wide = [None if each is None else each.float() for each in tensors]
            if wide == [None] * 4:
                wide[0] = x.new_ones(x.shape[1], dtype=torch.float32)  # decides the dtype of the statistics
        out, stats = self._by_parts(x, wide, how) if self.parts > 1 else (_normalised(x, wide, how), wide[2:])
        for stored, new in zip(tensors[2:], stats, strict=True):
            if stored is not new and stored is not None:
                stored.copy_(new)
        return out

    def _by_parts(self, x: Tensor, tensors: Sequence[Tensor | None], how: Sequence[Any]) -> Any:
        """The result, and the new running statistics."""
        rows, channels, rest = x.shape[0], x.shape[1], x.shape[2:]
        each = rows // self.parts
        if rows % self.parts:
            raise self._refused("wants equal parts", f"a multiple of {self.parts} rows", f"{rows}")
        if each * math.prod(rest) < 2:
            more = f"more than one, so more than {rows} rows in all"
            raise self._refused("has one value per channel", more, f"{self.parts} parts of {rows} rows")
        beside = x.reshape(self.parts, each, channels, *rest).transpose(0, 1)
        beside = beside.reshape(each, self.parts * channels, *rest)
        own = [None if tensor is None else tensor.repeat(self.parts) for tensor in tensors]
        out = _normalised(beside, own, how)
        stats = [
            None if old is None or new is None else self._stats(old, new.reshape(self.parts, channels), float(how[0]))
            for old, new in zip(tensors[2:], own[2:], strict=True)
        ]
        return out.reshape(each, self.parts, channels, *rest).transpose(0, 1).reshape(x.shape), stats

    def _refused(self, what: str, expected: str, got: str) -> Error:
        return Error(
            f"a batch norm of each part of the batch {what}",
            where=f"Hints(batch_stats={'microbatch' if self.one_by_one else 'local'!r})",
            expected=expected,
            got=got,
            remedy="DataLoader(drop_last=True); or the global batch's statistics: Hints(batch_stats=None)",
        )

    def _stats(self, old: Tensor, by_part: Tensor, momentum: float) -> Tensor:
        """The running statistics, from those that each part alone would make of the old ones."""
        if not self.one_by_one:
            return by_part.mean(0)
        left = 1.0 - momentum
        weights = [left ** (self.parts - 1 - index) for index in range(self.parts)]
        late = by_part * torch.tensor(weights, dtype=old.dtype, device=old.device).unsqueeze(1)
        return late.sum(0) + old * (left**self.parts - left * sum(weights))


def _normalised(x: Tensor, tensors: Sequence[Tensor | None], how: Sequence[Any]) -> Tensor:
    made: Tensor = aten.batch_norm.default(x, *tensors, True, *how)
    return made


USUAL = _BatchNorm.forward


@contextmanager
def plain_batch_norms() -> Iterator[None]:
    """Within, ``SyncBatchNorm`` is a plain batch norm, on any device, for what is captured has all rows; and one with
    ``momentum=None`` computes with its count of batches, and does not ask for its content."""
    synchronized = mock.patch.object(nn.SyncBatchNorm, "forward", _batch_norm)
    with synchronized, mock.patch.object(_BatchNorm, "forward", _batch_norm):
        yield


def _batch_norm(self: _BatchNorm, input: torch.Tensor) -> torch.Tensor:
    """A batch norm, whose averaging factor is a tensor where it follows from the count of batches."""
    mean, variance, count = self.running_mean, self.running_var, self.num_batches_tracked
    if self.momentum is not None or not self.training or mean is None or variance is None or count is None:
        return USUAL(self, input)
    self._check_input_dim(input)
    count.add_(1)
    of_batch = torch.zeros_like(mean), torch.zeros_like(variance)
    made = F.batch_norm(input, *of_batch, self.weight, self.bias, True, 1.0, self.eps)
    with torch.no_grad():
        for kept, new in zip((mean, variance), of_batch, strict=True):
            factor = 1.0 / count.to(kept.dtype)
            kept.copy_(new * factor + kept * (1.0 - factor))
    return made
