"""Recombination of shards: comparison with the full tensor, splitting into partial sums, and equality of results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import torch

from shardfx.ir.mesh import Mesh
from shardfx.ir.shards import local_shard, wide
from shardfx.ir.spec import Spec

T = TypeVar("T")


def difference(
    parts: Mapping[int, torch.Tensor], full: torch.Tensor, spec: Spec, mesh: Mesh, bound: float | None = None
) -> str:
    """The difference between the ranks' shards or partial values and the shards of ``full``, as text; "" if none."""
    partial = dict(spec.partial)
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.size):
        groups.setdefault(tuple(at for axis, at in mesh.coords(rank).items() if axis not in partial), []).append(rank)
    for ranks in groups.values():
        expected = local_shard(full, Spec(spec.dims), mesh, ranks[0])
        for rank in ranks:
            if parts[rank].shape != expected.shape or parts[rank].dtype != expected.dtype:
                got, wanted = (f"{each.dtype} of shape {list(each.shape)}" for each in (parts[rank], expected))
                return f"rank {rank} has {got}, expected {wanted}"
        value = reduce([parts[rank] for rank in ranks], next(iter(partial.values()), "sum"))
        if not same(value, expected, magnitude(parts.values()), bound):
            return f"rank {ranks[0]} has other values: {apart_at(value, expected)}"
    return ""


def reduce(parts: Sequence[torch.Tensor], kind: str) -> torch.Tensor:
    """Reduce partial values to one."""
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
    """Whether a dtype is an 8-bit float, which can be stored and cast, but not computed with."""
    return dtype.is_floating_point and dtype.itemsize == 1


def rounding(tensors: Iterable[torch.Tensor | None]) -> float:
    """The rounding tolerance of the least precise of some tensors, relative to their magnitude."""
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


def apart_at(value: torch.Tensor, full: torch.Tensor) -> str:
    """The position of the largest difference of two tensors of one shape, and the two numbers there, as text."""
    value, full = wide(value), wide(full)
    off = (value - full).abs()
    off = torch.where((value == full) | (value.isnan() & full.isnan()), 0.0, off.nan_to_num(torch.inf))
    at = [int(i) for i in torch.unravel_index(off.argmax(), off.shape)] if off.dim() else []
    got, expected = value[tuple(at)].item(), full[tuple(at)].item()
    return f"{got:.6g} at {at}, where one device gives {expected:.6g}"


def magnitude(parts: Iterable[torch.Tensor]) -> float:
    """The absolute value of the largest element, at least 1: the scale of rounding errors, also of sums that cancel."""
    floats = [wide(part) for part in parts if part.is_floating_point() or part.is_complex()]
    floats = [part[part.isfinite()] for part in floats]
    return max([1.0, *(float(part.abs().max()) for part in floats if part.numel())])


LARGEST = 1e30
"""The maximum magnitude of the random terms of a sum: three times as much is finite in float32 and bfloat16."""


def split_sum(tensor: torch.Tensor, count: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Split a tensor into ``count`` random terms of a sum: of both signs, large and small."""
    scale = min(magnitude([tensor]), LARGEST)
    noise = []
    for _ in range(count - 1):
        if not (tensor.is_floating_point() or tensor.is_complex()):
            noise.append(torch.randint(-9, 10, tensor.shape, generator=generator).to(tensor.dtype))
            continue
        size = torch.where(torch.rand(tensor.shape, generator=generator) < 0.5, 3 * scale, 0.1)
        noise.append(torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator) * size.to(tensor.real.dtype))
    return [*noise, tensor - sum(noise)] if noise else [tensor]


def split(tensor: torch.Tensor, count: int, kind: str, generator: torch.Generator) -> list[torch.Tensor]:
    """Split a tensor into ``count`` partial values that reduce to it."""
    if kind in ("max", "min"):
        return split_max(tensor, count, kind, generator)
    if kind == "product":
        factors = [torch.rand(tensor.shape, dtype=tensor.dtype, generator=generator) for _ in range(count - 1)]
        others = [each * 0.9 + 0.55 for each in factors]
        return [tensor / math.prod(others), *others]
    return [term * (count if kind == "avg" else 1) for term in split_sum(tensor, count, generator)]


def split_max(tensor: torch.Tensor, count: int, kind: str, generator: torch.Generator) -> list[torch.Tensor]:
    """Split a tensor into ``count`` partial values of a maximum (or minimum): each element is in one of them, and the
    least (or largest) of all in the others."""
    owner = torch.randint(0, count, tensor.shape, generator=generator)
    other = (tensor.amin() if kind == "max" else tensor.amax()) if tensor.numel() else tensor
    return [torch.where(owner == i, tensor, other) for i in range(count)]


Outcome = int | str
"""How a full result recombines from the shards' results: concatenated along a dim (its index), or "sum", "max", "min",
"equal", "mean" (weighted by their sizes)."""


def outcomes(
    parts: Sequence[torch.Tensor], full: torch.Tensor, lengths: Sequence[int], size: int
) -> frozenset[Outcome]:
    """All ways in which ``full`` recombines from parts; ``lengths`` are their lengths of a sharded dim of ``size``."""
    found: set[Outcome] = set()
    if any(part.dim() != full.dim() or part.dtype != full.dtype for part in parts):
        return frozenset()
    if all(part.shape == full.shape for part in parts):
        if all(same(part, full) for part in parts):
            found.add("equal")
        if full.dtype in (torch.uint16, torch.uint32, torch.uint64) or is_float8(full.dtype):  # not added by torch
            return frozenset(found)
        if full.dtype is not torch.bool:
            scale = magnitude(parts)
            if same(reduce(parts, "sum"), full, scale):
                found.add("sum")
            if full.is_floating_point() or full.is_complex():
                weighted = [part * (share / size) for part, share in zip(parts, lengths, strict=True)]
                found |= {"mean"} if same(reduce(weighted, "sum"), full, scale) else set()
        found |= {kind for kind in ("max", "min") if not full.is_complex() and same(reduce(parts, kind), full)}
        return frozenset(found)
    for d, length in enumerate(full.shape):
        fits = all(part.shape[d] * size == length * share for part, share in zip(parts, lengths, strict=True))
        others = {part.shape[:d] + part.shape[d + 1 :] for part in (*parts, full)}
        if fits and len(others) == 1 and same(torch.cat(list(parts), d), full):
            found.add(d)
    return frozenset(found)


def agreed(trials: Iterable[tuple[frozenset[T], ...] | None]) -> tuple[frozenset[T], ...] | None:
    """The outcomes on which all trials agree, for each result; None if a trial has none, or there is no common one."""
    common: tuple[frozenset[T], ...] | None = None
    for found in trials:
        common = found if common is None or found is None else tuple(a & b for a, b in zip(common, found, strict=True))
        if common is None or not all(common):
            return None
    return common
