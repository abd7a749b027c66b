"""Counter-based random numbers: hashes of a seed tensor and of an element's global index.

    y, mask = shardfx.dropout(x, p, seed, number, box)                    ``box``: where the shard begins, by dim
    number  = shardfx.draw(seed, number)                                  int64, another one for each ``number``

So replicas agree, shards differ, and a seed reproduces, whatever the order in which ranks run. No number is read on the
host: a step never waits for the device, and a CUDA graph draws anew at each replay. Plain integer ops wrap alike on CPU
and GPU: both draw the same. Needs torch alone.
"""

from __future__ import annotations

from itertools import accumulate
from math import prod
from operator import mul

import torch
from torch import Tensor

from .computing.library import Ints, define

GOLDEN = -0x61C8864680B583EB
"""The increment of splitmix64: 2**64 over the golden ratio."""
FACTORS = ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15))
"""Shifts and factors of the finaliser of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom generators,
2014), as signed numbers."""
LAST = 31
"""The last shift."""


def mix_(x: Tensor) -> Tensor:
    """The finaliser of splitmix64, in place: each bit (of an int64) depends on all bits."""
    for shift, factor in FACTORS:
        x.bitwise_xor_((x >> shift).bitwise_and_(2 ** (64 - shift) - 1)).mul_(factor)
    return x.bitwise_xor_((x >> LAST).bitwise_and_(2 ** (64 - LAST) - 1))


def keyed(seed: Tensor, *parts: int) -> Tensor:
    """A key (0-d, int64) of a seed and integers. Adjacent seeds have unrelated keys."""
    salt = 0
    for part in parts:
        salt = salt + part & 2**64 - 1
        for shift, factor in FACTORS:
            salt = (salt ^ salt >> shift) * factor & 2**64 - 1
        salt ^= salt >> LAST
    return seed * GOLDEN + (salt - 2**64 if salt >= 2**63 else salt)


def kept(rows: Tensor, columns: Tensor, p: float) -> Tensor:
    """The dropout mask (bool) of ``rows x columns``, hashes (int64) that broadcast; True with probability ``1 - p``.

    A product of a hash of the row and one of the column, modulo 2**32, is uniform and independent of those beside it.
    What is added and multiplied then leaves no two rows or columns in proportion. That is three passes over the mask,
    where a hash of each element's own number takes eleven.
    """
    product = rows.to(torch.int32) * columns.to(torch.int32)
    product.bitwise_xor_((rows >> 32).to(torch.int32)).mul_((columns >> 32).to(torch.int32).bitwise_or_(1))
    return product >= min(round(p * 2**32) - 2**31, 2**31 - 1)


# Composite, so that a compiler sees what they are made of, and fuses it with what stands around.
@define("dropout(Tensor x, float p, Tensor seed, int number, int[] box) -> (Tensor, Tensor)", composite="Implicit")
def dropout(x: Tensor, p: float, seed: Tensor, number: int, box: Ints) -> tuple[Tensor, Tensor]:
    """``x`` scaled where the mask keeps it, and the mask."""
    rows, columns = _grid(x.shape)
    hashes = mix_(torch.arange(rows + columns, device=x.device) + keyed(seed, number, *box))
    keep = kept(hashes[:rows, None], hashes[rows:], p).view(x.shape)
    return (x * keep).mul_(1.0 / (1.0 - p) if p < 1 else 0.0), keep


def _grid(shape: torch.Size) -> tuple[int, int]:
    """A factorization of a shape into rows and columns, with the least sum that its dims allow."""
    size = prod(shape)
    found = [(rows, size // rows) for rows in accumulate(shape[:-1], mul, initial=1) if rows]
    return min(found, key=sum)


@define("draw(Tensor seed, int number) -> Tensor", composite="Implicit")
def draw(seed: Tensor, number: int) -> Tensor:
    """A random number (int64) of a seed and the index of a draw."""
    return mix_(keyed(seed, number))
