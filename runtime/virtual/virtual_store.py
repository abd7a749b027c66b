"""The store of virtual ranks: each distinct shard once, shared by the ranks that hold it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import torch

from shardfx.ir.graph import Graph
from shardfx.ir.ops.pools.transfer import finish
from shardfx.ir.shards import Shards
from shardfx.ir.spec import Spec
from shardfx.runtime.store import Store, norm_of

from .shard_gradient import Sharded, ShardGradient, plain

Tensor = torch.Tensor


class VirtualStore(Store):
    """The store of virtual ranks: all shards, in this process."""

    def __init__(self, graph: Graph, device: torch.device) -> None:
        super().__init__(graph, device)
        self._sharded: dict[str, Sharded] = {}

    def to(self, device: torch.device) -> None:
        finish(self.device)
        self.device = device
        memory = self._parameter_memory()
        for name, own_shards in self.parameters.items():
            placed = self._placed(name, [shard.data for shard in own_shards], memory)
            for shard, there in zip(own_shards, placed, strict=True):
                shard.data = there
        for stored in (self.buffers, self.states):
            stored |= {name: self._placed(name, tensors, {}) for name, tensors in stored.items()}

    def norm(self, grads: Mapping[str, Sequence[Tensor]], kind: float) -> Tensor:
        for name, own_shards in grads.items():
            if name in self._sharded and len(own_shards) < len(self.parameters[name]):
                self._sharded[name].refuse("the norm of gradients")
        return norm_of([plain(shard) for own_shards in grads.values() for shard in own_shards], kind, self.device)

    def _plain(self, tensor: Tensor) -> Tensor:
        return plain(tensor)

    def assemble(self, spec: Spec, shape: Sequence[int], own_shards: Sequence[Tensor]) -> Tensor:
        return Shards.of(spec, shape, self.mesh).join(own_shards)

    def as_gradient(self, name: str, shard: Tensor) -> Tensor:
        """The shard; where a parameter has several, as a :class:`ShardGradient`."""
        shards = self.parameters[name]
        if len(shards) == 1:
            return shard
        if name not in self._sharded:
            self._sharded[name] = Sharded(name, [weakref.ref(each) for each in shards])
        return ShardGradient.of(shard, self._sharded[name])
