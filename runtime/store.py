"""Stores hold the shards of parameters, buffers and an optimizer's states; all programs of a plan work on one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import nn

from shardfx.ir.graph import Graph, Input, InputKind
from shardfx.ir.ops.pools.transfer import arrived, settled
from shardfx.ir.spec import Spec, with_dim_order

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


def with_strides_of(tensor: Tensor, other: Tensor) -> Tensor:
    """A tensor whose elements lie in the order of those of another one of its shape: itself, or a copy."""
    if tensor.stride() == other.stride():
        return tensor
    return torch.empty_strided(other.shape, other.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


class Shown(Protocol):
    """How the shard of a parameter is shown where it is not itself a parameter: in a tensor of another kind."""

    def wrap(self, shard: Tensor) -> Tensor:
        """A tensor of that kind, in the shard's memory."""

    def plain(self, tensor: Tensor) -> Tensor | None:
        """The shard that is shown as ``tensor``; None: it is placed otherwise."""


class Store:
    """The state of a plan: the shards of parameters, buffers and states that the ranks of this process store. What is
    implemented here is that of all ranks in one process."""

    parameters: dict[str, list[nn.Parameter]]
    buffers: dict[str, list[Tensor]]
    states: dict[str, list[Tensor]]
    """Of an optimizer, once there is one."""
    trained_elsewhere: frozenset[str] = frozenset()
    """The parameters that want a gradient, of those that only other processes store."""

    def __init__(self, graph: Graph, device: torch.device) -> None:
        self.graph, self.mesh, self.device = graph, graph.mesh, device
        self.parameters, self.buffers, self.states = {}, {}, {}
        self._inputs = [g for g in graph.inputs if g.kind in (InputKind.PARAMETER, InputKind.BUFFER)]
        self._states = graph.of_kind(InputKind.STATE)
        self._given: dict[str, Input] = {given.name: given for given in (*self._inputs, *self._states)}

    def handed_out(self, scale: Tensor | float) -> None:
        """Gradients that were computed, times ``scale``, go to parameters: which other processes do alike."""

    def loaded(self, values: Mapping[str, Tensor]) -> None:
        """A state dict of shards is loaded, with these names."""

    def is_loaded(self, name: str) -> bool:
        """Whether there is content for a parameter, buffer or state, here or in another process."""
        return any(name in tensors for tensors in (self.parameters, self.buffers, self.states))

    def said(self, mine: Mapping[str, T]) -> Mapping[str, T]:
        """What processes say of what they store, by name; of what several store the first one says it. All ranks call
        it alike."""
        return mine

    def has_weights(self, mine: bool) -> bool:
        """Whether a model's weights are there to be loaded, of which this process knows of its own. All ranks call it
        alike."""
        return mine

    def load(self, full: Mapping[str, Tensor], trainable: Mapping[str, bool]) -> None:
        """Shard global parameters and buffers into the stored shards; what is stored already is written over."""
        raise NotImplementedError

    def to(self, device: torch.device) -> None:
        """Move what is stored; parameters stay the same objects."""
        raise NotImplementedError

    def is_here(self, name: str) -> bool:
        """Whether a rank of this process stores a shard."""
        return True

    def shard(self, name: str, rank: int) -> Tensor:
        """The shard of a parameter, buffer or state on a rank, plain and local."""
        raise NotImplementedError

    def stamps(self) -> Mapping[str, tuple[str, int]]:
        """Of all that is stored how it is placed, and the number of the shard in this process; -1 for all."""
        return {name: (str(given.value.spec), -1) for name, given in self._given.items()}

    def begin(self, name: str, start: float | str) -> None:
        """Make a state of an optimizer: one number everywhere, or a copy of the parameter of the name ``start``."""
        raise NotImplementedError

    def fill(self, name: str, full: Tensor) -> None:
        """Shard a global state into the stored shards. Rank 0's counts, and all ranks call it."""
        raise NotImplementedError

    def commit(self, name: str, rank: int, new: Tensor) -> None:
        """Store the new content of a buffer, parameter or state, once for each distinct shard."""
        stored = self.shard(name, rank)
        if stored.data_ptr() != new.data_ptr():
            stored.copy_(arrived(new))

    def sharding(self, name: str, full: Tensor) -> list[Tensor]:
        """A tensor of a parameter's shape, as the shards of the parameter that are here. Rank 0's counts, and all ranks
        call it."""
        raise NotImplementedError

    def whole(self, name: str, own_shards: Sequence[Tensor] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The global tensor of a parameter or buffer, or of ``shards`` that are sharded like it (its gradient): a copy.
        ``dtype`` is that of the shards, to processes that store none."""
        raise NotImplementedError

    def norm(self, grads: Mapping[str, Sequence[Tensor]], kind: float) -> Tensor:
        """The norm of gradients of parameters, in the shards that are here, as one vector: each element of the global
        model counts once. All ranks call it alike."""
        raise NotImplementedError

    def assemble(self, spec: Spec, shape: Sequence[int], own_shards: Sequence[Tensor]) -> Tensor:
        """The global tensor of a value that is placed by ``spec``. All ranks call it alike."""
        raise NotImplementedError

    def as_gradient(self, name: str, shard: Tensor, number: int) -> Tensor:
        """The gradient of a parameter's shard of this number, as the parameter is."""
        raise NotImplementedError

    def shown(self, name: str) -> Shown | None:
        """How a parameter's shard is shown; None: the parameter is the shard."""
        return None

    def _held(self, name: str) -> Sequence[Tensor]:
        return self.parameters.get(name) or self.buffers.get(name) or self.states[name]

    def _settled(self, name: str, shard: Tensor) -> Tensor:
        """A copy in the memory, and in the order, of a stored value."""
        inp = self._given[name]
        return settled(with_dim_order(shard, inp.dim_order), inp.pool, self.device)


def spec_of(inp: Input) -> Spec:
    """The spec of what is stored."""
    assert inp.value.spec is not None
    return inp.value.spec
