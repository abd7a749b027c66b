"""Grouped matrix products, as in a mixture of experts: each row is multiplied by the matrix of its group.

    out[s n]   = shardfx.grouped_mm(x[s k], w[g k n], ends[g])
    out[g k n] = shardfx.grouped_outer(x[s k], y[s n], ends[g])      for each group the sum of x' y over its rows

The rows of group ``e`` begin where those of ``e - 1`` end, at ``ends[e - 1]``, and end before ``ends[e]``. A row of no
group gives zeros, and costs nothing. A rank may have a part of the rows and of the groups: ``ends`` is always
global, and ``rows`` and ``groups`` say which part is local: of each global sub-dim, major first, its size, and
the start and length of the local part; nothing where all is local.

How many rows a group has is known to the device alone, and no step waits for it. Torch's grouped kernel takes such
``ends``, in bfloat16. Elsewhere on a GPU rows are laid out in blocks of equal size, each of one group, of which there
are twice as many as groups at most: a batched product computes at most twice what is needed. Needs torch alone.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .library import Ints, define, places

ALIGNED = 16
"""The alignment of rows in bytes for torch's grouped kernel."""


def _count(stored: Ints, size: int) -> int:
    """The number of elements of a shard, of ``size`` if it is full."""
    return math.prod(stored[2::3]) if stored else size


def _local(ends: Tensor, rows: Ints, count: int) -> Tensor:
    """The ends of groups among the ``count`` rows of the shard."""
    return torch.searchsorted(places(rows, count, ends.device), ends.to(torch.int64))


# ---- on a GPU: one product, whatever groups have ---------------------------------------------------------------


class RowBlocks(NamedTuple):
    """The rows of local groups in blocks of one size: each group begins a block, and its last one is padded."""

    source: Tensor
    """The row at each position of the blocks; the number of rows for padding."""
    counts: Tensor
    """The number of blocks of each local group."""
    group: Tensor
    """The group of each block, by its index in the shard."""


def _blocks(ends: Tensor, count: int, rows: Ints, groups: Ints, size: int, most: int) -> RowBlocks:
    """Lay out ``count`` rows in ``most`` blocks of ``size`` rows, at least as many as needed."""
    ends = _local(ends, rows, count)
    begins = torch.cat([ends.new_zeros(1), ends[:-1]])
    if groups:
        number = places(groups, 0, ends.device)
        begins, ends = begins[number], ends[number]
    counts = ((ends - begins).clamp(min=0) + size - 1) // size
    until = counts.cumsum(0)
    block = torch.arange(most, device=ends.device)
    group = torch.searchsorted(until, block, right=True).clamp(max=ends.shape[0] - 1)
    first = begins[group] + (block - (until - counts)[group]) * size
    source = first[:, None] + torch.arange(size, device=ends.device)
    return RowBlocks(torch.where(source < ends[group, None], source, count).flatten(), counts, group)


def _put(made: Tensor, blocks: RowBlocks, count: int) -> Tensor:
    """Scatter the rows of blocks back to ``count`` rows; zeros elsewhere."""
    return made.new_zeros((count + 1, made.shape[1])).index_copy_(0, blocks.source, made)[:count]


