"""Cost curves: measured time of a call by its amount of work, interpolated and extrapolated.

>>> gelu = Curve(((1e4, 2e-6), (1e6, 6e-5)))        # of calls that touch so many bytes
>>> gelu.seconds(1e3), gelu.seconds(5.05e5), gelu.seconds(2e6)
(2e-06, 3.1e-05, 0.00012)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf

import torch

from shardfx.ir.errors import Error

VIEW, TOUCH, PRODUCT, NARROW = "view", "touch", "product", "narrow product"
"""Kinds of calls: views; calls of no other kind, without and with FLOPs; and products of few columns, by the bytes that
they touch."""


def of_dtype(kind: str, dtype: torch.dtype) -> str:
    """The name of the curve of a kind in one dtype: ``"product bfloat16"``."""
    return f"{kind} {str(dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Curve:
    """The time of a call by its amount: FLOPs, or the bytes that it reads and writes if it has none. Rising ``points``
    are interpolated; the time is constant below the first point, and proportional beyond the last."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        rising = all(a < c and b <= d for (a, b), (c, d) in pairwise(self.points))
        if not self.points or not rising or not self.points[0][1] >= 0:
            raise Error(
                "seconds by amount must rise with it",
                expected="((amount, seconds), ...), one at least, of rising amounts, and seconds that do not fall",
                got=self.points,
            )

    @classmethod
    def of(cls, measured: Sequence[tuple[float, float]]) -> Curve:
        """A curve from measured points; each takes no longer than any larger one, as noise only adds time."""
        points = sorted(measured)
        least = [*accumulate((seconds for _, seconds in reversed(points)), min)]
        return cls(tuple((amount, each) for (amount, _), each in zip(points, reversed(least), strict=True)))

    @property
    def rate(self) -> float:
        """The highest rate at any of the points."""
        return max((amount / seconds for amount, seconds in self.points if seconds), default=inf)

    def seconds(self, amount: float) -> float:
        """The time of a call of this amount."""
        for (a, b), (c, d) in pairwise(((0.0, self.points[0][1]), *self.points)):
            if amount <= c:
                return b + (d - b) * (amount - a) / (c - a) if c > a else d
        last, seconds = self.points[-1]
        return seconds * amount / last if last else seconds
