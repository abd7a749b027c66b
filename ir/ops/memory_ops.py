"""Memory ops: destination buffers as operands of a rank's program.

    flat = memory.empty([48], torch.float32)
    part = memory.part(flat, 1, 0, [8, 6])             a destination: where a value is to lie
    grad = aten.mm.out(t, x, out=part)                 a value, in that memory
    full = memory.join(flat, [grad], 1)                all of it, once its parts are there; this copies nothing
    sent = c10d.all_reduce_(full, 'sum', group)        reduced where it lies

With an arena (:class:`shardfx.passes.rank.Arena`) such memory, and that of other calls, is a place in one::

    arena = memory.arena(4096)
    flat = memory.slot(arena, 256, [48], torch.float32)

What stands behind ``empty`` is the engine's matter. Under ``torch.compile``, which plans memory itself, each call is
its plain form. Needs torch alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling

from .computing.library import Ints, define
from .pack import flatten, part_of, unflatten

c10d = torch.ops._c10d_functional
Tensor = torch.Tensor


def empty(shape: Sequence[int], dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """An uninitialized buffer."""
    return torch.empty(list(shape), dtype=dtype, device=device)


def arena(nbytes: int, device: str = "cpu") -> Tensor:
    """An arena: memory in which buffers are placed by offsets and live intervals."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def slot(memory: Tensor, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor in an arena, ``offset`` bytes from its start; other tensors in the same place are no longer live."""
    if is_compiling():
        return memory.new_empty(list(shape), dtype=dtype)
    return memory[offset : offset + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(list(shape))


def shape_asked(call: Any, arguments: Sequence[Any]) -> Any:
    """The shape of the buffer that a call allocates, by its arguments."""
    return arguments[2 if call is slot else 0]


def dtype_asked(call: Any, arguments: Sequence[Any]) -> Any:
    """The dtype of the buffer that a call allocates, by its arguments."""
    return arguments[3 if call is slot else 1]


def filled(shape: Sequence[int], value: float, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """A buffer filled with a value: an accumulator over iterations."""
    return torch.full(list(shape), value, dtype=dtype, device=device)


def part(flat: Tensor, shards: int, offset: int, shape: Sequence[int]) -> Tensor:
    """A view of a tensor in a flat buffer: ``offset`` elements from the start of each of ``shards`` ranks' parts; for
    several, as a reduce-scatter needs them, ``[shards, rows of a shard, ...]``."""
    seen = list(shape) if shards == 1 else [shards, shape[0] // shards, *shape[1:]]
    if is_compiling():
        return flat.new_empty(seen)
    strides = [torch.Size(seen[i + 1 :]).numel() for i in range(len(seen))]
    if shards > 1:
        strides[0] = flat.numel() // shards
    return flat.as_strided(seen, strides, flat.storage_offset() + offset)


def write(to: Tensor, x: Tensor) -> Tensor:
    """Copy ``x`` into ``to``; returns ``to``."""
    return to.copy_(x if x.shape == to.shape else x.reshape(to.shape))


def write_part(to: Tensor, buffer: Tensor, shards: int, offset: int, shape: Sequence[int]) -> Tensor:
    """Copy a tensor, sharded rank by rank in ``buffer`` (:func:`.pack.part_of`), into ``to``."""
    if is_compiling() or not to.is_contiguous():
        return write(to, part_of(buffer, shards, offset, shape))
    to.view(shards, -1).copy_(buffer.view(shards, -1).narrow(1, offset, to.numel() // shards))
    return to


def mm_shards(a: Tensor, b: Tensor, to: Tensor) -> Tensor:
    """A matrix product with rows in several shards: ``to`` is ``[shards, rows of a shard, columns]``."""
    if is_compiling():
        return torch.mm(a, b)
    for rows, shard in zip(a.chunk(to.shape[0]), to, strict=True):
        torch.mm(rows, b, out=shard)
    return to


def join(flat: Tensor, values: Sequence[Tensor], shards: int) -> Tensor:
    """A flat buffer once its parts, ``values``, are written."""
    return flatten(values, shards) if is_compiling() else flat


def adjoin(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors as one flat tensor; without a copy if they are adjacent in memory, as stored parameters may be."""
    first = tensors[0]
    if is_compiling() or isinstance(first, FakeTensor):  # which lies nowhere
        return flatten(tensors, 1)
    end = first.data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end or not tensor.is_contiguous():
            return flatten(tensors, 1)
        end += tensor.numel() * tensor.element_size()
    total = (end - first.data_ptr()) // first.element_size()
    if first.untyped_storage().nbytes() - first.storage_offset() * first.element_size() < end - first.data_ptr():
        return flatten(tensors, 1)
    return first.as_strided((total,), (1,))


def spread(flat: Tensor, buffer: Tensor, shapes: Sequence[Sequence[int]], shards: int) -> list[Tensor]:
    """Tensors that are sharded rank by rank in ``buffer``, copied contiguously into ``flat``."""
    if is_compiling():
        return unflatten(buffer, shapes, shards)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    parts = buffer.view(shards, -1).split([size // shards for size in sizes], 1)
    made = []
    for view, each, shape in zip(flat.split(sizes), parts, shapes, strict=True):
        view.view(shards, -1).copy_(each)
        made.append(view.view(list(shape)))
    return made


def all_reduce_(x: Tensor, reduce: str, group: str) -> Tensor:
    """Reduce ``x`` in place over a group."""
    functional = c10d.all_reduce if is_compiling() else c10d.all_reduce_
    result: Tensor = functional(x, reduce, group)
    return result


def all_gather_into(x: Tensor, ranks: int, group: str, *, out: Tensor) -> Tensor:
    """Gather the shards of a group into ``out``."""
    if is_compiling():
        return c10d.all_gather_into_tensor(x, ranks, group)  # type: ignore[no-any-return]
    return c10d.all_gather_into_tensor_out(x, ranks, group, out=out)  # type: ignore[no-any-return]


def own(x: Any) -> Any:
    """A copy with memory of its own, as an output of the program."""
    return x.clone()


@define("materialize(Tensor x) -> Tensor")
def _materialize(x: Tensor) -> Tensor:
    return x.clone()


def materialize(x: Tensor) -> Tensor:
    """``x``, computed once: opaque to a compiler that would recompute it in each user."""
    return _materialize(x) if is_compiling() else x


@define("no_share(Tensor like, int[] shapes, int[] dims, ScalarType[] dtypes, float[] values) -> Tensor[]")
def no_share(
    like: Tensor, shapes: Ints, dims: Ints, dtypes: Sequence[torch.dtype], values: Sequence[float]
) -> list[Tensor]:
    """The results of a rank with an empty shard, each filled with the neutral element of its reduction.

    Most kernels refuse tensors without elements. ``shapes`` are one list, ``dims`` how many of it each result has.
    """
    made, at = [], 0
    for count, dtype, value in zip(dims, dtypes, values, strict=True):  # torch 2.11 gives dtypes in a list as numbers
        made.append(torch.ops.aten.new_full.default(like, list(shapes[at : at + count]), value, dtype=dtype))
        at += count
    return made
