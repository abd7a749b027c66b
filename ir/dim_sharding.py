"""How one dim is sharded: :class:`DimSharding`, and the algebra of shardings.

A dim may be a *compound*: the product of sub-dims, each sharded on its own. ``(8{dp} 128{tp})`` is a dim of 1024 that
was once ``[8, 128]``, the first sharded over dp and the second over tp.

And it may be sharded in *rows that overlap*: those that the chunks of another dim need through a :class:`Window`.
``64 for 32{h} by 2o-1 to 2o+1`` is a dim of 64 of which a rank has rows 2o-1 to 2o+1 for each o in its chunk of 32:
what a convolution of kernel 3 and stride 2 reads.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from .errors import Error
from .mesh import Mesh

Coords = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Part:
    """A sub-dim of ``size`` elements, sharded over ``axes``, major first."""

    size: int
    axes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Window:
    """The rows of one dim that row o of another dim, of ``size`` rows, depends on.

    They are ``(step * o + low) // per`` to ``(step * o + high) // per``, as far as there are such rows; of a dim that
    is flipped the step is -1. If it ``wraps``, the first row comes behind the last one.
    """

    size: int
    step: int
    per: int
    low: int
    high: int
    wraps: bool = False

    def __post_init__(self) -> None:
        if self.size < 0 or self.per < 1:
            raise Error("this is no window", expected="rows (2o-1)/3 of o, not (o)/0", got=str(self))

    def reach(self, start: int, length: int) -> tuple[int, int]:
        """The first and the last row that ``length`` rows from ``start`` on depend on; they may not exist."""
        ends = self.step * start, self.step * (start + length - 1)
        return (min(ends) + self.low) // self.per, (max(ends) + self.high) // self.per

    def rows(self, start: int, length: int, full: int) -> tuple[int, int]:
        """Start and length of these rows, clamped to a dim of ``full`` rows: one row at least, if any is made. Rows on
        both sides of the seam of a dim that wraps are no one range: then all."""
        if length == 0 or full == 0:
            return 0, 0
        first, last = self.reach(start, length)
        if self.wraps:
            begin, count = first % full, last - first + 1
            return (begin, count) if begin + count <= full else (0, full)
        first = max(min(first, full - 1), 0)
        return first, max(min(last, full - 1), first) - first + 1

    def within(self, outer: Window) -> Window:
        """The rows of two windows, one behind the other: of those rows of o which ``outer`` gives. Where rows of a
        divided window are stepped over they may be a few more."""
        lost = 0 if self.step in (0, 1) else outer.per - 1
        low, high = sorted((self.step * (outer.low - lost), self.step * outer.high))
        low, high = low + self.low * outer.per, high + self.high * outer.per
        return Window(outer.size, self.step * outer.step, self.per * outer.per, low, high, self.wraps)

    def __str__(self) -> str:
        """``2o-1 to 2o+1``, or ``(o+1)/2 to (o+2)/2``; ``o-1 to o-1 wrapped``."""
        return f"{self._row(self.low)} to {self._row(self.high)}{' wrapped' if self.wraps else ''}"

    def _row(self, more: int) -> str:
        times = {1: "", -1: "-"}.get(self.step, self.step)
        found = f"{times}o{f'{more:+d}' if more else ''}"
        return found if self.per == 1 else f"({found})/{self.per}"


@dataclass(frozen=True, slots=True)
class DimSharding:
    """How one dim is sharded. One part: plain (its size is the dim's own, and not kept). Several: a compound.

    With ``rows``, another dim is sharded plainly over ``axes``, and a rank has the rows that its chunk needs.
    """

    axes: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    rows: Window | None = None

    def __bool__(self) -> bool:
        return bool(self.axes)

    def spans(self, size: int, mesh: Mesh, coords: Coords) -> tuple[tuple[int, int], ...]:
        """Start and length of a rank's shard of each sub-dim of a dim of ``size``."""
        if self.rows is not None:
            return (self.rows.rows(*bounds(self.rows.size, self.axes, mesh, coords), size),)
        return tuple(bounds(part.size, part.axes, mesh, coords) for part in self.sub(size))

    def span(self, size: int, mesh: Mesh, coords: Coords) -> tuple[int, int]:
        """Start and length of the one contiguous range that a rank has of a dim (see :func:`is_strided`)."""
        start, length = 0, 1
        for (first, count), part in zip(self.spans(size, mesh, coords), self.sub(size), strict=True):
            start, length = start * part.size + first, length * count
        return start, length

    def is_even(self, size: int, mesh: Mesh) -> bool:
        """Whether all shards are of equal size."""
        if self.rows is not None:
            return mesh.extent(self.axes) == 1
        return all(part.size % mesh.extent(part.axes) == 0 for part in self.sub(size))

    def sub(self, size: int) -> tuple[Part, ...]:
        """The parts of a dim of ``size``: a plain sharding is one."""
        return self.parts or (Part(size, self.axes),)

    def text(self, size: int | str) -> str:
        """The dim as it is printed: ``64{tp}``, or ``(3 64{tp})``; ``size`` is the global size, or "."."""
        if self.rows is not None:
            return f"{size} for {_sized(self.rows.size, self.axes)} by {self.rows}"
        if self.parts:
            return "(" + " ".join(_sized(p.size, p.axes) for p in self.parts) + ")"
        return _sized(size, self.axes)


REPLICATED = DimSharding()


def _sized(size: int | str, axes: tuple[str, ...]) -> str:
    return f"{size}{{{','.join(axes)}}}" if axes else str(size)


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and length of a chunk, as torch.chunk and DTensor split: ceil(size / parts) each, the last ones less.

    Where that would leave nothing for the last ones though there is enough (4 rows for 3 ranks: 2, 2, 0), all get
    something instead (2, 1, 1): the largest shard, which all wait for, is the same.
    """
    per = -(-size // parts)
    if per * (parts - 1) >= size >= parts:
        least, more = divmod(size, parts)
        return index * least + min(index, more), least + (index < more)
    start = min(index * per, size)
    return start, min(start + per, size) - start


def bounds(size: int, axes: Iterable[str], mesh: Mesh, coords: Coords) -> tuple[int, int]:
    """Start and length of a rank's shard of a part that is sharded over ``axes``, one after the other."""
    start = 0
    for axis in axes:
        offset, size = chunk(size, mesh[axis].size, coords[axis])
        start += offset
    return start, size


def is_strided(sharding: DimSharding) -> bool:
    """Whether shards of the dim are strided, several contiguous ranges each: a minor part is sharded."""
    before = itertools.accumulate((part.size for part in sharding.parts), operator.mul, initial=1)
    return any(part.axes and size > 1 for part, size in zip(sharding.parts, before, strict=False))


def smallest(size: int, axes: Iterable[str], mesh: Mesh) -> int:
    """The size of the smallest shard of a part sharded over ``axes``: the last one's."""
    for n in (mesh[axis].size for axis in axes):
        size = chunk(size, n, n - 1)[1]
    return size


@lru_cache(maxsize=4096)
def in_blocks(blocks: int, each: int, axes: tuple[str, ...], mesh: Mesh) -> bool:
    """Whether ranks that share so many blocks hold what those do that share all elements: 16, and 8 twos, 6, 6, 4."""
    if blocks % mesh.extent(axes) == 0:
        return True
    ranks = mesh.along(dict.fromkeys(mesh.names, 0), axes)
    spans = [(*bounds(blocks, axes, mesh, at), *bounds(blocks * each, axes, mesh, at)) for at in ranks]
    return all((a * each, n * each) == (start, length) for a, n, start, length in spans)


def compound(parts: Sequence[Part], mesh: Mesh) -> DimSharding:
    """The sharding made of ``parts``, in normal form: mergeable parts are merged, one part of size 1 stands in
    front."""
    if any(part.size == 0 for part in parts):
        return DimSharding(tuple(axis for part in parts for axis in part.axes))
    ones = tuple(axis for part in parts if part.size == 1 for axis in part.axes)
    merged = [Part(1, ones)] if ones else []
    for part in parts:
        if part.size == 1:
            continue
        if merged and merged[-1].size > 1:
            last = merged[-1]
            extent = mesh.extent(last.axes)
            if extent == last.size or (not part.axes and in_blocks(last.size, part.size, last.axes, mesh)):
                merged[-1] = Part(last.size * part.size, last.axes + part.axes)
                continue
        merged.append(part)
    return DimSharding(tuple(a for p in merged for a in p.axes), tuple(merged) if len(merged) > 1 else ())


def project(sharding: DimSharding, size: int, factors: Sequence[int], mesh: Mesh) -> tuple[DimSharding, ...] | None:
    """The shardings of the sub-dims ``factors`` (their product is ``size``) that make up ``sharding``; None if there
    are none.

    ``8{dp}`` of sub-dims (2, 4) is (2{dp}, 4); ``6{tp}`` over 2 ranks of (3, 2) has none: they would halve three.
    """
    if not sharding.axes:
        return (REPLICATED,) * len(factors)
    if len(factors) == 1:
        return (sharding,)
    if sharding.rows is not None:
        large = [place for place, factor in enumerate(factors) if factor != 1]
        if len(large) != 1:
            return None
        return tuple(sharding if [place] == large else REPLICATED for place in range(len(factors)))
    if size == 0:
        return None
    pending = list(reversed(sharding.sub(size)))
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
    """The major ``size`` elements' share of a larger part's axes, if the sharding falls between elements."""
    if in_blocks(size, part.size // size, part.axes, mesh):
        return Part(size, part.axes)
    extent, taken = 1, 0
    for axis in part.axes:
        if extent == size or size % (extent * mesh[axis].size):
            break
        extent *= mesh[axis].size
        taken += 1
    if taken < len(part.axes) and extent != size:
        return None
    return Part(size, part.axes[:taken])


def common_parts(
    size: int, shardings: Sequence[DimSharding], mesh: Mesh
) -> tuple[list[int], list[tuple[DimSharding, ...]]] | None:
    """A common refinement of shardings of one dim: sub-dims in which all are plain, and each sharding there; None where
    their parts do not nest."""
    if any(sharding.rows is not None for sharding in shardings):
        return ([size], [(sharding,) for sharding in shardings]) if len(set(shardings)) == 1 else None
    ends = {size}
    ones = size > 1 and any(sharding.sub(size)[0].size == 1 for sharding in shardings)
    for sharding in shardings:
        end = 1
        for part in sharding.sub(size):
            end *= part.size
            ends.add(end)
    ordered = sorted(ends - {0})
    factors = [b // a for a, b in itertools.pairwise([1, *ordered])] if size else [0]
    if math.prod(factors) != size:
        return None
    factors = [1] * ones + [f for f in factors if f != 1] or [1]
    columns = [project(sharding, size, factors, mesh) for sharding in shardings]
    plain = [column for column in columns if column is not None and not any(c.parts for c in column)]
    return (factors, plain) if len(plain) == len(shardings) else None


def join(a: DimSharding, b: DimSharding, size: int, mesh: Mesh) -> DimSharding | None:
    """The union of two shardings that agree, sub-dim by sub-dim, as far as both go; None if they don't.

    loop axes say when, and not where: ``dp`` agrees with ``mb dp``.
    """
    if a == b or not b.axes:
        return a
    if not a.axes:
        return b
    if a.rows is not None or b.rows is not None:
        return None
    if not a.parts and not b.parts:
        both = _joined(a.axes, b.axes, mesh)
        return None if both is None else DimSharding(both)
    refined = common_parts(size, (a, b), mesh)
    if refined is None:
        return None
    factors, (left, right) = refined
    parts = []
    for part, x, y in zip(factors, left, right, strict=True):
        if (both := _joined(x.axes, y.axes, mesh)) is None:
            return None
        parts.append(Part(part, both))
    axes = [axis for part in parts for axis in part.axes]
    return compound(parts, mesh) if len(axes) == len(set(axes)) else None


def _joined(a: tuple[str, ...], b: tuple[str, ...], mesh: Mesh) -> tuple[str, ...] | None:
    """The union of the axes of two shardings of one sub-dim, one of which extends the other."""
    less, more = sorted((a, b), key=len)
    told = tuple(axis for axis in more if not mesh[axis].loop)
    return more if less in (more[: len(less)], told[: len(less)]) else None


def without(sharding: DimSharding, axis: str, mesh: Mesh) -> DimSharding:
    """The sharding without ``axis``, and without all that is sharded within it in the same sub-dim."""
    if axis not in sharding.axes:
        return sharding
    if not sharding.parts:
        return DimSharding(sharding.axes[: sharding.axes.index(axis)])
    parts = [Part(p.size, p.axes[: p.axes.index(axis)] if axis in p.axes else p.axes) for p in sharding.parts]
    return compound(parts, mesh)