def _size_of_blocks(count: int, groups: int) -> tuple[int, int]:
    """The size of a block, for about as many blocks as groups, and the maximum number of blocks."""
    size, begun = -(-count // groups), min(count, groups)
    return size, (count - begun) // size + begun


def _mm_on_device(x: Tensor, w: Tensor, ends: Tensor, rows: Ints = (), groups: Ints = ()) -> Tensor:
    count = x.shape[0]
    if not count or not w.shape[0]:
        return x.new_zeros((count, w.shape[2]))
    if not has_kernel(x, w.shape[2]):
        size, most = _size_of_blocks(count, w.shape[0])
        blocks = _blocks(ends, count, rows, groups, size, most)
        made = torch.bmm(_rows(x, blocks).view(most, size, -1), w[blocks.group]).flatten(0, 1)
        return _put(made, blocks, count)
    blocks = _blocks(ends, count, rows, groups, 1, count)
    offsets = blocks.counts.cumsum(0, dtype=torch.int32)
    made = torch._grouped_mm(_aligned(_rows(x, blocks) if groups else x), _aligned(w), offs=offsets)
    if groups:
        return _put(made, blocks, count)
    return made.masked_fill_((blocks.source == count)[:, None], 0)  # rows stand in the order of groups as they are


def _outer_on_device(x: Tensor, y: Tensor, ends: Tensor, rows: Ints = (), groups: Ints = ()) -> Tensor:
    count, local = x.shape[0], _count(groups, ends.shape[0])
    if not count or not local:
        return x.new_zeros((local, x.shape[1], y.shape[1]))
    if not has_kernel(x, y.shape[1]):
        size, most = _size_of_blocks(count, local)
        blocks = _blocks(ends, count, rows, groups, size, most)
        free = (blocks.source == count)[:, None]
        left, right = (_rows(each, blocks).masked_fill_(free, 0).view(most, size, -1) for each in (x, y))
        return torch.segment_reduce(torch.bmm(left.mT, right), "sum", lengths=blocks.counts, axis=0, unsafe=True)
    blocks = _blocks(ends, count, rows, groups, 1, count)
    left, right = (_rows(each, blocks) if groups else each.contiguous() for each in (x, y))
    offsets = blocks.counts.cumsum(0, dtype=torch.int32)
    made = torch._grouped_mm(_aligned(left).t(), _aligned(right), offs=offsets)
    return made.masked_fill_((blocks.counts == 0)[:, None, None], 0)


def _rows(x: Tensor, blocks: RowBlocks) -> Tensor:
    return x[blocks.source.clamp(max=x.shape[0] - 1)]


def has_kernel(x: Tensor, width: int) -> bool:
    """Whether torch's grouped product of such rows and matrices of ``width`` columns reads ``ends`` on the device: for
    other dtypes and devices it synchronizes with the host."""
    if x.dtype is not torch.bfloat16 or x.device.type != "cuda":
        return False
    aligned = all(size and size * x.element_size() % ALIGNED == 0 for size in (x.shape[1], width))
    return aligned and torch.cuda.get_device_capability(x.device)[0] in (9, 10)


def _aligned(x: Tensor) -> Tensor:
    """A tensor as the kernel requires it: each matrix row- or column-major, with aligned rows or columns."""
    (*outer, row, column), (height, width) = x.stride(), x.shape[-2:]
    steps = [row] if column == 1 and row >= width else [column] if row == 1 and column >= height else [1]
    if all(step * x.element_size() % ALIGNED == 0 for step in (*outer, *steps)) and x.data_ptr() % ALIGNED == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


# ---- on the CPU: a product for each group ----------------------------------------------------------------------


def _shards(x: Tensor, ends: Tensor, rows: Ints, groups: Ints) -> list[Tensor]:
    """The rows of each local group."""
    shards = torch.tensor_split(x, _local(ends, rows, x.shape[0]))
    numbers = [0] if groups else range(len(ends))
    for full, start, length in zip(*[iter(groups)] * 3, strict=True):
        numbers = [number * full + i for number in numbers for i in range(start, start + length)]
    return [shards[number] for number in numbers]


@define(
    "grouped_mm(Tensor x, Tensor w, Tensor ends, int[] rows=[], int[] groups=[]) -> Tensor",
    shapes=lambda x, w, *_: x.new_empty((x.shape[0], w.shape[2])),
    cuda=_mm_on_device,
)
def grouped_mm(x: Tensor, w: Tensor, ends: Tensor, rows: Ints = (), groups: Ints = ()) -> Tensor:
    """The product of each row with the matrix of its group."""
    out = x.new_zeros((x.shape[0], w.shape[2]))
    for into, some, matrix in zip(_shards(out, ends, rows, groups), _shards(x, ends, rows, groups), w, strict=True):
        if len(some):
            into.addmm_(some, matrix)
    return out


@define(
    "grouped_outer(Tensor x, Tensor y, Tensor ends, int[] rows=[], int[] groups=[]) -> Tensor",
    shapes=lambda x, y, ends, rows=(), groups=(): x.new_empty((_count(groups, len(ends)), x.shape[1], y.shape[1])),
    cuda=_outer_on_device,
)
def grouped_outer(x: Tensor, y: Tensor, ends: Tensor, rows: Ints = (), groups: Ints = ()) -> Tensor:
    """The product of the rows of each group."""
    out = x.new_zeros((_count(groups, len(ends)), x.shape[1], y.shape[1]))
    for into, left, right in zip(out, _shards(x, ends, rows, groups), _shards(y, ends, rows, groups), strict=True):
        if len(left):
            torch.mm(left.t(), right, out=into)
    return out
