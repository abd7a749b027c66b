"""The store of virtual ranks: each distinct shard once, shared by the ranks that hold it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import nn

from shardfx.ir.graph import Graph, InputKind
from shardfx.ir.ops.pools.transfer import arrived, finish, settled
from shardfx.ir.program.store_layout import neighbours, side_by_side
from shardfx.ir.shards import Shards
from shardfx.ir.spec import Spec, laid
from shardfx.runtime.local_device import check_device
from shardfx.runtime.store import norm_of

from .shard_gradient import Facts, Sharded, ShardGradient, plain

Tensor = torch.Tensor
T = TypeVar("T")


class VirtualStore:
    """All shards, in this process."""

    def __init__(self, graph: Graph, device: torch.device) -> None:
        self.mesh, self.device = graph.mesh, device
        self.parameters: dict[str, list[nn.Parameter]] = {}
        self.buffers: dict[str, list[Tensor]] = {}
        self.states: dict[str, list[Tensor]] = {}
        self._inputs = [g for g in graph.inputs if g.kind in (InputKind.PARAMETER, InputKind.BUFFER)]
        self._neighbours = neighbours(graph.nodes, graph.inputs)
        self._sharded: dict[str, Sharded] = {}
        self._states = [given for given in graph.inputs if given.kind is InputKind.STATE]
        placed = [(given.name, given.value, given.value.spec) for given in (*self._inputs, *self._states)]
        self._pools = {given.name: given.pool for given in (*self._inputs, *self._states)}
        self._laid = {given.name: given.laid for given in (*self._inputs, *self._states)}
        self._shards = {name: Shards.of(spec, value.shape, graph.mesh) for name, value, spec in placed if spec}

    trained_elsewhere: frozenset[str] = frozenset()
    """All is here."""

    def writes(self) -> int:
        """Pieces that are alike are one."""
        return 0

    def handed_out(self, scale: Tensor | float) -> None:
        """To all ranks at once."""

    def loaded(self, given: Mapping[str, Tensor]) -> None:
        """By all ranks at once."""

    def is_loaded(self, name: str) -> bool:
        """Whether there is content."""
        return any(name in held for held in (self.parameters, self.buffers, self.states))

    def is_here(self, name: str) -> bool:
        """It is."""
        return True

    def said(self, mine: Mapping[str, T]) -> Mapping[str, T]:
        """What is said."""
        return mine

    def has_weights(self, mine: bool) -> bool:
        """Whether there are weights to be loaded."""
        return mine

    def load(self, whole: Mapping[str, Tensor], trainable: Mapping[str, bool]) -> None:
        """Cut whole parameters and buffers into the stored shards; what is stored already is written over."""
        check_device(self.device)
        finish(self.device)
        memory = {} if self.parameters else self._side_by_side()
        for given in self._inputs:
            if given.name not in whole:
                continue
            layout, tensor = self._shards[given.name], whole[given.name].detach()
            pieces = [layout.cut(tensor, i) for i in range(layout.count)]
            pieces = [
                place.copy_(piece) if place is not None else self._settled(given.name, piece)
                for place, piece in zip(memory.get(given.name, [None] * layout.count), pieces, strict=True)
            ]
            held = self.parameters.get(given.name) or self.buffers.get(given.name)
            if held:
                for old, new in zip(held, pieces, strict=True):
                    old.detach().copy_(new)
            elif given.kind is InputKind.PARAMETER:
                grad = trainable.get(given.name, True)
                self.parameters[given.name] = [nn.Parameter(p, requires_grad=grad) for p in pieces]
            else:
                self.buffers[given.name] = pieces

    def _settled(self, name: str, piece: Tensor) -> Tensor:
        """A copy in the memory, and as, a stored value lies."""
        return settled(laid(piece, self._laid[name]), self._pools[name], self.device)

    def _side_by_side(self) -> dict[str, list[Tensor]]:
        """Memory for the pieces of parameters that are gathered together, where the same ranks hold them."""
        found: dict[str, list[Tensor]] = {}
        for together in self._neighbours:
            layouts = [self._shards[given.name] for given in together]
            if any(layout.by_rank != layouts[0].by_rank for layout in layouts):
                continue
            dtype = together[0].value.type.dtype
            places = [
                side_by_side([layout.local_shapes[i] for layout in layouts], dtype, self.device)
                for i in range(layouts[0].count)
            ]
            found |= {given.name: [place[k] for place in places] for k, given in enumerate(together)}
        return found

    def to(self, device: torch.device) -> None:
        """Move what is stored; parameters stay the same objects."""
        finish(self.device)
        self.device = device
        memory = self._side_by_side()
        for name, pieces in self.parameters.items():
            for i, piece in enumerate(pieces):
                there = memory[name][i].copy_(piece.data) if name in memory else piece.data.to(device)
                piece.data = self._settled(name, piece.data) if self._pools[name] else there
        for held in (self.buffers, self.states):
            for name, tensors in held.items():
                beside = bool(self._pools[name])
                held[name] = [self._settled(name, each) if beside else each.to(device) for each in tensors]

    def _held(self, name: str) -> Sequence[Tensor]:
        return self.parameters.get(name) or self.buffers.get(name) or self.states[name]

    def piece(self, name: str, rank: int) -> Tensor:
        """What a rank holds; ranks that hold the same share one tensor."""
        return self._held(name)[self._shards[name].by_rank[rank]].detach()

    def held(self) -> Mapping[str, tuple[str, int]]:
        """How each is placed; all pieces are here."""
        return {given.name: (str(given.value.spec), -1) for given in (*self._inputs, *self._states)}

    def begin(self, name: str, start: float | str) -> None:
        """Make a state of an optimizer: one number everywhere, or a copy of a parameter."""
        layout = self._shards[name]
        dtype = next(given.value.type.dtype for given in self._states if given.name == name)
        if isinstance(start, str):
            whole = self.whole(start).to(dtype)
            pieces = [layout.cut(whole, i) for i in range(layout.count)]
        else:
            shapes = [layout.local_shapes[i] for i in range(layout.count)]
            pieces = [torch.full(shape, start, dtype=dtype) for shape in shapes]
        self.states[name] = [self._settled(name, piece) for piece in pieces]

    def fill(self, name: str, whole: Tensor) -> None:
        """Cut a whole state into the stored pieces."""
        finish(self.device)
        for i, piece in enumerate(self.states[name]):
            piece.copy_(self._shards[name].cut(whole, i))

    def commit(self, name: str, rank: int, new: Tensor) -> None:
        """Keep the new content of a buffer, parameter or state."""
        self._held(name)[self._shards[name].by_rank[rank]].detach().copy_(arrived(new))

    def cut(self, name: str, whole: Tensor) -> list[Tensor]:
        """All pieces."""
        layout = self._shards[name]
        return [layout.cut(whole.detach(), i).to(self.device, copy=True) for i in range(layout.count)]

    def whole(self, name: str, pieces: Sequence[Tensor] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """The whole tensor from its shards, in memory of its own."""
        if self._pools[name]:
            finish(self.device)
        held = pieces if pieces is not None else self._held(name)
        joined = self._shards[name].join([plain(piece).detach() for piece in held])
        return joined if len(held) > 1 else joined.clone()

    def norm(self, grads: Mapping[str, Sequence[Tensor]], kind: float) -> Tensor:
        """The norm of the pieces, each of which is here once."""
        return norm_of([plain(piece) for pieces in grads.values() for piece in pieces], kind, self.device)

    def assemble(self, spec: Spec, shape: Sequence[int], pieces: Sequence[Tensor]) -> Tensor:
        """The whole of a value from its distinct pieces."""
        return Shards.of(spec, shape, self.mesh).join(pieces)

    def as_gradient(self, name: str, piece: Tensor, number: int) -> Tensor:
        """The piece; where there are several, it knows what it is computed from."""
        held = self.parameters[name]
        if len(held) == 1:
            return piece
        if name not in self._sharded:
            self._sharded[name] = Sharded(name, len(held), [weakref.ref(each) for each in held])
        return ShardGradient.of(piece, Facts(frozenset([(self._sharded[name], number)])))

    def shown(self, name: str) -> None:
        """Parameters are the pieces."""
