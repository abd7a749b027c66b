"""Placements: which shard of a value each rank has.

A :class:`DimSharding` says how one tensor dim is sharded; a :class:`Spec` has one per dim, and the axes over which the
value is still a partial sum. The local shape of a rank is *derived* from type and spec.

A dim may be a *compound* (:mod:`.dim_sharding`): that is what a ``view`` makes of two sharded dims, and how a fused
``qkv`` weight of ``3 * 64`` rows is sharded by heads: ``(3 64{tp})``.

    >>> mesh = Mesh(dp=2, tp=2)
    >>> Spec.parse("dp tp, -", mesh).local_shape((8, 3), mesh, {"dp": 0, "tp": 1})
    (2, 3)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from .dim_sharding import REPLICATED, Coords, DimSharding, Part, common_parts, compound, project
from .errors import Error
from .mesh import Mesh

REDUCTIONS = ("sum", "max", "min", "avg", "product")


@dataclass(frozen=True, slots=True)
class TensorType:
    """The *global* shape and the dtype of a value."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @property
    def numel(self) -> int:
        """The number of elements, over all ranks."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of all elements, over all ranks."""
        return self.numel * self.dtype.itemsize


def strides_of(shape: Sequence[int], dim_order: Sequence[int] = ()) -> tuple[int, ...]:
    """The strides of a dense tensor by its dims from the slowest to the fastest, ``(0, 2, 3, 1)`` for channels last;
    none: row by row."""
    strides, step = [1] * len(shape), 1
    for dim in reversed(dim_order or range(len(shape))):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def dim_order_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The memory order of a tensor's dims, slowest first; none: row by row, or with gaps."""
    if tensor.layout is not torch.strided or (strides := tensor.stride()) == strides_of(tensor.shape):
        return ()
    found = tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim]))
    return found if strides == strides_of(tensor.shape, found) else ()


def as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the tensor's own strides, gaps included."""
    return lying(tensor, tensor.stride()) if tensor.layout is torch.strided else tensor.detach().clone()


