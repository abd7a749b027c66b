"""Parts of flat buffers: where values lie in them. Parts that do not overlap do not interfere."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardfx.ir.errors import DOES_NOT_RUN
from shardfx.ir.ops import pack
from shardfx.ir.ops.traits import COPIES, is_neutral

from .aliasing import Aliasing, view_source

aten = torch.ops.aten

PartRange = tuple[int, int, int]
"""Of flat memory: shards, first element of each, elements in each."""
PartSlot = tuple[fx.Node, PartRange]
"""The flat memory, and the place in it."""
IN_ORDER = {
    *(aten.alias.default, aten.detach.default, aten.view.default, aten._unsafe_view.default, aten.reshape.default),
    *(aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
}
"""What sees the same elements in the same order."""


class BufferParts:
    """The slots of parts, of what was written into them, and of what is seen of either."""

    def __init__(self, share: Aliasing) -> None:
        self._share = share
        self._exact: dict[fx.Node, PartSlot] = {}
        self._within: dict[fx.Node, PartSlot] = {}
        """Of views that may be in another order, or of some of the elements, and of ``_copies``."""
        self._copies: dict[fx.Node, PartSlot] = {}
        """Of what is elsewhere, and equals what fills a slot."""
        self._views: dict[fx.Node, torch.Tensor] = {}
        """What fills a slot, and views of it, without content: how they lie in it."""

    def get(self, value: fx.Node) -> PartSlot | None:
        """The slot that a value fills, element by element."""
        return self._exact.get(value)

    def holding(self, value: fx.Node) -> PartSlot | None:
        """The slot whose elements equal those of a value, in order: it fills it, or is a copy of what does."""
        return self._exact.get(value) or self._copies.get(value)

    def put(self, node: fx.Node, into: fx.Node, slot: PartSlot) -> None:
        """Record a value that fills a slot, written ``into`` what fills it."""
        self._exact[node] = slot
        if into in self._views:
            self._views[node] = self._views[into]

    def part(self, node: fx.Node) -> None:
        """Record a part of a flat buffer."""
        args: Any = node.args
        flat, shards, offset, shape = args
        self._exact[node] = (flat, (shards, offset, torch.Size(shape).numel() // max(shards, 1)))
        if shards == 1:
            self._views[node] = torch.empty(list(shape), device="meta")

    def unpacked(self, node: fx.Node) -> str:
        """A value that is taken of several: those that are contiguous in a buffer are parts of it, too.
        Gives what is wrong with it, if anything."""
        args: Any = node.args
        source, number = args
        if not isinstance(source, fx.Node) or source.target is not pack.unflatten or source.args[2:] != (1,):
            return ""
        shapes: Any = source.args[1]
        if any(isinstance(size, fx.Node) for shape in shapes for size in shape):
            return ""  # lengths of a call's rows: where they lie is not known before it
        sizes = [torch.Size(shape).numel() for shape in shapes]
        if number not in range(len(sizes)):
            return f"{node.name} takes another thing of {source.name} than one of its {len(sizes)} results"
        self._exact[node] = (source, (1, sum(sizes[:number]), sizes[number]))
        return ""

    def see(self, node: fx.Node) -> None:
        """Record a call whose result may be a view of a value that has a slot."""
        self._copy(node)
        seen = view_source(node, self._share.row(node))
        slot = None if seen is None else self._exact.get(seen) or self._within.get(seen)
        if slot is None or seen is None or node in self._exact:
            return
        in_order = seen in self._exact and slot[1][0] == 1 and node.target in IN_ORDER
        in_order = in_order or self._sees_all_in_order(node, seen)
        (self._exact if in_order else self._within)[node] = slot

    def _sees_all_in_order(self, node: fx.Node, seen: fx.Node) -> bool:
        """Whether a view of what lies in a slot sees all of it in order: it may undo a transposition."""
        known = self._views.get(seen)
        if known is None or not isinstance(node.target, torch._ops.OpOverload) or node.all_input_nodes != [seen]:
            return False
        try:
            made = node.target(*fx.map_arg(node.args, lambda _: known), **node.kwargs)
        except DOES_NOT_RUN:
            return False
        alias = isinstance(made, torch.Tensor) and torch._C._is_alias_of(made, known)  # type: ignore[attr-defined]
        if not alias:
            return False
        self._views[node] = made
        all_of_it = made.nbytes == made.untyped_storage().nbytes()
        return bool(all_of_it and made.is_contiguous() and made.storage_offset() == 0)

    def _copy(self, node: fx.Node) -> None:
        source = node.args[0] if node.args else None
        slot = self.holding(source) if isinstance(source, fx.Node) else None
        if slot is None or node in self._exact:
            return
        numbers = any(isinstance(each, torch.dtype) and each.is_floating_point for each in slot[0].args)
        if node.target in COPIES or (numbers and is_neutral(node.target, node.args, node.kwargs)):
            self._copies[node] = self._within[node] = slot

    def apart(self, other: fx.Node, slot: PartSlot | None) -> bool:
        """Whether a value is unaffected by a write to a slot's memory."""
        row = self._share.row(other)
        if row is not None and row.memory:
            return True  # memory as such has no content to lose
        theirs = self._exact.get(other) or self._within.get(other)
        if slot is None or theirs is None or slot[0] is not theirs[0]:
            return False
        (shards, begin, length), (others, start, many) = slot[1], theirs[1]
        return shards == others and (begin + length <= start or start + many <= begin)
