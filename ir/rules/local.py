"""One rank's share of a node: what it holds of every tensor, and how its version of the op is called.

Code generation writes that call into a program, the oracle (:mod:`shardfx.ir.oracle`) executes it: both by
:func:`perform`, so that what is checked is what runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch

from shardfx.ir.dim_sharding import Coords, DimSharding, in_stretches
from shardfx.ir.errors import Error
from shardfx.ir.graph import Node, Value, op_name
from shardfx.ir.mesh import Mesh
from shardfx.ir.spec import Spec

aten = torch.ops.aten


TARGETS: dict[Any, Any] = {aten.view.default: aten.reshape.default, aten._unsafe_view.default: aten.reshape.default}
"""A local piece of a value may not be laid out so that a view of it exists."""


class Piece(NamedTuple):
    """What a rank holds of a sub-dim of ``size`` elements: ``length`` of them, from ``start`` on."""

    size: int
    start: int
    length: int


@dataclass(frozen=True)
class Held:
    """What a rank holds of a dim: a piece of each of its sub-dims, major first. A plain sharding has one."""

    pieces: tuple[Piece, ...]

    @staticmethod
    def of(sharding: DimSharding, size: int, mesh: Mesh, coords: Coords) -> Held:
        """What the rank at ``coords`` holds of a dim of ``size`` elements that is sharded so."""
        pairs = zip(sharding.sub(size), sharding.spans(size, mesh, coords), strict=True)
        return Held(tuple(Piece(part.size, *span) for part, span in pairs))

    @property
    def first(self) -> int:
        """The first element that is held: no two ranks that hold something else have the same."""
        found = 0
        for piece in self.pieces:
            found = found * piece.size + piece.start
        return found

    @property
    def length(self) -> int:
        """How many elements are held."""
        return math.prod(piece.length for piece in self.pieces)

    @property
    def is_whole(self) -> bool:
        """Whether all elements are."""
        return all(piece.length == piece.size for piece in self.pieces)

    def find(self, index: int) -> int | None:
        """Where an element of the whole stands among those that are held; None if it is not held."""
        found, stride = 0, 1
        for piece in reversed(self.pieces):
            index, place = divmod(index, piece.size) if piece is not self.pieces[0] else (0, index)
            if not piece.start <= place < piece.start + piece.length:
                return None
            found += (place - piece.start) * stride
            stride *= piece.length
        return found


@dataclass
class Share:
    """What the rank at ``coords`` holds of a node's tensors, by the node's strategy."""

    node: Node
    mesh: Mesh
    coords: Coords

    def _bounds(self, value: Value, spec: Spec, dim: int) -> tuple[int, int]:
        if in_stretches(spec.dims[dim]):
            raise Error(
                f"{op_name(self.node.op)} is written for a rank that holds one stretch of a dim",
                where=str(self.node.where),
                expected=f"dim {dim} sharded plainly",
                got=spec.text(value.shape),
                remedy="hint a plain sharding; in a rule's local function ask for operand_held or result_held",
            )
        held = Held.of(spec.dims[dim], value.shape[dim], self.mesh, self.coords)
        return held.first, held.length

    def shape(self, value: Value, spec: Spec) -> tuple[int, ...]:
        """The local shape of a value that is held by a spec."""
        return spec.local_shape(value.shape, self.mesh, self.coords)

    def operand_bounds(self, operand: int, dim: int) -> tuple[int, int]:
        """Start and length of the one stretch that this rank holds of a dim of an operand.

        Raises:
            Error: the dim is sharded so that ranks hold several stretches.
        """
        assert self.node.strategy is not None
        return self._bounds(self.node.operands[operand], self.node.strategy.operands[operand], dim)

    def result_bounds(self, result: int, dim: int) -> tuple[int, int]:
        """Start and length of the one stretch that this rank holds of a dim of a result; raises like the other."""
        assert self.node.strategy is not None
        return self._bounds(self.node.outs[result], self.node.strategy.results[result], dim)

    def operand_held(self, operand: int, dim: int) -> Held:
        """What this rank holds of a dim of an operand, however it is sharded."""
        assert self.node.strategy is not None
        sharding = self.node.strategy.operands[operand].dims[dim]
        return Held.of(sharding, self.node.operands[operand].shape[dim], self.mesh, self.coords)

    def result_held(self, result: int, dim: int) -> Held:
        """What this rank holds of a dim of a result, however it is sharded."""
        assert self.node.strategy is not None
        sharding = self.node.strategy.results[result].dims[dim]
        return Held.of(sharding, self.node.outs[result].shape[dim], self.mesh, self.coords)

    def operand_shape(self, operand: int) -> tuple[int, ...]:
        """The local shape of an operand."""
        assert self.node.strategy is not None
        return self.shape(self.node.operands[operand], self.node.strategy.operands[operand])

    def result_shape(self, result: int) -> tuple[int, ...]:
        """The local shape of a result."""
        assert self.node.strategy is not None
        return self.shape(self.node.outs[result], self.node.strategy.results[result])


@cache
def gives_list(op: Any) -> bool:
    """Whether an op gives a list of tensors, be it of one."""
    returns = op._schema.returns if isinstance(op, torch._ops.OpOverload) else ()
    return len(returns) == 1 and str(returns[0].type) == "List[Tensor]"


def is_sharded(node: Node) -> bool:
    """Whether any tensor of the node is sharded: else the op runs as it stands."""
    assert node.strategy is not None
    return any(spec.axes for spec in (*node.strategy.operands, *node.strategy.results))


class Emit(Protocol):
    """What a rule's ``local`` function gets to write one rank's version of a node (made by code generation)."""

    node: Node
    mesh: Mesh
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Write a call; gives its result, to be used in further calls."""

    def operand_bounds(self, operand: int, dim: int) -> tuple[int, int]:
        """Start and length of the one stretch that this rank holds of a dim of an operand; raises if it is several."""

    def result_bounds(self, result: int, dim: int) -> tuple[int, int]:
        """Start and length of the one stretch that this rank holds of a dim of a result; raises if it is several."""

    def operand_held(self, operand: int, dim: int) -> Held:
        """What this rank holds of a dim of an operand, however it is sharded."""

    def result_held(self, result: int, dim: int) -> Held:
        """What this rank holds of a dim of a result, however it is sharded."""

    def operand_shape(self, operand: int) -> tuple[int, ...]:
        """The local shape of an operand."""

    def result_shape(self, result: int) -> tuple[int, ...]:
        """The local shape of a result."""


