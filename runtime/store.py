"""Stores of shards of parameters, buffers and optimizer states; all programs of a plan share one."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from shardfx.ir.graph import Graph, Input, InputKind
from shardfx.ir.ops.pools.transfer import arrived, finish, settled
from shardfx.ir.program.store_layout import contiguous_parameters, contiguous_tensors, stepped_groups
from shardfx.ir.shards import Shards
from shardfx.ir.spec import Spec, with_dim_order

from .virtual.shard_gradient import Sharded, ShardGradient, plain

if TYPE_CHECKING:
    from .distributed.dtensor_shard import DTensorShard

Tensor = torch.Tensor
T = TypeVar("T")


def version(tensor: Tensor) -> int:
    """The version counter of a tensor, or of the one that it wraps: incremented by each write."""
    local = getattr(tensor, "_local_tensor", None)
    return tensor._version + (local._version if local is not None else 0)


def norm_of(tensors: Sequence[Tensor], kind: float, device: torch.device) -> Tensor:
    """The norm of tensors concatenated as one vector, in float64."""
    norms = [torch.linalg.vector_norm(tensor, kind).to(device, torch.float64) for tensor in tensors]
    return torch.linalg.vector_norm(torch.stack(norms), kind) if norms else torch.zeros((), dtype=torch.float64)


def with_strides_of(tensor: Tensor, other: Tensor) -> Tensor:
    """A tensor whose elements lie in the order of those of another one of its shape: itself, or a copy."""
    if tensor.stride() == other.stride():
        return tensor
    return torch.empty_strided(other.shape, other.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


class Store:
    """The state of a plan: the shards of parameters, buffers and states of all ranks, each distinct one once.

    Args:
        rank: the one rank of this process, in a store of its shards (:mod:`.distributed.process_store`).
    """

    parameters: dict[str, list[nn.Parameter]]
    buffers: dict[str, list[Tensor]]
    states: dict[str, list[Tensor]]
    """The shards of optimizer states, once there is an optimizer."""
    trained_elsewhere: frozenset[str] = frozenset()
    """The names of trainable parameters that only other processes store."""

    def __init__(self, graph: Graph, device: torch.device, rank: int | None = None) -> None:
        self.graph, self.mesh, self.device, self.rank = graph, graph.mesh, device, rank
        self.parameters, self.buffers, self.states = {}, {}, {}
        self._inputs = [g for g in graph.inputs if g.kind in (InputKind.PARAMETER, InputKind.BUFFER)]
        self._states = graph.of_kind(InputKind.STATE)
        self._given: dict[str, Input] = {given.name: given for given in (*self._inputs, *self._states)}
        self._loaded: set[str] = set()
        self._sharded: dict[str, Sharded] = {}
        self._layouts = {name: Shards.of(spec_of(g), g.value.shape, graph.mesh) for name, g in self._given.items()}
        self._numbers = {name: self._stored(given) for name, given in self._given.items()}
        """The numbers of the shards of each value that are stored here, in the order of their tensors."""
        self._stepped = [] if rank is None else stepped_groups(graph)
        self._places: dict[str, list[Tensor]] = {}
        """Preallocated memory of states that are yet to be made."""

    def _stored(self, inp: Input) -> Sequence[int]:
        layout = self._layouts[inp.name]
        if self.rank is None:
            return range(layout.count)
        here = self.graph.is_here(inp.at, self.mesh.coords(self.rank))
        return [layout.by_rank[self.rank]] if here else []

    def handed_out(self, scale: Tensor | float) -> None:
        """Note that gradients times ``scale`` are delivered to parameters, which other processes have to do alike."""

    def loaded(self, values: Mapping[str, Tensor]) -> None:
        """Note that a state dict of shards with these names is loaded."""

    def is_loaded(self, name: str) -> bool:
        """Whether a parameter, buffer or state has content, here or in another process."""
        return name in self._loaded

    def said(self, mine: Mapping[str, T]) -> Mapping[str, T]:
        """Merge, by name, entries of all processes about the values that they store; of several, the first one's
        counts. All ranks call it alike."""
        return mine

    def has_weights(self, mine: bool) -> bool:
        """Whether a model's weights are available for loading; ``mine``: in this process. All ranks call it alike."""
        return mine

    def load(self, full: Mapping[str, Tensor], trainable: Mapping[str, bool]) -> None:
        """Shard global parameters, buffers and initialized states into the stored shards, overwriting them. Rank 0's
        values count, and all ranks call it."""
        finish(self.device)
        memory = {} if self.parameters else self._parameter_memory()
        for inp in (each for each in self._given.values() if each.name in full):
            name, trained, is_parameter = inp.name, trainable.get(inp.name, True), inp.kind is InputKind.PARAMETER
            own_shards = self._split(inp, self._of_rank_0(inp, full[name].detach().to(inp.value.type.dtype)))
            self._loaded.add(name)
            if stored := self._held(name):
                self._write(stored, own_shards)
            elif is_parameter and own_shards:
                shown, placed = self.shown(name), self._placed(name, own_shards, memory)
                self.parameters[name] = [
                    nn.Parameter(each, requires_grad=trained) if shown is None else shown.parameter(each, trained)
                    for each in placed
                ]
            elif own_shards:
                self.buffers[name] = [self._wrapped(name, each) for each in self._placed(name, own_shards, memory)]
            elif is_parameter and trained:
                self.trained_elsewhere |= {name}

    def begin(self, name: str, start: float | str) -> None:
        """Initialize an optimizer state: one number everywhere, or a copy of the parameter of the name ``start``."""
        inp = self._given[name]
        dtype = inp.value.type.dtype
        if isinstance(start, str):
            full = self.full(start).to(dtype)
        else:
            full = torch.full((), start, dtype=dtype).expand(inp.value.shape)
        own_shards = [shard.contiguous() for shard in self._split(inp, full)]
        self._loaded.add(name)
        if own_shards:
            placed = self._placed(name, own_shards, self._state_memory(inp))
            self.states[name] = [self._as_state(name, each) for each in placed]

    def sharding(self, name: str, full: Tensor) -> list[Tensor]:
        """A tensor of a parameter's shape, as the shards of the parameter that are here. Rank 0's counts, and all ranks
        call it."""
        inp = self._given[name]
        own_shards = self._split(inp, self._of_rank_0(inp, full.detach()))
        return [self._wrapped(name, each.to(self.device, copy=True)) for each in own_shards]

    def to(self, device: torch.device) -> None:
        """Move the stored tensors; parameters stay the same objects."""
        finish(self.device)
        self.device = device
        memory = self._parameter_memory()
        for name, own_shards in self.parameters.items():
            placed = self._placed(name, [shard.data for shard in own_shards], memory)
            for shard, there in zip(own_shards, placed, strict=True):
                shard.data = there
        for stored in (self.buffers, self.states):
            stored |= {name: self._placed(name, tensors, {}) for name, tensors in stored.items()}

    def is_here(self, name: str) -> bool:
        """Whether a rank of this process stores a shard."""
        return bool(self._numbers[name])

    def shard(self, name: str, rank: int) -> Tensor:
        """The shard of a parameter, buffer or state on a rank of this process, plain and local; ranks that hold the
        same share one tensor."""
        place = self._numbers[name].index(self._layouts[name].by_rank[rank])
        return self._plain(self._held(name)[place]).detach()

    def stamps(self) -> Mapping[str, tuple[str, int]]:
        """The spec of each stored value, and the number of its shard in this process; -1 if it has all."""
        return {
            name: (str(self._given[name].value.spec), -1 if self.rank is None else numbers[0])
            for name, numbers in self._numbers.items()
            if numbers
        }

    def commit(self, name: str, rank: int, new: Tensor) -> None:
        """Store the new content of a buffer, parameter or state, once for each distinct shard."""
        stored = self.shard(name, rank)
        if stored.data_ptr() != new.data_ptr():
            stored.copy_(arrived(new))

    def full(self, name: str, own_shards: Sequence[Tensor] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The global tensor of a parameter or buffer, or of ``shards`` that are sharded like it (its gradient): a copy.
        ``dtype`` is that of the shards, to processes that store none. All ranks call it alike."""
        given = self._given[name]
        if given.pool:
            finish(self.device)
        shards = own_shards if own_shards is not None else self._held(name)
        plain = [self._plain(shard.detach()) for shard in shards]
        joined = self.assemble(spec_of(given), given.value.shape, plain)
        return joined.clone() if joined.data_ptr() == plain[0].data_ptr() else joined

    def norm(self, grads: Mapping[str, Sequence[Tensor]], kind: float) -> Tensor:
        """The norm of gradients of parameters, of which the shards here are passed, as one vector: each element of the
        global model counts once. All ranks call it alike."""
        for name, own_shards in grads.items():
            if name in self._sharded and len(own_shards) < len(self.parameters[name]):
                self._sharded[name].refuse("the norm of gradients")
        return norm_of([plain(shard) for own_shards in grads.values() for shard in own_shards], kind, self.device)

    def assemble(self, spec: Spec, shape: Sequence[int], own_shards: Sequence[Tensor]) -> Tensor:
        """The global tensor of a value that is placed by ``spec``. All ranks call it alike."""
        return Shards.of(spec, shape, self.mesh).join(own_shards)

    def as_gradient(self, name: str, shard: Tensor) -> Tensor:
        """The gradient of a parameter's shard; of one of several here, a :class:`.ShardGradient`."""
        shards = self.parameters[name]
        if len(shards) == 1:
            return shard
        if name not in self._sharded:
            self._sharded[name] = Sharded(name, [weakref.ref(each) for each in shards])
        return ShardGradient.of(shard, self._sharded[name])

    def shown(self, name: str) -> DTensorShard | None:
        """The DTensor view of a parameter's shard; None: the parameter is the shard."""
        return None

    def _held(self, name: str) -> Sequence[Tensor]:
        return self.parameters.get(name) or self.buffers.get(name) or self.states.get(name) or ()

    # ---- what differs between all ranks in one process and one of them

    def _of_rank_0(self, inp: Input, full: Tensor) -> Tensor:
        """Rank 0's global tensor, where each process passes its own."""
        return full

    def _wrapped(self, name: str, shard: Tensor) -> Tensor:
        """The user-facing view of a buffer, or of a tensor of a parameter's shape."""
        return shard

    def _as_state(self, name: str, shard: Tensor) -> Tensor:
        """The user-facing view of an optimizer state."""
        return shard

    def _plain(self, tensor: Tensor) -> Tensor:
        """The plain local tensor behind a stored one."""
        return plain(tensor)

    def _write(self, stored: Iterable[Tensor], own_shards: Sequence[Tensor]) -> None:
        """Copy shards into the stored ones."""
        for old, new in zip(stored, own_shards, strict=True):
            self._plain(old.detach()).copy_(new)

    def _split(self, inp: Input, full: Tensor) -> list[Tensor]:
        """This process's shards of a global tensor."""
        return [self._layouts[inp.name].sharding(full, number) for number in self._numbers[inp.name]]

    def _parameter_memory(self) -> dict[str, list[Tensor]]:
        """Contiguous memory for the shards of parameters that are gathered, or stepped, together."""
        stepped = [together for together in self._stepped if together[0].kind is InputKind.PARAMETER]
        return self._contiguous([*contiguous_parameters(self.graph.nodes, self.graph.inputs), *stepped])

    def _state_memory(self, inp: Input) -> dict[str, list[Tensor]]:
        """Contiguous memory for the shards of states that are stepped together, allocated with the first one."""
        if inp.name not in self._places:
            self._places |= self._contiguous([each for each in self._stepped if inp in each])
        return {inp.name: self._places.pop(inp.name)} if inp.name in self._places else {}

    def _contiguous(self, groups: Iterable[Sequence[Input]]) -> dict[str, list[Tensor]]:
        """Contiguous memory for this process's shards of each group, those of one rank side by side."""
        found: dict[str, list[Tensor]] = {}
        for group in groups:
            names = [inp.name for inp in group if self._numbers[inp.name]]
            if self.rank is None and len({self._layouts[name].by_rank for name in names}) > 1:
                continue  # a shard lies next to those of one rank, and others hold it, too
            for numbers in zip(*(self._numbers[name] for name in names), strict=True):
                shapes = [self._layouts[name].local_shapes[n] for name, n in zip(names, numbers, strict=True)]
                places = contiguous_tensors(shapes, group[0].value.type.dtype, self.device)
                for name, place in zip(names, places, strict=True):
                    found.setdefault(name, []).append(place)
        return found

    def _placed(self, name: str, own_shards: Sequence[Tensor], memory: Mapping[str, Sequence[Tensor]]) -> list[Tensor]:
        """Copies of shards in the memory, and with the dim order, of a stored value."""
        if name in memory:
            return [place.copy_(shard) for place, shard in zip(memory[name], own_shards, strict=True)]
        inp = self._given[name]
        return [settled(with_dim_order(each, inp.dim_order), inp.pool, self.device) for each in own_shards]


def spec_of(inp: Input) -> Spec:
    """The spec of a stored value."""
    assert inp.value.spec is not None
    return inp.value.spec
