"""The memory pool behind ``memory.empty`` in an engine: a caching allocator whose buffers persist between steps.

A request of about as many bytes reuses a buffer (:mod:`shardfx.ir.program.store_layout`) once its reference count says
that it is free, as torch does on a GPU. Results of a step (gradients) are views of buffers; while one is referenced,
the next step gets other memory. Predicted footprints rely on this reuse (:mod:`shardfx.ir.cost.footprint`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardfx.ir.program.store_layout import choose_buffer

Tensor = torch.Tensor
_use_count: Callable[[int], int] = torch._C._storage_Use_Count
"""The use count of the storage at an address."""


@dataclass
class _Lent:
    flat: Tensor
    storage: Any
    address: int
    alone: int
    used: bool = True


class MemoryPool:
    """The memory pool of one program.

    Args:
        make: the allocator of buffers of at least one byte; None: torch's.
    """

    def __init__(self, make: Callable[[int], Tensor] | None = None) -> None:
        self._kept: list[_Lent] = []
        self._make = make

    @property
    def memory(self) -> list[Tensor]:
        """All buffers of the pool."""
        return [each.flat for each in self._kept]

    def next_step(self) -> None:
        """Free the buffers that the last step did not use."""
        self._kept = [each for each in self._kept if each.used]
        for each in self._kept:
            each.used = False

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: str = "cpu") -> Tensor:
        """As :func:`shardfx.ir.ops.memory_ops.empty`: a buffer without references, else a new one."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        free = [each for each in self._kept if _use_count(each.address) == each.alone]
        choice = choose_buffer(nbytes, [each.flat.numel() for each in free])
        if choice.drop is not None:
            self._kept = [each for each in self._kept if each is not free[choice.drop]]
        if choice.take is not None:
            lent = free[choice.take]
            lent.used = True
        else:
            own = self._make if nbytes else None
            flat = torch.empty(nbytes, dtype=torch.uint8, device=device) if own is None else own(nbytes)
            storage = flat.untyped_storage()
            lent = _Lent(flat, storage, storage._cdata, _use_count(storage._cdata))
            self._kept.append(lent)
        return lent.flat[:nbytes].view(dtype).view(shape)

    def arena(self, nbytes: int, device: str = "cpu") -> Tensor:
        """As :func:`shardfx.ir.ops.memory_ops.arena`: the same each step, as nothing in it escapes the program."""
        return self.empty([nbytes], torch.uint8, device)
