"""Packing for collectives, which concatenate and split along the first dim, in equal shards.

``pack`` brings the dim in question to the front and pads it; ``unpack`` undoes that. A dim that is a compound
is reached through a view of the local tensor as its sub-dims.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensor = torch.Tensor


def dense_last(x: Tensor) -> Tensor:
    """``x`` with a last dim of stride one: flash attention on CPU gives wrong numbers for others."""
    return x if x.stride(-1) == 1 else x.contiguous()


def aligned(x: Tensor) -> Tensor:
    """``x``, contiguous, at an offset that is a multiple of every dtype's size: at others torch refuses to reinterpret
    it as a wider dtype, such as complex."""
    fine = x.is_contiguous() and x.storage_offset() * x.itemsize % WIDEST == 0
    return x if fine else x.clone(memory_format=torch.contiguous_format)


WIDEST = torch.complex128.itemsize
IDENTITY = {torch.ops.aten.contiguous.default, dense_last, aligned}
"""Ops that return their operand unchanged, at most in another memory layout."""


def inside(index: Tensor, size: int, ignored: int | None = None) -> Tensor:
    """``index`` unchanged, after a check that its numbers are in 0 .. size - 1, or the ignored one.

    A rank with a shard of a table gives zeros for indices of others: without the check an invalid one would be zero.

    Raises:
        IndexError: one is not (on a GPU an assertion of the device, which does not wait).
    """
    good = (index >= 0) & (index < size)
    if ignored is not None:
        good = good | (index == ignored)
    try:
        torch._assert_async(good.all())
    except RuntimeError as error:  # on a CPU, which knows at once
        wrong = index[~good]
        raise IndexError(f"index {int(wrong[0])} is out of range: it must be one of 0 .. {size - 1}") from error
    return index


def pack(x: Tensor, view: Sequence[int], dim: int, per: int) -> Tensor:
    """``x`` as ``view`` with ``dim`` in front, padded with zeros to ``per`` there."""
    x = x.reshape(view).movedim(dim, 0)
    if x.shape[0] < per:
        x = torch.cat([x, x.new_zeros((per - x.shape[0], *x.shape[1:]))])
    return x.contiguous()


def unpack_gathered(x: Tensor, per: int, lengths: Sequence[int], dim: int, shape: Sequence[int]) -> Tensor:
    """Concatenated shards of ``per`` rows, each cropped to ``lengths[k]``, with dim 0 back at ``dim``, as ``shape``."""
    if any(length != per for length in lengths):
        x = torch.cat([shard[:length] for shard, length in zip(x.split(per), lengths, strict=True)])
    return x.movedim(0, dim).reshape(shape)


def pack_scattered(x: Tensor, view: Sequence[int], dim: int, per: int, lengths: Sequence[int]) -> Tensor:
    """The shards of ``x`` along ``dim`` concatenated in front, each padded to ``per`` rows."""
    x = x.reshape(view).movedim(dim, 0)
    if any(length != per for length in lengths):
        shards = []
        for shard in x.split(list(lengths)):
            shards.append(shard)
            if shard.shape[0] < per:
                shards.append(x.new_zeros((per - shard.shape[0], *x.shape[1:])))
        x = torch.cat(shards)
    return x.contiguous()


def unpack_scattered(x: Tensor, length: int, dim: int, shape: Sequence[int]) -> Tensor:
    """This rank's shard: its first ``length`` rows, dim 0 back at ``dim``, as ``shape``."""
    return x[:length].movedim(0, dim).reshape(shape)


def pack_exchange(x: Tensor, view: Sequence[int], to: int, lengths: Sequence[int]) -> Tensor:
    """The shards of ``x`` along dim ``to``, one per rank, flattened and concatenated."""
    return torch.cat([shard.reshape(-1) for shard in x.reshape(view).split(list(lengths), to)])


def unpack_exchange(x: Tensor, shards: Sequence[Sequence[int]], dim: int, shape: Sequence[int]) -> Tensor:
    """Flat received shards of the given shapes, concatenated along ``dim``, as ``shape``."""
    sizes = [torch.Size(p).numel() for p in shards]
    parts = [part.reshape(list(p)) for part, p in zip(x.split(sizes), shards, strict=True)]
    return torch.cat(parts, dim).reshape(shape)


def pack_rows(x: Tensor, dims: Sequence[int], boxes: Sequence[Sequence[Sequence[int]]]) -> Tensor:
    """The boxes of ``x`` (start and length in each of ``dims``), one for each rank, flat and one after the other."""
    filled = [_box(x, dims, box).reshape(-1) for box in boxes if all(length for _, length in box)]
    return torch.cat(filled) if filled else x.reshape(-1)[:0]


def unpack_rows(
    x: Tensor,
    got: Tensor,
    dims: Sequence[int],
    own: Sequence[Sequence[int]],
    places: Sequence[int],
    shapes: Sequence[Sequence[int]],
    counts: Sequence[int],
) -> Tensor:
    """Tiles joined along ``dims``, of which there are ``counts``: received ones by their place, -1 is the own box of
    ``x``."""
    pairs = list(zip(places, shapes, strict=True))
    sizes = dict(sorted((place, torch.Size(shape).numel()) for place, shape in pairs if place >= 0))
    received = got.split(list(sizes.values()))
    tiles = [_box(x, dims, own) if place < 0 else received[place].reshape(list(shape)) for place, shape in pairs]
    for dim, count in zip(reversed(dims), reversed(counts), strict=True):
        tiles = [torch.cat(tiles[i : i + count], dim) if count > 1 else tiles[i] for i in range(0, len(tiles), count)]
    return tiles[0]


def _box(x: Tensor, dims: Sequence[int], box: Sequence[Sequence[int]]) -> Tensor:
    for dim, (start, length) in zip(dims, box, strict=True):
        if length != x.shape[dim]:
            x = x.narrow(dim, start, length)
    return x


def take(x: Tensor, view: Sequence[int], dim: int, start: int, length: int, shape: Sequence[int]) -> Tensor:
    """This rank's slice of a replicated dim."""
    if x.shape != tuple(view):
        x = x.reshape(view)
    x = x.narrow(dim, start, length)
    return x if x.shape == tuple(shape) else x.reshape(shape)


def flatten(tensors: Sequence[Tensor], shards: int) -> Tensor:
    """Several tensors as one flat buffer; for ``shards`` ranks, all first shards come first."""
    if shards == 1:
        return torch.cat([t.reshape(-1) for t in tensors])
    return torch.cat([t.reshape(shards, -1) for t in tensors], 1).reshape(-1)


def unflatten(buffer: Tensor, shapes: Sequence[Sequence[int]], shards: int) -> list[Tensor]:
    """The inverse of :func:`flatten`: views of the buffer if ``shards`` is 1."""
    sizes = [torch.Size(s).numel() // shards for s in shapes]
    if shards == 1:
        return [part.view(list(s)) for part, s in zip(buffer.split(sizes), shapes, strict=True)]
    parts = buffer.view(shards, -1).split(sizes, 1)
    return [part.reshape(list(s)) for part, s in zip(parts, shapes, strict=True)]


def part_of(buffer: Tensor, shards: int, offset: int, shape: Sequence[int]) -> Tensor:
    """One tensor of :func:`unflatten`, at ``offset`` elements from the start of each rank's shard."""
    size = torch.Size(shape).numel() // shards
    return buffer.view(shards, -1).narrow(1, offset, size).reshape(list(shape))
