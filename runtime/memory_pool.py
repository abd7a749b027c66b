"""What stands behind ``memory.empty`` in an engine: memory that stays between steps.

It is lent to whoever asks for about as many bytes (:mod:`shardfx.ir.program.store_layout`) and taken back when nobody
holds it, as torch does on a GPU. What a step hands out (gradients) are views of it; where somebody still holds one,
the next step gets other memory. A footprint counts on it (:mod:`shardfx.ir.cost.footprint`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardfx.ir.program.store_layout import choose_buffer

Tensor = torch.Tensor
_use_count: Callable[[int], int] = torch._C._storage_Use_Count
"""How many tensors share the storage at an address."""


@dataclass
class _Lent:
    flat: Tensor
    storage: Any
    address: int
    alone: int
    used: bool = True


class MemoryPool:
    """Memory of one program.

    Args:
        make: makes so many bytes of it, at least one; None: as torch does.
    """

    def __init__(self, make: Callable[[int], Tensor] | None = None) -> None:
        self._kept: list[_Lent] = []
        self._make = make

    @property
    def memory(self) -> list[Tensor]:
        """All of it."""
        return [each.flat for each in self._kept]

    def next_step(self) -> None:
        """Let go of what the last step did not ask for."""
        self._kept = [each for each in self._kept if each.used]
        for each in self._kept:
            each.used = False

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: str = "cpu") -> Tensor:
        """As :func:`shardfx.ir.ops.memory_ops.empty`: memory that nobody holds."""
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
        """As :func:`shardfx.ir.ops.memory_ops.arena`: the same in each step, for nothing in it leaves the program."""
        return self.empty([nbytes], torch.uint8, device)
