"""What stands behind ``memory.empty`` in an engine: memory that stays between steps.

It is lent to whoever asks for as many bytes and taken back when nobody holds it, as torch does on a GPU. What a step
hands out (gradients) are views of it; where somebody still holds one, the next step gets other memory. A footprint
counts on it (:mod:`shardfx.ir.cost.storages`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

Tensor = torch.Tensor
_number = count()


@dataclass
class _Lent:
    flat: Tensor
    storage: Any
    alone: int
    used: bool = True


class MemoryPool:
    """Memory of one program, by size."""

    def __init__(self) -> None:
        self._kept: list[_Lent] = []

    def next_step(self) -> None:
        """Let go of what the last step did not ask for."""
        self._kept = [each for each in self._kept if each.used]
        for each in self._kept:
            each.used = False

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: str = "cpu") -> Tensor:
        """As :func:`shardfx.ir.ops.memory_ops.empty`: memory that nobody holds."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        for each in self._kept:
            if each.flat.numel() == nbytes and _use_count(each.storage) == each.alone:
                each.used = True
                return each.flat.view(dtype).view(shape)
        flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
        storage = flat.untyped_storage()
        self._kept.append(_Lent(flat, storage, _use_count(storage)))
        return flat.view(dtype).view(shape)


def _use_count(storage: Any) -> int:
    """How many tensors share a storage; where torch does not say, always another number."""
    known = getattr(torch._C, "_storage_Use_Count", None)
    return int(known(storage._cdata)) if known is not None else next(_number)
