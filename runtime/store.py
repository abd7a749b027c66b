"""Stores hold the shards of parameters and buffers; train, evaluation and inference programs work on one store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from shardfx.ir.spec import Spec

Tensor = torch.Tensor


def version(tensor: Tensor) -> int:
    """Another number after each time that something was written into a tensor, or into the one that it wraps."""
    local = getattr(tensor, "_local_tensor", None)
    return tensor._version + (local._version if local is not None else 0)


class Store(Protocol):
    """The state of a plan, in the pieces that the ranks of this process hold."""

    parameters: dict[str, list[nn.Parameter]]
    buffers: dict[str, list[Tensor]]

    def load(self, whole: Mapping[str, Tensor], trainable: Mapping[str, bool]) -> None:
        """Cut whole parameters and buffers into the stored pieces; what is stored already is written over."""

    def to(self, device: torch.device) -> None:
        """Move what is stored; parameters stay the same objects."""

    def piece(self, name: str, rank: int) -> Tensor:
        """What a rank holds of a parameter or buffer, plain and local."""

    def held(self) -> Mapping[str, tuple[str, int]]:
        """Of each parameter and buffer how it is placed, and which of its pieces this process has; -1 for all."""

    def commit(self, name: str, rank: int, new: Tensor) -> None:
        """Keep a buffer's new content, once for each distinct piece."""

    def cut(self, name: str, whole: Tensor) -> list[Tensor]:
        """A tensor of a parameter's shape, in pieces as the parameter is. Rank 0's is cut, and all ranks call it."""

    def whole(self, name: str, pieces: Sequence[Tensor] | None = None) -> Tensor:
        """The whole tensor of a parameter or buffer, or of ``pieces`` that are cut like it (its gradient): a copy."""

    def assemble(self, spec: Spec, shape: Sequence[int], pieces: Sequence[Tensor]) -> Tensor:
        """The whole of a value that is placed by ``spec``. All ranks call it alike."""

    def as_gradient(self, name: str, piece: Tensor) -> Tensor:
        """A parameter's gradient, as the parameter is."""
