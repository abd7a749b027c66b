"""Placements: which part of a value each rank holds.

A :class:`Cut` says how one tensor dim is cut; a :class:`Spec` has one per dim, and the axes over which the
value is still a partial sum. The local shape of a rank is *derived* from type and spec.

A dim may be a *compound*: the product of sub-dims, each cut on its own. ``(8{dp} 128{tp})`` is a dim of 1024
that was once ``[8, 128]``, the first cut over dp and the second over tp. That is what a ``view`` makes of two
cut dims, and how a fused ``qkv`` weight of ``3 * 64`` rows is cut by heads: ``(3 64{tp})``.

    >>> mesh = Mesh(dp=2, tp=2)
    >>> Spec.parse("dp tp, -", mesh).local_shape((8, 3), mesh, {"dp": 0, "tp": 1})
    (2, 3)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from .errors import Error
from .mesh import Mesh

REDUCTIONS = ("sum", "max", "min", "avg", "product")
Coords = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class TensorType:
    """The *global* shape and the dtype of a value."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


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
        if self.parts:
            return "(" + " ".join(_sized(p.size, p.axes) for p in self.parts) + ")"
        return _sized(size, self.axes)


WHOLE = Cut()


def _sized(size: int | str, axes: tuple[str, ...]) -> str:
    return f"{size}{{{','.join(axes)}}}" if axes else str(size)


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and length of a chunk, as torch.chunk and DTensor split: ceil(size / parts) each, the last ones less."""
    per = -(-size // parts)
    start = min(index * per, size)
    return start, min(start + per, size) - start


def bounds(size: int, axes: Iterable[str], mesh: Mesh, coords: Coords) -> tuple[int, int]:
    """Start and length of what a rank holds of a part that is cut over ``axes``, one after the other."""
    start = 0
    for axis in axes:
        offset, size = chunk(size, mesh[axis].size, coords[axis])
        start += offset
    return start, size


def smallest(size: int, axes: Iterable[str], mesh: Mesh) -> int:
    """The size of the smallest piece of a part that is cut over ``axes``: the last one's."""
    for axis in axes:
        n = mesh[axis].size
        size = max(size - -(-size // n) * (n - 1), 0)
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


@dataclass(frozen=True)
class Spec:
    """The placement of a value: a :class:`Cut` per dim, and the (axis, reduction) pairs over which it is partial.

    The pairs are a set: they are kept sorted, so that equal placements are equal.
    """

    dims: tuple[Cut, ...]
    partial: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        used = [axis for cut in self.dims for axis in cut.axes] + [axis for axis, _ in self.partial]
        if len(used) != len(set(used)):
            twice = next(axis for axis in used if used.count(axis) > 1)
            raise Error(
                f"mesh axis {twice!r} is used twice in one placement",
                expected="each axis at most once over all dims and the partial sum",
                got=self.text(),
                remedy="cut one dim by it, or use another axis",
            )
        if self.partial:
            for _, op in self.partial:
                if op not in REDUCTIONS:
                    raise Error(f"unknown reduction {op!r}", expected=f"one of {', '.join(REDUCTIONS)}", got=op)
            object.__setattr__(self, "partial", tuple(sorted(self.partial)))

    def __hash__(self) -> int:
        return hash((self.dims, self.partial))

    @staticmethod
    def whole(ndim: int) -> Spec:
        """Every rank holds all of it."""
        return _whole(ndim)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that cut some dim."""
        return tuple(axis for cut in self.dims for axis in cut.axes)

    @property
    def partial_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis, _ in self.partial)

    @property
    def is_whole(self) -> bool:
        return not self.partial and not any(cut.axes for cut in self.dims)

    def reduced(self) -> Spec:
        """The same, with nothing partial."""
        return Spec(self.dims) if self.partial else self

    def with_dim(self, dim: int, cut: Cut) -> Spec:
        return Spec((*self.dims[:dim], cut, *self.dims[dim + 1 :]), self.partial)

    def box(self, shape: Sequence[int], mesh: Mesh, coords: Coords) -> tuple[tuple[int, int], ...]:
        """Start and length of what a rank holds, for every *sub-dim* of the shape, in order."""
        return tuple(
            bounds(part.size, part.axes, mesh, coords)
            for cut, size in zip(self.dims, shape, strict=True)
            for part in cut.sub(size)
        )

    def sub_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The global shape with compound dims taken apart: what :meth:`box` indexes."""
        return tuple(part.size for cut, size in zip(self.dims, shape, strict=True) for part in cut.sub(size))

    def local_shape(self, shape: Sequence[int], mesh: Mesh, coords: Coords) -> tuple[int, ...]:
        """The shape that the rank at ``coords`` holds."""
        return tuple(
            math.prod(bounds(p.size, p.axes, mesh, coords)[1] for p in cut.sub(size)) if cut.axes else size
            for cut, size in zip(self.dims, shape, strict=True)
        )

    def local_numel(self, shape: Sequence[int], mesh: Mesh) -> int:
        """The elements on the rank that holds most (rank 0)."""
        return math.prod(self.local_shape(shape, mesh, dict.fromkeys(mesh.names, 0)))

    def text(self, shape: Sequence[int] | None = None, dtype: str = "") -> str:
        sizes: Sequence[int | str] = shape if shape is not None else ["."] * len(self.dims)
        body = ", ".join(cut.text(size) for cut, size in zip(self.dims, sizes, strict=True))
        by_op: dict[str, list[str]] = {}
        for axis, op in self.partial:
            by_op.setdefault(op, []).append(axis)
        tail = "".join(f" {'+' if op == 'sum' else op}{{{','.join(axes)}}}" for op, axes in by_op.items())
        return f"{dtype}[{body}]{tail}"

    def __str__(self) -> str:
        return self.text()

    @classmethod
    def parse(cls, text: str, mesh: Mesh, ndim: int | None = None, *, where: str | None = None) -> Spec:
        """A user's spec: per dim its mesh axes, major first, or ``-`` for whole: ``"dp tp, -"``."""
        entries = [entry.strip() for entry in text.split(",")] if text.strip() else []
        if ndim is not None and len(entries) != ndim:
            raise Error(
                "a spec does not have one entry per dim",
                where=where,
                expected=f"{ndim} entries, such as {', '.join(['-'] * ndim)!r}",
                got=repr(text),
                remedy="write the axes of each dim, or - for a whole dim, separated by commas",
            )
        dims = []
        for entry in entries:
            axes = () if entry in ("-", "") else tuple(entry.split())
            for axis in axes:
                if axis not in mesh.names:
                    raise Error(
                        f"unknown mesh axis {axis!r}",
                        where=where,
                        expected=f"one of {', '.join(mesh.names)}",
                        got=repr(text),
                        remedy="spell it as in the Mesh, or add the axis there",
                    )
            dims.append(Cut(axes))
        try:
            return cls(tuple(dims))
        except Error as error:
            raise Error(error.what, where=where, expected=error.expected, got=repr(text), remedy=error.remedy) from None


@lru_cache(maxsize=64)
def _whole(ndim: int) -> Spec:
    return Spec((WHOLE,) * ndim)
