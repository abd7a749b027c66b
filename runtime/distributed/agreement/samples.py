"""Numbers for some elements of a tensor: equal ones for equal tensors, and hardly ever for others.

What one rank alone wrote into it shows only by chance; what an optimizer, a loader or a checkpoint did otherwise is in
every element.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from math import isnan
from typing import NamedTuple

import torch

Tensor = torch.Tensor
FEW, MANY = 512, 4096
"""So many elements at most of an input, at each call; and of what is stored."""


def some(x: Tensor, at_most: int) -> Tensor:
    """A part of ``x`` with elements from all over it."""
    if x.numel() <= at_most:
        return x.detach()
    each = max(1, int(at_most ** (1 / x.dim())))
    return x.detach()[tuple([slice(None, None, -(-size // each)) for size in x.shape])]


def sampled(tensors: Iterable[Tensor]) -> int:
    """A number for some elements of tensors in the memory of the host: equal for equal bits."""
    found = 0
    for x in tensors:
        if x.device.type == "cpu" and x.numel():
            found = zlib.crc32(some(x, FEW).contiguous().reshape(-1).view(torch.uint8).numpy().data, found)
    return found


class Sketch(NamedTuple):
    """Some elements, as their sum with weights and their norm. Ranks that compute the same round otherwise, where they
    have other processors or threads, so that sketches are compared up to what rounding may do."""

    sum: float
    norm: float

    @staticmethod
    def of(x: Tensor | None) -> Sketch:
        """That of a tensor, if there is one."""
        if x is None or not x.numel():
            return Sketch(0.0, 0.0)
        part = some(x, MANY).reshape(-1)
        part = torch.view_as_real(part.resolve_conj()).reshape(-1) if part.is_complex() else part
        values = part.to(torch.float64)
        weights = torch.arange(1, 1 + values.numel(), dtype=torch.float64, device=x.device).cos()
        return Sketch(*torch.stack([(values * weights).sum(), values.norm()]).tolist())

    def numbers(self) -> tuple[int, int]:
        """Both as they lie in memory, as whole numbers."""
        return struct.unpack("=qq", struct.pack("=dd", *self))

    @staticmethod
    def said(*numbers: int) -> Sketch:
        """One whose numbers another rank said."""
        return Sketch(*struct.unpack("=dd", struct.pack("=qq", *numbers)))

    def is_like(self, other: Sketch, tolerance: float) -> bool:
        """Whether both may be of the same tensor."""
        if any(map(isnan, (*self, *other))):
            return str(self) == str(other)
        if self == other:
            return True
        near = tolerance * max(self.norm, other.norm)
        return abs(self.sum - other.sum) <= near and abs(self.norm - other.norm) <= near


class Replica(NamedTuple):
    """What this rank holds of a parameter or buffer: which piece of it, or no piece, as no other rank has it."""

    name: str
    piece: int
    tensor: Tensor | None
    dtype: torch.dtype


def tolerance_of(dtype: torch.dtype) -> float:
    """What rounding may do to a sketch, as a part of the norm."""
    return float(torch.finfo(dtype).eps) ** 0.5 if dtype.is_floating_point or dtype.is_complex else 0.0
