"""How one dim is cut: :class:`Cut`, and the algebra of cuts.

A dim may be a *compound*: the product of sub-dims, each cut on its own. ``(8{dp} 128{tp})`` is a dim of 1024 that was
once ``[8, 128]``, the first cut over dp and the second over tp.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .mesh import Mesh

Coords = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Part:
    """A sub-dim of ``size`` elements, cut over ``axes``, major first."""

    size: int
    axes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Cut:
    """How one dim is cut. One part: plain (its size is the dim's own, and not kept). Several: a compound."""

    axes: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.axes)

    def sub(self, size: int) -> tuple[Part, ...]:
        """The parts, for a dim of ``size``: a plain cut is one part."""
        return self.parts or (Part(size, self.axes),)

    def text(self, size: int | str) -> str:
        """The dim as it is printed: ``64{tp}``, or ``(3 64{tp})`` where it is compound. ``size`` is the global size,
        or "."."""
        if self.parts:
            return "(" + " ".join(_sized(p.size, p.axes) for p in self.parts) + ")"
        return _sized(size, self.axes)


WHOLE = Cut()


def _sized(size: int | str, axes: tuple[str, ...]) -> str:
    return f"{size}{{{','.join(axes)}}}" if axes else str(size)


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and length of a chunk, as torch.chunk and DTensor split: ceil(size / parts) each, the last ones less.

    Where that would leave nothing for the last ones though there is enough (4 rows for 3 ranks: 2, 2, 0), all get
    something instead (2, 1, 1): the largest piece, which all wait for, is the same.
    """
    per = -(-size // parts)
    if per * (parts - 1) >= size >= parts:
        least, more = divmod(size, parts)
        return index * least + min(index, more), least + (index < more)
    start = min(index * per, size)
    return start, min(start + per, size) - start


def bounds(size: int, axes: Iterable[str], mesh: Mesh, coords: Coords) -> tuple[int, int]:
    """Start and length of what a rank holds of a part that is cut over ``axes``, one after the other."""
    start = 0
    for axis in axes:
        offset, size = chunk(size, mesh[axis].size, coords[axis])
        start += offset
    return start, size


def in_stretches(cut: Cut) -> bool:
    """Whether ranks hold several stretches of the dim: a part is cut within another."""
    before = 1
    for part in cut.parts:
        if part.axes and before > 1:
            return True
        before *= part.size
    return False


def smallest(size: int, axes: Iterable[str], mesh: Mesh) -> int:
    """The size of the smallest piece of a part that is cut over ``axes``: the last one's."""
    for axis in axes:
        n = mesh[axis].size
        size = chunk(size, n, n - 1)[1]
    return size


def compound(parts: Sequence[Part], mesh: Mesh) -> Cut:
    """The cut made of ``parts``, in normal form: parts that can be one are one, one part of size 1 stands in front."""
    if any(part.size == 0 for part in parts):
        return Cut(tuple(axis for part in parts for axis in part.axes))
    ones = tuple(axis for part in parts if part.size == 1 for axis in part.axes)
    merged = [Part(1, ones)] if ones else []
    for part in parts:
        if part.size == 1:
            continue
        if merged and merged[-1].size > 1:
            last = merged[-1]
            extent = mesh.extent(last.axes)
            if extent == last.size or (not part.axes and last.size % extent == 0):
                merged[-1] = Part(last.size * part.size, last.axes + part.axes)
                continue
        merged.append(part)
    if not merged:
        return WHOLE
    if len(merged) == 1:
        return Cut(merged[0].axes)
    return Cut(tuple(a for p in merged for a in p.axes), tuple(merged))


def project(cut: Cut, size: int, factors: Sequence[int], mesh: Mesh) -> tuple[Cut, ...] | None:
    """The cuts of the sub-dims ``factors`` (their product is ``size``) that make up ``cut``; None if there are none.

    ``8{dp}`` of sub-dims (2, 4) is (2{dp}, 4); ``6{tp}`` over 2 ranks of (3, 2) has none: a rank would hold
    one and a half of three.
    """
    if not cut.axes:
        return (WHOLE,) * len(factors)
    if len(factors) == 1:
        return (cut,)
    if size == 0:
        return None
    pending = list(reversed(cut.sub(size)))
    result = []
    for factor in factors:
        need, got = factor, []
        if factor == 1 and pending and pending[-1].size == 1:
            got.append(pending.pop())
        while need > 1:
            part = pending.pop()
            if part.size == 1 and not part.axes:
                continue
            if need % part.size == 0:
                got.append(part)
                need //= part.size
                continue
            if part.size % need:
                return None
            head = _split_axes(part, need, mesh)
            if head is None:
                return None
            got.append(head)
            pending.append(Part(part.size // need, part.axes[len(head.axes) :]))
            need = 1
        result.append(compound(got, mesh))
    if any(part.axes for part in pending):
        return None
    return tuple(result)


def _split_axes(part: Part, size: int, mesh: Mesh) -> Part | None:
    """The major ``size`` elements' share of a larger part's axes, if the cut falls between whole elements."""
    extent, taken = 1, 0
    for axis in part.axes:
        if extent == size or size % (extent * mesh[axis].size):
            break
        extent *= mesh[axis].size
        taken += 1
    if taken < len(part.axes) and extent != size:
        return None
    return Part(size, part.axes[:taken])


def common_parts(size: int, cuts: Sequence[Cut], mesh: Mesh) -> tuple[list[int], list[tuple[Cut, ...]]] | None:
    """A dim as sub-dims in which all the cuts are plain, and each cut there; None where their parts do not nest."""
    ends = {size}
    ones = size > 1 and any(cut.sub(size)[0].size == 1 for cut in cuts)
    for cut in cuts:
        end = 1
        for part in cut.sub(size):
            end *= part.size
            ends.add(end)
    ordered = sorted(ends - {0})
    factors = [b // a for a, b in itertools.pairwise([1, *ordered])] if size else [0]
    if math.prod(factors) != size:
        return None
    factors = [1] * ones + [f for f in factors if f != 1] or [1]
    columns = [project(cut, size, factors, mesh) for cut in cuts]
    plain = [column for column in columns if column is not None and not any(c.parts for c in column)]
    return (factors, plain) if len(plain) == len(cuts) else None


def join(a: Cut, b: Cut, size: int, mesh: Mesh) -> Cut | None:
    """The cut that has all of two cuts which agree, sub-dim by sub-dim, as far as both go; None if they don't."""
    if a == b or not b.axes:
        return a
    if not a.axes:
        return b
    if not a.parts and not b.parts:
        short, long = sorted((a, b), key=lambda cut: len(cut.axes))
        return long if long.axes[: len(short.axes)] == short.axes else None
    refined = common_parts(size, (a, b), mesh)
    if refined is None:
        return None
    factors, (left, right) = refined
    parts = []
    for part, x, y in zip(factors, left, right, strict=True):
        less, more = sorted((x.axes, y.axes), key=len)
        if more[: len(less)] != less:
            return None
        parts.append(Part(part, more))
    axes = [axis for part in parts for axis in part.axes]
    return compound(parts, mesh) if len(axes) == len(set(axes)) else None


def without(cut: Cut, axis: str, mesh: Mesh) -> Cut:
    """The cut with ``axis``, and all that is cut within it in the same sub-dim, left out."""
    if axis not in cut.axes:
        return cut
    if not cut.parts:
        return Cut(cut.axes[: cut.axes.index(axis)])
    parts = [Part(p.size, p.axes[: p.axes.index(axis)] if axis in p.axes else p.axes) for p in cut.parts]
    return compound(parts, mesh)
