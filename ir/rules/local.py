"""One rank's share of a node: what it holds of every tensor, and how its version of the op is called.

Code generation writes that call into a program, the oracle (:mod:`shardfx.ir.oracle`) executes it: both by
:func:`perform`, so that what is checked is what runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch

from shardfx.ir.cut import Coords, bounds
from shardfx.ir.graph import Node, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.spec import Spec

aten = torch.ops.aten


TARGETS: dict[Any, Any] = {aten.view.default: aten.reshape.default, aten._unsafe_view.default: aten.reshape.default}
"""A local piece of a value may not be laid out so that a view of it exists."""


@dataclass
class Share:
    """What the rank at ``coords`` holds of a node's tensors, by the node's strategy."""

    node: Node
    mesh: Mesh
    coords: Coords

    def _bounds(self, value: Value, spec: Spec, dim: int) -> tuple[int, int]:
        cut = spec.dims[dim]
        size = value.shape[dim]
        if cut.parts:
            flat = 0
            for part in cut.parts:
                flat = flat * part.size + bounds(part.size, part.axes, self.mesh, self.coords)[0]
            return flat, self.shape(value, spec)[dim]
        return bounds(size, cut.axes, self.mesh, self.coords)

    def shape(self, value: Value, spec: Spec) -> tuple[int, ...]:
        """The local shape of a value that is held by a spec."""
        return spec.local_shape(value.shape, self.mesh, self.coords)

    def operand_bounds(self, operand: int, dim: int) -> tuple[int, int]:
        """Start and length of what this rank holds of a dim of an operand."""
        assert self.node.strategy is not None
        return self._bounds(self.node.operands[operand], self.node.strategy.operands[operand], dim)

    def result_bounds(self, result: int, dim: int) -> tuple[int, int]:
        """Start and length of what this rank holds of a dim of a result."""
        assert self.node.strategy is not None
        return self._bounds(self.node.outs[result], self.node.strategy.results[result], dim)

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


def is_cut(node: Node) -> bool:
    """Whether any tensor of the node is cut: else the op runs as it stands."""
    assert node.strategy is not None
    return any(spec.axes for spec in (*node.strategy.operands, *node.strategy.results))


class Emit(Protocol):
    """What a rule's ``local`` function gets to write one rank's version of a node (made by code generation)."""

    node: Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Write a call; gives its result, to be used in further calls."""

    def operand_bounds(self, operand: int, dim: int) -> tuple[int, int]:
        """Start and length of what this rank holds of a dim of an operand."""

    def result_bounds(self, result: int, dim: int) -> tuple[int, int]:
        """Start and length of what this rank holds of a dim of a result."""

    def operand_shape(self, operand: int) -> tuple[int, ...]:
        """The local shape of an operand."""

    def result_shape(self, result: int) -> tuple[int, ...]:
        """The local shape of a result."""


def reshaped(emit: Emit) -> Any:
    """Where the op would take a piece for something else, its result is the piece in the local shape."""
    return emit.call(aten.reshape.default, emit.args[0], list(emit.result_shape(0)))


def mine(emit: Emit, index: Any, start: int, length: int) -> tuple[Any, Any]:
    """The index within this rank's range (clamped), and where it lies outside."""
    local = emit.call(aten.sub.Tensor, index, start) if start else index
    low = emit.call(aten.lt.Scalar, local, 0)
    high = emit.call(aten.ge.Scalar, local, length)
    return emit.call(aten.clamp.default, local, 0, max(length - 1, 0)), emit.call(aten.logical_or.default, low, high)


def others_zero(emit: Emit, found: Any, outside: Any, *, rows: bool = False) -> Any:
    """What was found within this rank's range, and zeros for the rest: the sum over the ranks is the whole."""
    where = emit.call(aten.unsqueeze.default, outside, -1) if rows else outside
    return emit.call(aten.masked_fill.Scalar, found, where, 0)


def nothing(emit: Emit, like: Any) -> Any:
    """Zeros of the local shape, from a rank that has nothing to look up."""
    return emit.call(aten.new_zeros.default, like, list(emit.result_shape(0)))


def add_once(emit: Emit) -> Any:
    """What is added to is added by the rank that holds the first part of the values; the others add to zeros."""
    made = emit.node.strategy
    assert made is not None
    held = made.operands[0].axes
    if any(
        emit.operand_bounds(t, d)[0]
        for t, spec in enumerate(made.operands[1:], 1)
        for d, cut in enumerate(spec.dims)
        if not set(cut.axes) <= set(held)
    ):
        return emit.call(emit.node.op, emit.call(aten.zeros_like.default, emit.args[0]), *emit.args[1:], **emit.kwargs)
    return emit.call(emit.node.op, *emit.args, **emit.kwargs)
