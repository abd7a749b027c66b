"""Stores of parameters, buffers and optimizer states, and their shards; all programs of a plan share one.

On virtual ranks a parameter is what it is on one device, so that any optimizer and any script may use it: a full
tensor. Where it is sharded, the shards are copies, which a run brings up to date before and whose new content it joins.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from shardfx.ir.graph import Graph, Input, InputKind, Output
from shardfx.ir.ops.pools.transfer import arrived, finish, settled
from shardfx.ir.program.store_layout import contiguous_parameters, contiguous_tensors, stepped_groups
from shardfx.ir.shards import Shards
from shardfx.ir.spec import Spec, with_dim_order

if TYPE_CHECKING:
    from .distributed.dtensor_shard import DTensorShard

Tensor = torch.Tensor
T = TypeVar("T")


def version(tensor: Tensor) -> int:
    """The version counter of a tensor, or of the one that it wraps: incremented by each write."""
    local = getattr(tensor, "_local_tensor", None)
    return tensor._version + (local._version if local is not None else 0)


def checksum(x: Tensor) -> int:
    """A digest of the bytes of ``x``, as a signed number of 64 bits: equal for equal bits in the same order, on any
    device."""
    content = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return int.from_bytes(hashlib.blake2b(content.data, digest_size=8).digest(), "big", signed=True)


def with_strides_of(tensor: Tensor, other: Tensor) -> Tensor:
    """A tensor whose elements lie in the order of those of another one of its shape: itself, or a copy."""
    if tensor.stride() == other.stride():
        return tensor
    return torch.empty_strided(other.shape, other.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


class Store:
    """The state of a plan: full parameters and buffers, and the shards of all ranks, each distinct one once.

    Args:
        rank: the one rank of this process, in a store of its shards (:mod:`.distributed.process_store`).
    """

    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]
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
        self._shards_of: dict[str, list[Tensor]] = {}
        """The shards of parameters and buffers that are stored full, and are sharded."""
        self._committed: set[str] = set()
        """The names of these whose shards have new content."""
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
        """Store global parameters, buffers and initialized states, overwriting what is there. Rank 0's values count,
        and all ranks call it."""
        finish(self.device)
        memory = {} if self.parameters else self._parameter_memory()
        for inp in (each for each in self._given.values() if each.name in full):
            name, trained, is_parameter = inp.name, trainable.get(inp.name, True), inp.kind is InputKind.PARAMETER
            content = self._of_rank_0(inp, full[name].detach().to(inp.value.type.dtype))
            self._loaded.add(name)
            if not self.is_here(name):
                self.trained_elsewhere |= {name} if is_parameter and trained else set()
            elif name in self.states:
                for old, new in zip(self.states[name], self._split(inp, content), strict=True):
                    self._plain(old).copy_(new)
            elif name in self.parameters or name in self.buffers:
                self._write(inp, content)
            else:
                placed = self._placed(name, self._split(inp, content), memory)
                if self.rank is None and (self._layouts[name].count > 1 or self._layouts[name].over):
                    self._shards_of[name] = placed
                    placed = self._placed(name, [content], {})
                if is_parameter:
                    self.parameters[name] = self._as_parameter(name, placed[0], trained)
                else:
                    self.buffers[name] = self._wrapped(name, placed[0])

    def refresh(self) -> None:
        """Bring the shards of what is stored full up to date: scripts write to it."""
        if self._shards_of:
            full = {**self.parameters, **self.buffers}
            shards = {name: self._split(self._given[name], full[name].detach()) for name in self._shards_of}
            torch._foreach_copy_([*chain(*self._shards_of.values())], [*chain(*shards.values())])

    def publish(self) -> None:
        """Join new content of shards where it is stored full."""
        if self._committed:
            finish(self.device)
        for name in self._committed:
            inp, full = self._given[name], self.parameters.get(name, self.buffers.get(name))
            assert full is not None
            full.detach().copy_(self.assemble(spec_of(inp), inp.value.shape, self._shards_of[name]))
        self._committed.clear()

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

    def like(self, name: str, full: Tensor) -> Tensor | None:
        """A copy of a global tensor, stored as a parameter of its shape; None: by other processes. Rank 0's tensor
        counts, and all ranks call it."""
        return full.detach().to(self.device, copy=True)

    def to(self, device: torch.device) -> None:
        """Move the stored tensors; parameters stay the same objects."""
        finish(self.device)
        self.device = device
        memory = self._parameter_memory()
        for name, own_shards in self._shards_of.items():
            self._shards_of[name] = self._placed(name, own_shards, memory)
        memory = {name: places for name, places in memory.items() if name not in self._shards_of}
        for name, parameter in self.parameters.items():
            (parameter.data,) = self._placed(name, [parameter.data], memory)
        self.buffers |= {name: self._placed(name, [buffer], {})[0] for name, buffer in self.buffers.items()}
        self.states |= {name: self._placed(name, states, {}) for name, states in self.states.items()}

    def is_here(self, name: str) -> bool:
        """Whether a rank of this process stores a shard."""
        return bool(self._numbers[name])

    def shard(self, name: str, rank: int) -> Tensor:
        """The shard of a parameter, buffer or state on a rank of this process, plain and local; ranks that hold the
        same share one tensor."""
        place = self._numbers[name].index(self._layouts[name].by_rank[rank])
        return self._plain(self._held(name)[place]).detach()

    def placed(self, name: str) -> str:
        """How a value is stored, in words."""
        return str(spec_of(self._given[name]))

    def stamps(self) -> Mapping[str, tuple[str, int]]:
        """The spec of each stored value that may be sharded, and the number of its shard in this process."""
        return {}

    def commit(self, name: str, rank: int, new: Tensor) -> None:
        """Store the new content of a buffer, parameter or state, once for each distinct shard."""
        stored = self.shard(name, rank)
        if stored.data_ptr() != new.data_ptr():
            stored.copy_(arrived(new))
        if name in self._shards_of:
            self._committed.add(name)

    def full(self, name: str, own: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The global tensor of a parameter, buffer or state, or of one that is stored like it (its gradient): a copy.
        ``dtype`` is that of ``own``, to processes that store none. All ranks call it alike."""
        given = self._given[name]
        if given.pool:
            finish(self.device)
        if own is None and name in self.states:
            return self.assemble(spec_of(given), given.value.shape, self.states[name]).clone()
        return (own if own is not None else self._held_full(name)).detach().clone()

    def _held_full(self, name: str) -> Tensor:
        return self.parameters[name] if name in self.parameters else self.buffers[name]

    def norm(self, grads: Mapping[str, Tensor], kind: float) -> Tensor:
        """The norm of stored gradients as one vector, in float64: each element of the global model counts once. All
        ranks call it alike."""
        norms = [torch.linalg.vector_norm(grad, kind).to(self.device, torch.float64) for grad in grads.values()]
        return torch.linalg.vector_norm(torch.stack(norms), kind) if norms else torch.zeros((), dtype=torch.float64)

    def assemble(self, spec: Spec, shape: Sequence[int], own_shards: Sequence[Tensor]) -> Tensor:
        """The global tensor of a value that is placed by ``spec``. All ranks call it alike."""
        return Shards.of(spec, shape, self.mesh).join(own_shards)

    def gradient(self, output: Output, own_shards: Sequence[Tensor]) -> Tensor:
        """The gradient of a parameter, as the parameter is stored."""
        if output.name not in self._shards_of:
            return own_shards[0]
        return self.assemble(spec_of(output), output.value.shape, own_shards)

    def shown(self, name: str) -> DTensorShard | None:
        """The DTensor view of a parameter's shard; None: the parameter is the shard."""
        return None

    def _held(self, name: str) -> Sequence[Tensor]:
        """The shards of a parameter, buffer or state."""
        return self._shards_of.get(name) or self.states.get(name) or [self._held_full(name)]

    # ---- what differs between all ranks in one process and one of them

    def _of_rank_0(self, inp: Input, full: Tensor) -> Tensor:
        """Rank 0's global tensor, where each process passes its own."""
        return full

    def _wrapped(self, name: str, shard: Tensor) -> Tensor:
        """The user-facing view of a buffer."""
        return shard

    def _as_parameter(self, name: str, shard: Tensor, trained: bool) -> nn.Parameter:
        """The user-facing view of a parameter."""
        return nn.Parameter(shard, requires_grad=trained)

    def _as_state(self, name: str, shard: Tensor) -> Tensor:
        """The user-facing view of an optimizer state."""
        return shard

    def _plain(self, tensor: Tensor) -> Tensor:
        """The plain local tensor behind a stored one."""
        return tensor

    def _write(self, inp: Input, content: Tensor) -> None:
        """Overwrite a parameter or a buffer."""
        self._held_full(inp.name).detach().copy_(content)

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


def spec_of(inp: Input | Output) -> Spec:
    """The spec of a stored value, or of its gradient."""
    assert inp.value.spec is not None
    return inp.value.spec
