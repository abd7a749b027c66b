"""Sharding tensors and joining the shards, and when two results are the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from shardfx.ir.dim_sharding import Coords
from shardfx.ir.mesh import Mesh
from shardfx.ir.shards import Box, wide
from shardfx.ir.spec import Spec


def shard(tensor: torch.Tensor, spec: Spec, mesh: Mesh, coords: Coords) -> torch.Tensor:
    """The shard of the rank at ``coords`` (partial sums aside): a view, which is seldom contiguous."""
    if not spec.axes:
        return tensor
    local = tensor.reshape(spec.sub_shape(tensor.shape))
    for dim, (start, length) in enumerate(spec.box(tensor.shape, mesh, coords)):
        local = local.narrow(dim, start, length)
    return local.reshape(spec.local_shape(tensor.shape, mesh, coords))


def join(
    parts: Mapping[int, torch.Tensor], like: torch.Tensor, spec: Spec, mesh: Mesh, bound: float | None = None
) -> tuple[torch.Tensor | None, str]:
    """The global tensor of the ranks' shards, and "" or why there is none: a wrong shape, or replicas that differ. Rows
    that no rank is to have are those of ``like``."""
    partial = dict(spec.partial)
    groups: dict[tuple[tuple[str, int], ...], list[torch.Tensor]] = {}
    boxes: dict[tuple[tuple[str, int], ...], Coords] = {}
    for rank in range(mesh.size):
        coords = mesh.coords(rank)
        part, shape = parts[rank], spec.local_shape(like.shape, mesh, coords)
        if tuple(part.shape) != shape:
            return None, f"rank {rank} has shape {tuple(part.shape)}, expected {shape}"
        if part.dtype != like.dtype:
            return None, f"rank {rank} has {part.dtype}, expected {like.dtype}"
        key = tuple((axis, coords[axis]) for axis in mesh.names if axis not in partial)
        groups.setdefault(key, []).append(part)
        boxes[key] = coords
    in_rows = any(sharding.rows is not None for sharding in spec.dims)
    whole = (like.clone() if in_rows else torch.zeros_like(like)).reshape(spec.sub_shape(like.shape))
    seen: dict[Box, torch.Tensor] = {}
    for key, members in groups.items():
        value = reduce(members, next(iter(partial.values()), "sum"))
        at = boxes[key]
        box = spec.box(like.shape, mesh, at)
        if box in seen and not same(value, seen[box], bound=bound):
            return None, "ranks that have the same shard differ"
        seen[box] = value
        whole[region(box)] = value.reshape([length for _, length in box])
    for box, value in seen.items() if in_rows else ():  # there shards overlap
        if not same(value.reshape([length for _, length in box]), whole[region(box)], bound=bound):
            return None, "ranks that have the same rows differ"
    return whole.reshape(like.shape), ""


def region(box: Box) -> tuple[slice, ...]:
    """A box, to index a tensor by."""
    return tuple(slice(start, start + length) for start, length in box)


def reduce(parts: Sequence[torch.Tensor], kind: str) -> torch.Tensor:
    """Several partial values as one."""
    if len(parts) == 1:
        return parts[0]
    if kind in ("max", "min"):
        value = parts[0]
        for part in parts[1:]:
            value = torch.maximum(value, part) if kind == "max" else torch.minimum(value, part)
        return value
    stacked = torch.stack(list(parts))
    if kind == "product":
        return stacked.prod(0).to(parts[0].dtype)
    value = stacked.sum(0)
    return (value / len(parts) if kind == "avg" else value).to(parts[0].dtype)


def is_float8(dtype: torch.dtype) -> bool:
    """Whether it is a number of one byte with a point, which is stored and cast, and not computed with."""
    return dtype.is_floating_point and dtype.itemsize == 1


def rounding(tensors: Iterable[torch.Tensor | None]) -> float:
    """What the least precise of some tensors may be off by, relative to their size."""
    digits = [torch.finfo(t.dtype).eps for t in tensors if t is not None and (t.is_floating_point() or t.is_complex())]
    return min(max([*digits, 1e-16]) * 1e3, 0.05) if max(digits, default=0.0) > 1e-10 else 1e-8


def same(a: torch.Tensor | None, b: torch.Tensor | None, scale: float = 1.0, bound: float | None = None) -> bool:
    """Whether two results are equal but for rounding; a NaN equals a NaN."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.dtype.is_floating_point and not a.dtype.is_complex:
        return torch.equal(a, b)
    if a.numel() == 0:
        return True
    bound = max(bound or 0.0, rounding([a, b]))
    a, b = wide(a), wide(b)
    finite = b[b.isfinite()]
    size = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(a, b, rtol=bound, atol=bound * max(size, scale), equal_nan=True)


def apart_at(value: torch.Tensor, whole: torch.Tensor) -> str:
    """Where two tensors of one shape are furthest apart, and the two numbers there."""
    value, whole = wide(value), wide(whole)
    off = (value - whole).abs()
    off = torch.where((value == whole) | (value.isnan() & whole.isnan()), 0.0, off.nan_to_num(torch.inf))
    at = [int(i) for i in torch.unravel_index(off.argmax(), off.shape)] if off.dim() else []
    got, expected = value[tuple(at)].item(), whole[tuple(at)].item()
    return f"{got:.6g} at {at}, where one device gives {expected:.6g}"


