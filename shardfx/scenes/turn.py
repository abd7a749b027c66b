"""What is done to a crop, mirrored and turned by right angles, which part of it a tile of the result is made of, and
which inputs are crops of the image at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from shardfx.ir.errors import Error

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


def scales(shape: tuple[int, ...], crop: tuple[int, ...], name: str, scaled: bool, asked: bool) -> tuple[Fraction, ...]:
    """The scale of the last dims of an input, beside those of a crop; () where they are something else (a label).

    Raises:
        Error: they may be either, and what is cropped or turned hangs on it.
    """
    space = shape[-len(crop) :]
    found = [Fraction(a, b) for a, b in zip(space, crop, strict=True)] if len(space) == len(crop) else []
    regular = len(set(found)) == 1 and 1 in (found[0].numerator, found[0].denominator)
    if scaled or (asked and regular and found[0] != 1):
        if not (scaled and regular):
            raise Error(
                f"is {name} an image of another scale?" if not scaled else f"{name} is of no scale beside the image",
                where="TileDataset(scaled=..., labels=...)",
                expected=f"the last {len(crop)} dims {crop}, or all by one factor smaller or larger",
                got=shape,
                remedy=f"scaled=({name!r},) if it is one, labels=({name!r},) if it is not",
            )
        return tuple(found)
    return tuple(found) if regular and found[0] == 1 else ()