def reshaped(emit: Emit) -> Any:
    """Where the op would take a piece for something else, its result is the piece in the local shape."""
    return emit.call(aten.reshape.default, emit.args[0], list(emit.result_shape(0)))


def mine(emit: Emit, index: Any, held: Held) -> tuple[Any, Any]:
    """Where an index of the whole stands in what this rank holds (clamped), and where it lies outside."""
    place, outside, stride, below = None, None, 1, 1
    for i, piece in reversed(list(enumerate(held.pieces))):
        digit = emit.call(aten.floor_divide.Scalar, index, below) if below > 1 else index
        if i:
            digit = emit.call(aten.remainder.Scalar, digit, piece.size)
        if piece.length < piece.size:
            digit = emit.call(aten.sub.Tensor, digit, piece.start)  # also of 0: all ranks run one program
            low, high = emit.call(aten.lt.Scalar, digit, 0), emit.call(aten.ge.Scalar, digit, piece.length)
            digit = emit.call(aten.clamp.default, digit, 0, max(piece.length - 1, 0))
            beside = emit.call(aten.logical_or.default, low, high)
            outside = emit.call(aten.logical_or.default, outside, beside) if outside is not None else beside
        digit = emit.call(aten.mul.Tensor, digit, stride) if stride > 1 else digit
        place = emit.call(aten.add.Tensor, place, digit) if place is not None else digit
        stride, below = stride * piece.length, below * piece.size
    return place, outside


def others_zero(emit: Emit, found: Any, outside: Any, *, rows: bool = False) -> Any:
    """What was found within this rank's range, and zeros for the rest: the sum over the ranks is the whole."""
    where = emit.call(aten.unsqueeze.default, outside, -1) if rows else outside
    return emit.call(aten.masked_fill.Scalar, found, where, 0)


def box_of(emit: Emit, whole: Any, held: Sequence[Held]) -> Any:
    """What this rank holds of a tensor that it has made as a whole; ``held`` says it of each dim."""
    pieces = [piece for each in held for piece in each.pieces]
    if all(piece.length == piece.size for piece in pieces):
        return whole
    box = emit.call(aten.view.default, whole, [piece.size for piece in pieces]) if len(pieces) > len(held) else whole
    for dim, (size, start, length) in enumerate(pieces):
        if length < size:
            box = emit.call(aten.slice.Tensor, box, dim, start, start + length)
    return emit.call(aten.reshape.default, box, [each.length for each in held]) if len(pieces) > len(held) else box


def nothing(emit: Emit, like: Any) -> Any:
    """Zeros of the local shape, from a rank that has nothing to look up."""
    return emit.call(aten.new_zeros.default, like, list(emit.result_shape(0)))


def add_once(emit: Emit) -> Any:
    """What is added to is added by the rank that holds the first part of the values; the others add to zeros. Where it
    is a partial sum over the same axes, each rank adds to its own term."""
    made = emit.node.strategy
    assert made is not None
    held = (*made.operands[0].axes, *made.operands[0].partial_axes)
    apart = [
        (t, d)
        for t, spec in enumerate(made.operands[1:], 1)
        for d, sharding in enumerate(spec.dims)
        if not set(sharding.axes) <= set(held)
    ]
    if not apart:
        return emit.call(emit.node.op, *emit.args, **emit.kwargs)
    others = any(emit.operand_held(t, d).first for t, d in apart)  # a number: all ranks and iterations run one program
    away = emit.call(aten.full.default, [], int(others), dtype=torch.bool)
    once = emit.call(aten.masked_fill.Scalar, emit.args[0], away, 0)
    return emit.call(emit.node.op, once, *emit.args[1:], **emit.kwargs)
