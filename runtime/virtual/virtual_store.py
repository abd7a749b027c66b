"""The store of virtual ranks: each distinct shard once, shared by the ranks that hold it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import torch

from shardfx.ir.graph import Graph, Input
from shardfx.ir.ops.pools.transfer import finish
from shardfx.ir.program.store_layout import contiguous_parameters, contiguous_tensors
from shardfx.ir.shards import Shards
from shardfx.ir.spec import Spec
from shardfx.runtime.store import Store, norm_of, spec_of

from .shard_gradient import Facts, Sharded, ShardGradient, plain

Tensor = torch.Tensor


class VirtualStore(Store):
    """All shards, in this process."""

    def __init__(self, graph: Graph, device: torch.device) -> None:
        super().__init__(graph, device)
        self._neighbours = contiguous_parameters(graph.nodes, graph.inputs)
        self._sharded: dict[str, Sharded] = {}
        self._shards = {
            name: Shards.of(spec_of(given), given.value.shape, graph.mesh)
            for name, given in self._given.items()
            if given.value.spec is not None
        }

    def _split(self, inp: Input, full: Tensor) -> list[Tensor]:
        layout = self._shards[inp.name]
        return [layout.sharding(full, i) for i in range(layout.count)]

    def _parameter_memory(self) -> dict[str, list[Tensor]]:
        """Of those that are gathered together, where the same ranks hold them."""
        found: dict[str, list[Tensor]] = {}
        for together in self._neighbours:
            layouts = [self._shards[given.name] for given in together]
            if any(layout.by_rank != layouts[0].by_rank for layout in layouts):
                continue
            dtype = together[0].value.type.dtype
            places = [
                contiguous_tensors([layout.local_shapes[i] for layout in layouts], dtype, self.device)
                for i in range(layouts[0].count)
            ]
            found |= {given.name: [place[k] for place in places] for k, given in enumerate(together)}
        return found

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

    def shard(self, name: str, rank: int) -> Tensor:
        """What a rank holds; ranks that hold the same share one tensor."""
        return self._held(name)[self._shards[name].by_rank[rank]].detach()

    def full(self, name: str, own_shards: Sequence[Tensor] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        if self._given[name].pool:
            finish(self.device)
        shards = own_shards if own_shards is not None else self._held(name)
        joined = self._shards[name].join([plain(shard).detach() for shard in shards])
        return joined if len(shards) > 1 else joined.clone()

    def norm(self, grads: Mapping[str, Sequence[Tensor]], kind: float) -> Tensor:
        """The norm of the shards, each of which is here once."""
        return norm_of([plain(shard) for own_shards in grads.values() for shard in own_shards], kind, self.device)

    def assemble(self, spec: Spec, shape: Sequence[int], own_shards: Sequence[Tensor]) -> Tensor:
        return Shards.of(spec, shape, self.mesh).join(own_shards)

    def as_gradient(self, name: str, shard: Tensor, number: int) -> Tensor:
        """The shard; where there are several, it knows what it is computed from."""
        shards = self.parameters[name]
        if len(shards) == 1:
            return shard
        if name not in self._sharded:
            self._sharded[name] = Sharded(name, len(shards), [weakref.ref(each) for each in shards])
        return ShardGradient.of(shard, Facts(frozenset([(self._sharded[name], number)])))
