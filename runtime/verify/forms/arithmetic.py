"""Sums with factors, and products, of values: as sets, so that no order matters.

A sum is ``constant + sum(factor * value)``, a product ``product(value) / product(value)``. Nothing is cancelled: of
infinities and NaN ``x - x`` is not 0, and ``x / x`` not 1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

Number = int | float
DIGITS = 13
"""Factors that differ by rounding are one: ``x / sqrt(2)`` is ``x * sqrt(0.5)``."""


def rounded(number: Number) -> Number:
    """A number as it is compared."""
    return number if isinstance(number, int) else float(f"{number:.{DIGITS - 1}e}")


@dataclass(frozen=True, eq=False)
class Sum:
    """``constant`` and values with their factors; a value stands twice where its factors have other signs.

    It is reckoned with its factors as they are, and rounded where it is compared: what is rounded again and again ends
    elsewhere, as twice 1/12 and 1/6.
    """

    constant: Number
    parts: tuple[tuple[int, Number], ...]

    @cached_property
    def compared(self) -> tuple[Number, tuple[tuple[int, Number], ...]]:
        """Equal for sums that are one."""
        return rounded(self.constant), tuple(sorted((value, rounded(by)) for value, by in self.parts))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sum) and self.compared == other.compared

    def __hash__(self) -> int:
        return hash(self.compared)

    def times(self, factor: Number) -> Sum:
        """All of it by a factor."""
        return Sum(self.constant * factor, tuple((value, by * factor) for value, by in self.parts))

    @property
    def values(self) -> list[int]:
        """The numbers of the values."""
        return [value for value, _ in self.parts]

    @property
    def number(self) -> bool:
        """Whether it is a number alone."""
        return not self.parts


def total(sums: Iterable[Sum]) -> Sum:
    """The sum of sums."""
    constant: Number = 0
    parts: dict[tuple[int, bool], Number] = {}
    for each in sums:
        constant += each.constant
        for value, by in each.parts:
            key = value, by > 0
            parts[key] = parts.get(key, 0) + by
    return Sum(constant, tuple((value, by) for (value, _), by in sorted(parts.items())))


@dataclass(frozen=True)
class Product:
    """Values that are multiplied, each so many times, and values that this is divided by."""

    over: tuple[tuple[int, int], ...]
    under: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(over: Mapping[int, int], under: Mapping[int, int]) -> Product:
        """In order."""
        return Product(tuple(sorted(over.items())), tuple(sorted(under.items())))

    @property
    def values(self) -> list[int]:
        """The numbers of the values."""
        return [value for value, _ in (*self.over, *self.under)]

    def inverse(self) -> Product:
        """One divided by it."""
        return Product(self.under, self.over)

    @property
    def alone(self) -> int | None:
        """The value, where it is nothing but that."""
        return self.over[0][0] if not self.under and len(self.over) == 1 and self.over[0][1] == 1 else None


def product(factors: Iterable[Product]) -> Product:
    """The product of products."""
    over, under = Counter[int](), Counter[int]()
    for each in factors:
        over.update(dict(each.over))
        under.update(dict(each.under))
    return Product.of(over, under)


def plain(number: object) -> bool:
    """Whether values may be multiplied by a number, whatever they are: what is 0 or infinite makes NaN of some."""
    return isinstance(number, (int, float)) and math.isfinite(number) and number != 0