def magnitude(parts: Iterable[torch.Tensor]) -> float:
    """The size of the largest element, at least 1: sums that cancel are rounded as their terms are."""
    floats = [wide(part) for part in parts if part.is_floating_point() or part.is_complex()]
    floats = [part[part.isfinite()] for part in floats]
    return max([1.0, *(float(part.abs().max()) for part in floats if part.numel())])


LARGEST = 1e30
"""Terms of a sum are no larger than this, whatever the sum is: three times as much is a number in all dtypes."""


def split_sum(tensor: torch.Tensor, count: int, generator: torch.Generator) -> list[torch.Tensor]:
    """``count`` random tensors whose sum is ``tensor``: of both signs, large and small."""
    scale = min(magnitude([tensor]), LARGEST)
    noise = []
    for _ in range(count - 1):
        if not (tensor.is_floating_point() or tensor.is_complex()):
            noise.append(torch.randint(-9, 10, tensor.shape, generator=generator).to(tensor.dtype))
            continue
        size = torch.where(torch.rand(tensor.shape, generator=generator) < 0.5, 3 * scale, 0.1)
        noise.append(torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator) * size.to(tensor.real.dtype))
    return [*noise, tensor - sum(noise)] if noise else [tensor]


def split_max(tensor: torch.Tensor, count: int, kind: str, generator: torch.Generator) -> list[torch.Tensor]:
    """``count`` tensors whose elementwise maximum (or minimum) is ``tensor``: each element is in one of them."""
    owner = torch.randint(0, count, tensor.shape, generator=generator)
    off = torch.rand(tensor.shape, generator=generator)
    other = _beyond(tensor, off, kind)
    return [torch.where(owner == i, tensor, other) for i in range(count)]


def _beyond(tensor: torch.Tensor, off: torch.Tensor, kind: str) -> torch.Tensor:
    """Less (or more, for a minimum) than each element by 1 and ``off``, as far as its dtype has less."""
    if tensor.dtype is torch.bool:
        return torch.full_like(tensor, kind == "min")
    step = off.to(tensor.dtype) + 1
    other = tensor - step if kind == "max" else tensor + step
    if tensor.is_floating_point():
        return other
    bounds = torch.iinfo(tensor.dtype)
    return torch.where(tensor == (bounds.min if kind == "max" else bounds.max), tensor, other)


Outcome = int | str
"""What a result is of the shards' results: joined along a dim (its number), or "sum", "max", "min", "equal", "mean" (by
their sizes)."""


def outcomes(
    parts: Sequence[torch.Tensor], whole: torch.Tensor, lengths: Sequence[int], size: int
) -> frozenset[Outcome]:
    """All that ``whole`` is of its parts; ``lengths`` of ``size`` are what the parts were given of the sharded dims."""
    found: set[Outcome] = set()
    if all(part.shape == whole.shape for part in parts):
        if all(same(part, whole) for part in parts):
            found.add("equal")
        if whole.dtype in (torch.uint16, torch.uint32, torch.uint64) or is_float8(whole.dtype):  # not added by torch
            return frozenset(found)
        if whole.dtype is not torch.bool:
            scale = magnitude(parts)
            if same(reduce(parts, "sum"), whole, scale):
                found.add("sum")
            if _averaged(parts, lengths, size, whole, scale):
                found.add("mean")
        found |= {kind for kind in ("max", "min") if not whole.is_complex() and same(reduce(parts, kind), whole)}
        return frozenset(found)
    for d, length in enumerate(whole.shape):
        fits = all(part.shape[d] * size == length * given for part, given in zip(parts, lengths, strict=True))
        if fits and same(torch.cat(list(parts), d), whole):
            found.add(d)
    return frozenset(found)


def _averaged(
    parts: Sequence[torch.Tensor], lengths: Sequence[int], size: int, whole: torch.Tensor, scale: float
) -> bool:
    """Whether a result is the mean of its parts, weighted by their sizes."""
    if not (whole.is_floating_point() or whole.is_complex()):
        return False
    return same(reduce([p * (n / size) for p, n in zip(parts, lengths, strict=True)], "sum"), whole, scale)


def plausible(part: torch.Tensor | None, whole: torch.Tensor | None) -> bool:
    """Whether a shard's result can be part of the global one: of its shape, but for one dim that is shorter."""
    if part is None or whole is None:
        return part is whole
    if part.dtype != whole.dtype or part.dim() != whole.dim():
        return False
    other = [(a, b) for a, b in zip(part.shape, whole.shape, strict=True) if a != b]
    return not other or (len(other) == 1 and other[0][0] < other[0][1])


def both(
    a: tuple[frozenset[Outcome], ...], b: tuple[frozenset[Outcome], ...] | None
) -> tuple[frozenset[Outcome], ...] | None:
    """What two trials agree on, for every result."""
    if b is None:
        return None
    common = tuple(x & y for x, y in zip(a, b, strict=True))
    return common if all(common) else None
