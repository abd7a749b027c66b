"""Memory that a rank's program keeps between steps, and what fills it: buckets of gradients, gathered parameters.

Fresh memory costs page faults: among processes of one machine a gather into it takes two to three times as long as into
memory that was used before. And gloo's reduce-scatter takes as much longer than an exchange and a sum
(``python -m benchmarks.collectives``). Counted at run time, a large reduce-scatter is therefore an all-to-all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from shardfx.ir.ops import pack

Tensor = torch.Tensor
c10d = torch.ops._c10d_functional

_number = count()
LARGE = 1 << 20
"""A reduce-scatter of at least so many bytes is done as an exchange and a sum."""


class Bucket:
    """Flat memory for tensors that travel together, lent anew each step.

    What a step hands out (gradients) are views of it. Where somebody still holds one, the next step gets other memory.
    ``pieces`` ranks' parts stand one after the other, as a reduce-scatter wants them.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], pieces: int, dtype: torch.dtype, device: torch.device) -> None:
        self._shapes, self.pieces = [tuple(shape) for shape in shapes], pieces
        self._numel = sum(torch.Size(shape).numel() for shape in shapes)
        self._options = {"dtype": dtype, "device": device}
        self._lent: list[tuple[Tensor, list[Tensor], Any, int]] = []

    def take(self) -> tuple[Tensor, list[Tensor]]:
        """Flat memory that nobody holds, and a view of it for each tensor."""
        for flat, views, storage, alone in self._lent:
            if _use_count(storage) == alone:
                return flat, views
        flat = torch.empty(self._numel, **self._options)  # type: ignore[call-overload]
        views = self._views(flat)
        storage = flat.untyped_storage()
        self._lent = [*self._lent[-1:], (flat, views, storage, _use_count(storage))]
        return flat, views

    def _views(self, flat: Tensor) -> list[Tensor]:
        views, at = [], 0
        table = flat.view(self.pieces, -1)
        for shape in self._shapes:
            size = torch.Size(shape).numel() // self.pieces
            column = table.narrow(1, at, size)
            if self.pieces == 1:
                views.append(column.view(shape))
            else:
                views.append(column.unflatten(1, (shape[0] // self.pieces, *shape[1:])))
            at += size
        return views


def _use_count(storage: Any) -> int:
    """How many tensors share a storage; where torch does not say, always another number."""
    known = getattr(torch._C, "_storage_Use_Count", None)
    return int(known(storage._cdata)) if known is not None else next(_number)


def joined(tensors: Sequence[Tensor], pieces: int) -> Tensor:
    """As ``pack.flatten`` for one piece; without a copy where the tensors lie one behind the other already."""
    first = tensors[0]
    end = first.data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end or not tensor.is_contiguous():
            return pack.flatten(tensors, pieces)
        end += tensor.numel() * tensor.element_size()
    total = (end - first.data_ptr()) // first.element_size()
    if first.untyped_storage().nbytes() - first.storage_offset() * first.element_size() < end - first.data_ptr():
        return pack.flatten(tensors, pieces)
    return first.as_strided((total,), (1,))


def dense(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else x.contiguous()


def put(view: Tensor, x: Tensor) -> None:
    """Write ``x`` into a view of a bucket."""
    view.copy_(x if x.shape == view.shape else x.reshape(view.shape))


def mm_pieces(a: Tensor, b: Tensor, view: Tensor) -> None:
    """A matrix product into a bucket of several ranks' parts, part by part."""
    for rows, part in zip(a.chunk(view.shape[0]), view, strict=True):
        torch.mm(rows, b, out=part)


class Pool:
    """Memory for what is gathered, lent to whoever asks and taken back when nobody holds it: as torch does on a GPU."""

    def __init__(self) -> None:
        self._kept: list[_Lent] = []

    def next_step(self) -> None:
        """Let go of what the last step did not ask for."""
        self._kept = [each for each in self._kept if each.used]
        for each in self._kept:
            each.used = False

    def take(self, numel: int, like: Tensor) -> Tensor:
        """Flat memory that nobody holds."""
        for each in self._kept:
            if each.flat.numel() == numel and each.flat.dtype is like.dtype and _use_count(each.storage) == each.alone:
                each.used = True
                return each.flat
        flat = torch.empty(numel, dtype=like.dtype, device=like.device)
        storage = flat.untyped_storage()
        self._kept.append(_Lent(flat, storage, _use_count(storage)))
        return flat


@dataclass
class _Lent:
    flat: Tensor
    storage: Any
    alone: int
    used: bool = True


def gathered(pool: Pool, x: Tensor, ranks: int, group: str) -> Tensor:
    """As ``all_gather_into_tensor``, into memory of the pool."""
    out = pool.take(x.numel() * ranks, x).view(x.shape[0] * ranks, *x.shape[1:])
    result: Tensor = c10d.all_gather_into_tensor_out(x, ranks, group, out=out)
    return result


def spread(pool: Pool, buffer: Tensor, shapes: Sequence[Sequence[int]], pieces: int) -> list[Tensor]:
    """As ``layout.unflatten``, into memory of the pool."""
    flat = pool.take(buffer.numel(), buffer)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    parts = buffer.view(pieces, -1).split([size // pieces for size in sizes], 1)
    made = []
    for view, part, shape in zip(flat.split(sizes), parts, shapes, strict=True):
        view.view(pieces, -1).copy_(part)
        made.append(view.view(list(shape)))
    return made


def scatter(x: Tensor, op: str, ranks: int, group: str) -> tuple[Tensor, str, int]:
    """Start a reduce-scatter; :func:`scattered` ends it."""
    if x.nbytes < LARGE or op not in ("sum", "avg"):
        return c10d.reduce_scatter_tensor(x, op, ranks, group), op, 1
    each = [x.shape[0] // ranks] * ranks
    return c10d.all_to_all_single(x, each, each, group), op, ranks


def scattered(started: tuple[Tensor, str, int]) -> Tensor:
    """This rank's piece of the sum."""
    sent, op, ranks = started
    received: Tensor = c10d.wait_tensor(sent)
    if ranks == 1:
        return received
    pieces = received.view(ranks, received.shape[0] // ranks, *received.shape[1:])
    return pieces.sum(0) if op == "sum" else pieces.mean(0)
