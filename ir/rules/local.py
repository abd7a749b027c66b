"""One rank's share of a node: what it holds of every tensor, and how its version of the op is called.

Code generation writes that call into a program, the oracle (:mod:`shardfx.ir.oracle`) executes it: both by
:func:`perform`, so that what is checked is what runs.
"""

from __future__ import annotations

from dataclasses import dataclass
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
        assert self.node.strategy is not None
        return self._bounds(self.node.operands[operand], self.node.strategy.operands[operand], dim)

    def result_bounds(self, result: int, dim: int) -> tuple[int, int]:
        assert self.node.strategy is not None
        return self._bounds(self.node.outs[result], self.node.strategy.results[result], dim)

    def operand_shape(self, operand: int) -> tuple[int, ...]:
        assert self.node.strategy is not None
        return self.shape(self.node.operands[operand], self.node.strategy.operands[operand])

    def result_shape(self, result: int) -> tuple[int, ...]:
        assert self.node.strategy is not None
        return self.shape(self.node.outs[result], self.node.strategy.results[result])


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
