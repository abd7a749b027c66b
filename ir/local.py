"""One rank's share of a node: what it holds of every tensor, and how its version of the op is called.

Code generation writes that call into a program, the oracle (:mod:`shardfx.ir.oracle`) executes it: both by
:func:`perform`, so that what is checked is what runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .graph import Node, Value
from .mesh import Mesh
from .rules import Emit, RuleEntry
from .spec import Coords, Spec, bounds

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


def perform(entry: RuleEntry | None, emit: Emit) -> Any:
    """One rank's version of a node: as its rule's ``local`` says, or the op itself with the local shape."""
    if entry is not None and entry.local is not None and is_cut(emit.node):
        return entry.local(emit)
    args = emit.args
    if entry is not None and entry.shape_arg is not None:
        args = (*args[: entry.shape_arg], list(emit.result_shape(0)), *args[entry.shape_arg + 1 :])
    return emit.call(TARGETS.get(emit.node.op, emit.node.op), *args, **emit.kwargs)
