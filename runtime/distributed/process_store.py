"""The store of one rank: its shards of parameters and buffers, as DTensors.

Parameters are DTensors (see :mod:`.dtensor_shard`), so that optimizers, ``clip_grad_norm_`` and
``torch.distributed.checkpoint`` work as they do elsewhere; of a pipeline, those of this rank's stages, on the mesh
without the axis of stages. Where a plan shards none of them they are plain tensors: each rank stores them replicated,
and no communication is needed. (Parameters are all DTensors or all plain, and buffers likewise: ``foreach`` optimizers,
norms and averages take no mixture.) Collective methods (``load``, ``full``, ``assemble``) must be called on all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import inf
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardfx.ir.graph import Graph, Input, Output, OutputKind
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.pools.transfer import finish
from shardfx.ir.shards import Shards
from shardfx.ir.spec import Spec
from shardfx.runtime.store import Store, checksum, spec_of, with_strides_of

from .dtensor_shard import DTensorShard
from .groups import device_mesh, is_dry_run, make_groups
from .peer_failure import ending_together, tell_all

Tensor = torch.Tensor
T = TypeVar("T")
c10d = torch.ops._c10d_functional
WRITTEN, DONE = "parameters were written into since the last call", "done since the last call"


class ProcessStore(Store):
    """The store of this process's shards."""

    def __init__(self, graph: Graph, device: torch.device) -> None:
        super().__init__(graph, device, dist.get_rank())
        self.rank: int = dist.get_rank()
        self.is_staged = graph.pipeline is not None
        self.history: Counter[str] = Counter()
        """Counts of this rank's backwards, optimizer steps and loads since the last call of all ranks."""
        self._writes_before: int | None = None
        self._shardings = any(spec_of(inp).axes for inp in self._inputs)
        self._replicated = [g.name for g in self._inputs if not (self.is_staged or spec_of(g).axes)]
        self._shards: dict[str, DTensorShard] = {}
        stages = "" if graph.pipeline is None else graph.pipeline.axis
        axes: dict[str, Any] = {axis.name: axis.size for axis in self.mesh.space if axis.name != stages}
        if axes:
            along, shown_on = Mesh(**axes), device_mesh(self.mesh, device.type, [*axes])
            for given in (each for name, each in self._given.items() if self.is_here(name)):
                type_, coords = given.value.type, self.mesh.coords(self.rank)
                self._shards[given.name] = DTensorShard.of(
                    spec_of(given), type_.shape, type_.dtype, along, shown_on, coords
                )

    def _holders(self, inp: Input) -> list[int]:
        """The ranks that store an input."""
        return [rank for rank in range(self.mesh.size) if self.graph.is_here(inp.at, self.mesh.coords(rank))]

    def has_weights(self, mine: bool) -> bool:
        """Whether rank 0 has weights to load: its values count."""
        return tell_all(mine)[0]

    # ---- the history that ranks compare at each call

    def _writes(self) -> int:
        """The number of writes into parameters that every rank stores replicated."""
        shards = [self.parameters[name] for name in self._replicated if name in self.parameters]
        return sum(DTensorShard.unwrap(each)._version for each in shards)

    def done(self) -> dict[str, str]:
        """The history of parameters since the last call of all ranks, in words by subject."""
        written = 0 if self._writes_before is None else self._writes() - self._writes_before
        text = "; ".join(f"{what}, {times} times" if times > 1 else what for what, times in self.history.items())
        return ({WRITTEN: f"{written} times"} if written else {}) | ({DONE: text} if text else {})

    @cached_property
    def all_train(self) -> bool:
        """Whether every rank has trainable parameters: stages may be frozen."""
        trained = {output.name for output in self.graph.outputs if output.kind is OutputKind.GRADIENT}
        return len(set[int]().union(*(self._holders(g) for g in self._inputs if g.name in trained))) == self.mesh.size

    def loaded(self, values: Mapping[str, Tensor]) -> None:
        """Note that a state dict of shards, or a part of one, is loaded, which all ranks have to do."""
        if all(name in values for name in self.stamps()):
            self.forget_history()
        count = "some" if self.is_staged else str(len(values))  # of stages a rank may hold more than another
        same = [checksum(DTensorShard.unwrap(values[name])) for name in self._replicated if name in values]
        self.history[f"{count} tensors of a state dict were loaded, with content {sum(same) % 2**32:08x}"] += 1

    def handed_out(self, scale: Tensor | float) -> None:
        """Note a backward of ``scale`` times the loss."""
        known = not isinstance(scale, Tensor) or (scale.device.type == "cpu" and scale.numel() == 1)
        times = f" of {float(scale)} times the loss" if known else ""
        parameters = () if self.is_staged else self.parameters.values()
        added = "added to gradients" if any(p.grad is not None for p in parameters) else "with no gradients before"
        self.history[f"a backward{times}, {added}"] += 1

    def forget_history(self) -> None:
        """Clear the history, as all ranks did the same."""
        self.history.clear()
        self._writes_before = self._writes()

    # ---- what is stored

    def said(self, mine: Mapping[str, T]) -> Mapping[str, T]:
        if not self.is_staged:
            return mine
        found: dict[str, T] = {}
        for each in reversed(tell_all(mine)):  # of what several store the first one says it
            found |= each
        return {inp.name: found[inp.name] for inp in self.graph.inputs if inp.name in found}

    def placed(self, name: str) -> str:
        return f"{super().placed(name)}, shard {self._layouts[name].by_rank[self.rank]}"

    def stamps(self) -> Mapping[str, tuple[str, int]]:
        return {
            name: (str(given.value.spec), self._numbers[name][0])
            for name, given in self._given.items()
            if self.is_here(name)
        }

    def gradient(self, output: Output, own_shards: Sequence[Tensor]) -> Tensor:
        return self._wrapped(output.name, own_shards[0])

    def like(self, name: str, full: Tensor) -> Tensor | None:
        inp = self._given[name]
        own_shards = self._split(inp, self._of_rank_0(inp, full.detach()))
        return self._wrapped(name, own_shards[0].to(self.device, copy=True)) if own_shards else None

    def _as_parameter(self, name: str, shard: Tensor, trained: bool) -> nn.Parameter:
        return self._shards[name].parameter(shard, trained) if self._shardings else nn.Parameter(shard, trained)

    def _write(self, inp: Input, content: Tensor) -> None:
        (shard,) = self._split(inp, content)
        self._plain(self._held_full(inp.name).detach()).copy_(shard)

    def _wrapped(self, name: str, shard: Tensor) -> Tensor:
        """A gradient or buffer as a DTensor, if parameters are: in the strides of the parameter, which optimizer
        kernels rely on, and torch sees to for plain tensors."""
        if not self._shardings:
            return shard
        if name in self.parameters:
            shard = with_strides_of(shard, self.shard(name, self.rank))
        return self._shards[name].wrap(shard)

    def _as_state(self, name: str, shard: Tensor) -> Tensor:
        return self._shards[name].wrap(shard) if spec_of(self._given[name]).axes else shard

    def shown(self, name: str) -> DTensorShard | None:
        """The DTensor view, where some parameter is sharded."""
        return self._shards[name] if self._shardings else None

    def _plain(self, tensor: Tensor) -> Tensor:
        return DTensorShard.unwrap(tensor)

    def _of_rank_0(self, inp: Input, full: Tensor) -> Tensor:
        if isinstance(full, DTensor):
            full = full.full_tensor()
        if self.rank and not is_dry_run():  # what it has itself does not count
            sent = torch.empty(full.shape, dtype=full.dtype, device=self.device)
        else:
            sent = full.to(self.device, copy=True).contiguous()
        with ending_together(f"the broadcast of {inp.name!r}"):
            dist.broadcast(sent, 0)
        return sent

    def full(self, name: str, own: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The global tensor; of a pipeline, from the first rank that stores it."""
        given, mine = self._given[name], None
        if given.pool:
            finish(self.device)
        if self.is_here(name):
            shard = self._plain((own if own is not None else self._held(name)[0]).detach())
            mine = self.assemble(spec_of(given), given.value.shape, [shard])
        holders = self._holders(given)
        if mine is not None and len(holders) == self.mesh.size:
            return mine
        dtype = dtype or given.value.type.dtype
        sent = torch.empty(given.value.shape, dtype=dtype, device=self.device) if mine is None else mine.contiguous()
        with ending_together(f"sending {name!r} to the ranks of other stages"):
            dist.broadcast(sent, holders[0])
        return sent

    def norm(self, grads: Mapping[str, Tensor], kind: float) -> Tensor:
        mine = {name: DTensorShard.unwrap(grad) for name, grad in grads.items() if self._is_first(name)}
        total, largest = super().norm(mine, kind).to(self.device), kind == inf
        total = total if largest else total**kind
        with ending_together("the norm of all gradients"):
            dist.all_reduce(total, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
        return total if largest else total ** (1 / kind)

    def _is_first(self, name: str) -> bool:
        """Whether this rank is the first of those that have its shard."""
        inp = self._given[name]
        by_rank = self._layouts[name].by_rank
        return next(rank for rank in self._holders(inp) if by_rank[rank] == by_rank[self.rank]) == self.rank

    def assemble(self, spec: Spec, shape: Sequence[int], own_shards: Sequence[Tensor]) -> Tensor:
        shard = own_shards[0].to(self.device)
        shards = Shards.of(spec, shape, self.mesh)
        axes = tuple(axis for axis in self.mesh.sort(spec.axes) if not self.mesh[axis].loop)
        if not axes:
            return shards.join([shard]).clone()
        largest = max(torch.Size(local).numel() for local in shards.local_shapes)
        padded = shard.new_zeros(largest)
        padded[: shard.numel()].copy_(shard.reshape(-1))
        make_groups(self.mesh, [axes])
        n, group = self.mesh.extent(axes), self.mesh.group_name(self.rank, axes)
        with ending_together("gathering a global tensor"):
            everyone = c10d.wait_tensor.default(c10d.all_gather_into_tensor.default(padded, n, group))
        found: dict[int, Tensor] = {}
        for rank, sent in zip(self.mesh.group(self.rank, axes), everyone.split(largest), strict=True):
            which = shards.by_rank[rank]
            local = shards.local_shapes[which]
            found[which] = sent[: torch.Size(local).numel()].reshape(local)
        return shards.join([found[i] for i in range(shards.count)])
