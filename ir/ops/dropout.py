"""Random ops of the IR: a mask is a function of a seed, the node's number and the *box* of the whole that is drawn.

So replicas agree, shards differ, and a seed reproduces, whatever the order in which ranks run. The seed is a tensor
that only the device reads (:mod:`.computing.hashing`). Needs torch alone.
"""

from __future__ import annotations

from itertools import accumulate
from math import prod
from operator import mul

import torch
from torch import Tensor

from .computing.hashing import kept, keyed, mix_

_library = torch.library.Library("shardfx", "DEF")
_library.define("dropout(Tensor x, float p, Tensor seed, int number, int[] box) -> (Tensor, Tensor)")
_library.define("draw(Tensor seed, int number) -> Tensor")


def _dropout(x: Tensor, p: float, seed: Tensor, number: int, box: list[int]) -> tuple[Tensor, Tensor]:
    rows, columns = _grid(x.shape)
    hashes = mix_(torch.arange(rows + columns, device=x.device) + keyed(seed, number, *box))
    keep = kept(hashes[:rows, None], hashes[rows:], p).view(x.shape)
    return (x * keep).mul_(1.0 / (1.0 - p) if p < 1 else 0.0), keep


def _grid(shape: torch.Size) -> tuple[int, int]:
    """The elements of a tensor as rows and columns: as few of both together as its dims allow."""
    size = prod(shape)
    found = [(rows, size // rows) for rows in accumulate(shape[:-1], mul, initial=1) if rows]
    return min(found, key=sum)


def _draw_number(seed: Tensor, number: int) -> Tensor:
    return mix_(keyed(seed, number))


# Composite, so that a compiler sees what they are made of, and fuses it with what stands around.
_library.impl("dropout", _dropout, "CompositeImplicitAutograd")
_library.impl("draw", _draw_number, "CompositeImplicitAutograd")

dropout = torch.ops.shardfx.dropout.default
draw = torch.ops.shardfx.draw.default
"""A number (int64) of a seed and the number of a draw: another one for each."""
