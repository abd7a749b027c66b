"""What is known of a dim of a value that a window of a scene gives: of which rows of the scene it is made.

args.0      64 rows of 1000            1 for each row of the scene, all of them right
conv 3      64 rows of 1000            1, rows 1 to 62 right: the others would see beyond the window
pool 2      32 rows of 500             1/2, rows 1 to 30 right
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from shardfx.ir.cut import Window


class NotLocal(Exception):
    """Why rows do not follow from a window of the scene, in words."""


class Rows(NamedTuple):
    """A (sub-)dim that follows a dim of the scene: ``scale`` rows for each of the scene's. Of its ``size`` rows, those
    from ``low`` to ``high`` (not included) are those of the whole scene, which has ``whole``, wherever the window
    lies."""

    axis: int
    size: int
    whole: int
    scale: Fraction
    low: int
    high: int

    def split(self, size: int) -> tuple[Rows, Plain]:
        """``size`` blocks, and the rows in each."""
        per = self.size // size
        if self.whole % per:
            raise NotLocal("takes rows together, of which the scene has not a whole number of groups")
        low, high = -(-self.low // per), self.high // per
        return Rows(self.axis, size, self.whole // per, self.scale / per, low, high), Plain(per)

    def times(self, per: int) -> Rows:
        """``per`` rows in the place of each."""
        more = (self.size * per, self.whole * per, self.scale * per, self.low * per, self.high * per)
        return Rows(self.axis, *more)

    def seen(self, window: Window, whole: Window) -> Rows:
        """The rows of another dim that are made of these through a window; ``whole`` is that of the whole scene.

        Raises:
            NotLocal: rows of the whole scene are made of others than those of the window.
        """
        if window.step < 0:
            raise NotLocal("turns the image round, the last row to the front")
        if shape_of(window) != shape_of(whole) or window.step == 0:
            raise NotLocal("makes rows of others, in a larger image: its scale is that of the sizes")
        step, per, size = window.step, window.per, window.size
        low = bisect_left(range(size), self.low, key=lambda o: (step * o + window.low) // per)
        high = bisect_left(range(size), self.high, key=lambda o: (step * o + window.high) // per)
        return Rows(self.axis, size, whole.size, self.scale * per / step, low, high)

    def both(self, other: Rows) -> Rows:
        """What is right of two values that are worked on row by row.

        Raises:
            NotLocal: they are rows of other places.
        """
        if (self.axis, self.size, self.whole, self.scale) != (other.axis, other.size, other.whole, other.scale):
            raise NotLocal("brings rows together that lie in other places of the scene")
        return self._replace(low=max(self.low, other.low), high=min(self.high, other.high))

    @property
    def margin(self) -> Fraction:
        """How many rows of the scene, at the most of its two sides, are not right of the window."""
        return max(Fraction(self.low), Fraction(self.size - self.high)) / self.scale


class Plain(NamedTuple):
    """A (sub-)dim that has nothing to do with the scene's; ``uniform``: all along it is the same."""

    size: int
    uniform: bool = False

    def split(self, size: int) -> tuple[Plain, Plain]:
        """``size`` blocks, and what is in each."""
        return Plain(size, self.uniform), Plain(self.size // size, self.uniform)


Part = Rows | Plain
Parts = tuple[Part, ...]


def shape_of(window: Window) -> tuple[Fraction, ...]:
    """A window by its numbers for one row: equal for windows that reach alike, whatever the sizes are."""
    return tuple(Fraction(each, window.per) for each in (window.step, window.low, window.high))


def taken(parts: Sequence[Part], sizes: Sequence[int]) -> list[Parts]:
    """The parts of a dim, shared among sub-dims of these sizes, major first.

    Raises:
        NotLocal: they do not nest.
    """
    left, found = merged(parts), []
    for size in sizes:
        got: list[Part] = []
        while size > 1:
            if not left:
                raise NotLocal("looks at the image in another form")
            part = left.pop(0)
            if size % part.size == 0:
                got.append(part)
                size //= part.size
            elif part.size % size == 0:
                head, rest = part.split(size)
                got.append(head)
                left.insert(0, rest)
                size = 1
            else:
                raise NotLocal("looks at the image in another form")
        found.append(tuple(got))
    if any(isinstance(part, Rows) for part in left):
        raise NotLocal("has one row, where the whole scene has more: the window is too small for it")
    return found


def merged(parts: Sequence[Part]) -> list[Part]:
    """The same parts, of which those that have nothing to do with the scene are one where they stand side by side."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, Plain) and isinstance(last, Plain):
            found[-1] = Plain(last.size * part.size, last.uniform and part.uniform)
        elif isinstance(part, Rows) or part.size != 1:
            found.append(part)
    return found


def as_one(parts: Parts) -> Rows | None:
    """Parts that are rows of the scene, each with what lies in it; None where they have none of these.

    Raises:
        NotLocal: rows lie within something else.
    """
    if not any(isinstance(part, Rows) for part in parts):
        return None
    first, *rest = parts
    if not isinstance(first, Rows) or any(isinstance(part, Rows) for part in rest):
        raise NotLocal("has rows of the scene within something else")
    for part in rest:
        first = first.times(part.size)
    return first


def joined(a: Parts, b: Parts) -> Parts:
    """What is known of a sub-dim by two operands that share it.

    Raises:
        NotLocal: one follows the scene, and the other has a value for each row.
    """
    if all(isinstance(part, Plain) and part.uniform for part in b):
        return a
    if all(isinstance(part, Plain) and part.uniform for part in a):
        return b
    if not any(isinstance(part, Rows) for part in (*a, *b)):
        return a
    if len(a) != len(b):
        one, other = as_one(a), as_one(b)
        if one is None or other is None:
            raise NotLocal("has a value of its own for each place of the image")
        return (one.both(other),)
    found: list[Part] = []
    for x, y in zip(a, b, strict=True):
        if isinstance(x, Rows) != isinstance(y, Rows) or x.size != y.size:
            raise NotLocal("has a value of its own for each place of the image")
        found.append(x.both(y) if isinstance(x, Rows) and isinstance(y, Rows) else x)
    return tuple(found)