def lying(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """A copy with these strides, which may overlap."""
    tensor, strides = tensor.detach(), tuple(strides)
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    if strides == strides_of(tensor.shape, dim_order_of(made)):
        return made.copy_(tensor)
    places = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for count, stride in zip(tensor.shape, strides, strict=True):
        places = places[..., None] + torch.arange(count, device=tensor.device) * stride
    made.as_strided((int(places.max()) + 1,) if tensor.numel() else (0,), (1,))[places] = tensor
    return made


def with_dim_order(tensor: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """A tensor in this memory order of dims: itself where it is, or a copy."""
    strides = strides_of(tensor.shape, dims)
    if tensor.stride() == strides:
        return tensor
    pairs = zip(tensor.shape, tensor.stride(), strides, strict=True)
    if tensor.numel() == 0 or all(size == 1 or one == other for size, one, other in pairs):
        return tensor.as_strided(tensor.shape, strides)
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


@dataclass(frozen=True)
class Spec:
    """The placement of a value: a :class:`DimSharding` per dim, and the (axis, reduction) pairs over which it is
    partial.

    The pairs are a set: they are kept sorted, so that equal placements are equal.
    """

    dims: tuple[DimSharding, ...]
    partial: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        used = [axis for sharding in self.dims for axis in sharding.axes] + [axis for axis, _ in self.partial]
        if len(used) != len(set(used)):
            twice = next(axis for axis in used if used.count(axis) > 1)
            what = f"mesh axis {twice!r} is used twice in one placement"
            expected = "each axis at most once over all dims and the partial sum"
            raise Error(what, expected=expected, got=self.text(), remedy="shard one dim by it, or use another axis")
        if self.partial:
            for _, op in self.partial:
                if op not in REDUCTIONS:
                    raise Error(f"unknown reduction {op!r}", expected=f"one of {', '.join(REDUCTIONS)}", got=op)
            object.__setattr__(self, "partial", tuple(sorted(self.partial)))

    def __hash__(self) -> int:
        return hash((self.dims, self.partial))

    @staticmethod
    def replicated(ndim: int) -> Spec:
        """The replicated placement of a tensor of ``ndim`` dims."""
        return _replicated(ndim)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that shard some dim."""
        return tuple(axis for sharding in self.dims for axis in sharding.axes)

    @property
    def partial_axes(self) -> tuple[str, ...]:
        """The axes over which it is partial, by any reduction."""
        return tuple(axis for axis, _ in self.partial)

    @property
    def is_replicated(self) -> bool:
        """Whether it is replicated on every rank, and not partial."""
        return not self.partial and not any(sharding.axes for sharding in self.dims)

    def reduced(self) -> Spec:
        """The same, with nothing partial."""
        return Spec(self.dims) if self.partial else self

    def with_dim(self, dim: int, sharding: DimSharding) -> Spec:
        """The same spec with another sharding of one dim."""
        return Spec((*self.dims[:dim], sharding, *self.dims[dim + 1 :]), self.partial)

    def box(self, shape: Sequence[int], mesh: Mesh, coords: Coords) -> tuple[tuple[int, int], ...]:
        """Start and length of a rank's shard, for every *sub-dim* of the shape, in order."""
        return tuple(
            span for sharding, size in zip(self.dims, shape, strict=True) for span in sharding.spans(size, mesh, coords)
        )

    def sub_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The global shape with compound dims decomposed: what :meth:`box` indexes."""
        return tuple(part.size for sharding, size in zip(self.dims, shape, strict=True) for part in sharding.sub(size))

    def local_shape(self, shape: Sequence[int], mesh: Mesh, coords: Coords) -> tuple[int, ...]:
        """The local shape on the rank at ``coords``."""
        return tuple(
            math.prod(length for _, length in sharding.spans(size, mesh, coords)) if sharding.axes else size
            for sharding, size in zip(self.dims, shape, strict=True)
        )

    def local_numel(self, shape: Sequence[int], mesh: Mesh) -> int:
        """The elements of the largest shard: rank 0's, unless rows overlap."""
        first = dict.fromkeys(mesh.names, 0)
        found = self.local_shape(shape, mesh, first)
        return math.prod(
            length
            if sharding.rows is None
            else max(sharding.span(size, mesh, at)[1] for at in mesh.along(first, sharding.axes))
            for sharding, size, length in zip(self.dims, shape, found, strict=True)
        )

    def text(self, shape: Sequence[int] | None = None, dtype: str = "") -> str:
        """The text form: ``f32[64{dp}, 256] +{tp}``; ``.`` for sizes where no shape is passed."""
        sizes: Sequence[int | str] = shape if shape is not None else ["."] * len(self.dims)
        body = ", ".join(sharding.text(size) for sharding, size in zip(self.dims, sizes, strict=True))
        by_op: dict[str, list[str]] = {}
        for axis, op in self.partial:
            by_op.setdefault(op, []).append(axis)
        tail = "".join(f" {'+' if op == 'sum' else op}{{{','.join(axes)}}}" for op, axes in by_op.items())
        return f"{dtype}[{body}]{tail}"

    def __str__(self) -> str:
        return self.text()

    @classmethod
    def parse(cls, text: str, mesh: Mesh, ndim: int | None = None, *, where: str | None = None) -> Spec:
        """A user's spec: per dim its mesh axes, major first, or ``-`` for replicated: ``"dp tp, -"``."""
        entries = [entry.strip() for entry in text.split(",")] if text.strip() else []
        if ndim is not None and len(entries) != ndim:
            expected = f"{ndim} entries, such as {', '.join(['-'] * ndim)!r}"
            remedy = "write the axes of each dim, or - for a replicated dim, separated by commas"
            what = "a spec does not have one entry per dim"
            raise Error(what, where=where, expected=expected, got=repr(text), remedy=remedy)
        dims = []
        for entry in entries:
            axes = () if entry in ("-", "") else tuple(entry.split())
            dims.append(DimSharding(axes))
        try:
            for axis in (axis for sharding in dims for axis in sharding.axes):
                mesh.order(axis)
            return cls(tuple(dims))
        except Error as error:
            raise Error(error.what, where=where, expected=error.expected, got=repr(text), remedy=error.remedy) from None


@lru_cache(maxsize=64)
def _replicated(ndim: int) -> Spec:
    return Spec((REPLICATED,) * ndim)


def refine(shape: Sequence[int], specs: Sequence[Spec], mesh: Mesh) -> tuple[tuple[int, ...], list[Spec]] | None:
    """A common refinement: sub-dims in which all the specs' shardings are plain; None where their parts do not nest."""
    view: list[int] = []
    columns: list[list[DimSharding]] = [[] for _ in specs]
    for dim, size in enumerate(shape):
        refined = common_parts(size, [spec.dims[dim] for spec in specs], mesh)
        if refined is None:
            return None
        view.extend(refined[0])
        for column, shardings in zip(columns, refined[1], strict=True):
            column.extend(shardings)
    return tuple(view), [Spec(tuple(c), spec.partial) for c, spec in zip(columns, specs, strict=True)]


def coarsen(shape: Sequence[int], view: Sequence[int], spec: Spec, mesh: Mesh) -> Spec:
    """The inverse of :func:`refine` for one spec."""
    dims, at = [], 0
    for size in shape:
        parts: list[Part] = []
        product = 1
        while at < len(view) and (product < size or (product == size == 1 and not parts)):
            parts.append(Part(view[at], spec.dims[at].axes))
            product *= view[at]
            at += 1
        if size == 0:
            parts, at = [Part(0, spec.dims[at].axes)], at + 1
        dims.append(DimSharding(parts[0].axes) if len(parts) == 1 else compound(parts, mesh))
    return Spec(tuple(dims), spec.partial)


def on_view(shape: Sequence[int], view: Sequence[int], spec: Spec, mesh: Mesh) -> Spec | None:
    """The spec under a reshape to ``view``: the inverse of :func:`coarsen`. None where a sharding does not fall on
    it."""
    dims: list[DimSharding] = []
    at = 0
    for size, sharding in zip(shape, spec.dims, strict=True):
        start, product = at, 1
        while at < len(view) and (at == start or product < size):
            product *= view[at]
            at += 1
        projected = project(sharding, size, view[start:at], mesh) if product == size else None
        if projected is None or any(c.parts for c in projected):
            return None
        dims.extend(projected)
    return Spec(tuple(dims), spec.partial) if at == len(view) else None
