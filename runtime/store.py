"""Stores hold the shards of parameters, buffers and an optimizer's states; all programs of a plan work on one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import nn

from shardfx.ir.spec import Spec

Tensor = torch.Tensor
T = TypeVar("T")


def version(tensor: Tensor) -> int:
    """Another number after each time that something was written into a tensor, or into the one that it wraps."""
    local = getattr(tensor, "_local_tensor", None)
    return tensor._version + (local._version if local is not None else 0)


def norm_of(tensors: Sequence[Tensor], kind: float, device: torch.device) -> Tensor:
    """The norm of some tensors as one vector, in float64."""
    norms = [torch.linalg.vector_norm(tensor, kind).to(device, torch.float64) for tensor in tensors]
    return torch.linalg.vector_norm(torch.stack(norms), kind) if norms else torch.zeros((), dtype=torch.float64)


def laid_as(tensor: Tensor, other: Tensor) -> Tensor:
    """A tensor whose elements lie in the order of those of another one of its shape: itself, or a copy."""
    if tensor.stride() == other.stride():
        return tensor
    return torch.empty_strided(other.shape, other.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


class Shown(Protocol):
    """How the piece of a parameter is shown where it is not itself a parameter: in a tensor of another kind."""

    def wrap(self, piece: Tensor) -> Tensor:
        """A tensor of that kind, in the piece's memory."""

    def plain(self, tensor: Tensor) -> Tensor | None:
        """The piece that is shown as ``tensor``, which is the piece itself where it is plain; None: it is placed
        otherwise."""


class Store(Protocol):
    """The state of a plan, in the pieces that the ranks of this process hold."""

    device: torch.device
    parameters: dict[str, list[nn.Parameter]]
    buffers: dict[str, list[Tensor]]
    states: dict[str, list[Tensor]]
    """Of an optimizer, once there is one."""

    @property
    def trained_elsewhere(self) -> frozenset[str]:
        """The parameters that want a gradient, of those that only other processes hold."""

    def writes(self) -> int:
        """How often parameters were written into that all ranks hold whole, where ranks are processes."""

    def handed_out(self, scale: Tensor | float) -> None:
        """Gradients that were computed, times ``scale``, go to parameters: which other processes do alike."""

    def loaded(self, given: Mapping[str, Tensor]) -> None:
        """A state dict of shards is loaded, with these names."""

    def is_loaded(self, name: str) -> bool:
        """Whether there is content for a parameter, buffer or state, here or in another process."""

    def said(self, mine: Mapping[str, T]) -> Mapping[str, T]:
        """What processes say of what they hold, by name; of what several hold the first one says it. All ranks call it
        alike."""

    def has_weights(self, mine: bool) -> bool:
        """Whether a model's weights are there to be loaded, of which this process knows of its own. All ranks call it
        alike."""

    def load(self, whole: Mapping[str, Tensor], trainable: Mapping[str, bool]) -> None:
        """Cut whole parameters and buffers into the stored pieces; what is stored already is written over."""

    def to(self, device: torch.device) -> None:
        """Move what is stored; parameters stay the same objects."""

    def is_here(self, name: str) -> bool:
        """Whether a rank of this process holds a piece."""

    def piece(self, name: str, rank: int) -> Tensor:
        """What a rank holds of a parameter, buffer or state, plain and local."""

    def held(self) -> Mapping[str, tuple[str, int]]:
        """Of all that is stored how it is placed, and which of its pieces this process has; -1 for all."""

    def begin(self, name: str, start: float | str) -> None:
        """Make a state of an optimizer: one number everywhere, or a copy of the parameter of the name ``start``."""

    def fill(self, name: str, whole: Tensor) -> None:
        """Cut a whole state into the stored pieces. Rank 0's is cut, and all ranks call it."""

    def commit(self, name: str, rank: int, new: Tensor) -> None:
        """Keep the new content of a buffer, parameter or state, once for each distinct piece."""

    def cut(self, name: str, whole: Tensor) -> list[Tensor]:
        """A tensor of a parameter's shape, in the pieces of the parameter that are here. Rank 0's is cut, and all ranks
        call it."""

    def whole(self, name: str, pieces: Sequence[Tensor] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The whole tensor of a parameter or buffer, or of ``pieces`` that are cut like it (its gradient): a copy.
        ``dtype`` is that of the pieces, to processes that hold none."""

    def norm(self, grads: Mapping[str, Sequence[Tensor]], kind: float) -> Tensor:
        """The norm of gradients of parameters, in the pieces that are here, as one vector: each element of the whole
        model counts once. All ranks call it alike."""

    def assemble(self, spec: Spec, shape: Sequence[int], pieces: Sequence[Tensor]) -> Tensor:
        """The whole of a value that is placed by ``spec``. All ranks call it alike."""

    def as_gradient(self, name: str, piece: Tensor, number: int) -> Tensor:
        """The gradient of a parameter's shard of this number, as the parameter is."""

    def shown(self, name: str) -> Shown | None:
        """How a parameter's piece is shown; None: the parameter is the piece."""
