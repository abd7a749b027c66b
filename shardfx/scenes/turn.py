"""What is done to a crop: mirrored, turned by right angles; and which part of it a tile of the result is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

Window = tuple[slice, ...]


@dataclass(frozen=True)
class Turn:
    """The last dims of an array, of which the last two may change places, and which are then mirrored (``flips``).

    That is each of the eight ways to lay a square: a turn by 90 degrees is ``swap`` and one mirrored dim.
    """

    flips: tuple[bool, ...]
    swap: bool = False

    def source(self, window: Window, sizes: Sequence[int]) -> Window:
        """Where a window of the result, whose dims have these sizes, lies in what is turned."""
        found = [
            slice(size - each.stop, size - each.start) if flip else each
            for each, size, flip in zip(window, sizes, self.flips, strict=True)
        ]
        return (*found[:-2], found[-1], found[-2]) if self.swap else tuple(found)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` turned; dims before the last few stay."""
        turned = x.transpose(-1, -2) if self.swap else x
        dims = [i - len(self.flips) for i, flip in enumerate(self.flips) if flip]
        return (turned.flip(dims) if dims else turned).contiguous()


AUGMENT = {"hflip": -1, "vflip": -2, "dflip": -3}
"""Which dim is mirrored."""
ROT90 = "rot90"


def drawn(augment: Sequence[str], space: int, generator: torch.Generator) -> Turn:
    """One of the turns that ``augment`` allows, each of its words by the toss of a coin (``rot90``: of four turns)."""
    flips = [False] * space
    for word in augment:
        if word in AUGMENT and number_below(2, generator):
            flips[AUGMENT[word]] ^= True
    turns = number_below(4, generator) if ROT90 in augment else 0
    if turns in (1, 2):
        flips[-2] ^= True
    if turns in (2, 3):
        flips[-1] ^= True
    return Turn(tuple(flips), bool(turns % 2))


def number_below(below: int, generator: torch.Generator) -> int:
    """A whole number, at random."""
    return int(torch.randint(below, (), generator=generator))
