"""In which dtype the gradients of parameters are summed over ranks: which casts partial sums pass.

    %8 = aten.mm(%7, %x) : bf16[8, 6]                 %8 = aten.mm(%7, %x) : bf16[8, 6]
    %9 = aten._to_copy(%8, f32) : f32[8, 6]     ->    %9 = aten._to_copy(%8, f32) : f32[8, 6]  {sums_behind=True}
    gradient w = %9                                   gradient w = %9

A model in bf16 has no such cast: then there are two, to the wide dtype and back, and a sum stands between.
"""

from __future__ import annotations

import torch

from shardfx.ir.graph import Graph, InputKind, Node, OutputKind, Phase, Value
from shardfx.ir.rewriter import Rewriter, dead_code
from shardfx.ir.rules.as_placed import SUMS_BEHIND
from shardfx.ir.rules.template import keeps_precision
from shardfx.ir.spec import TensorType

aten = torch.ops.aten


def sum_gradients_in(graph: Graph, dtype: torch.dtype) -> None:
    """Say of the gradients of a captured graph's parameters that they are summed in ``dtype``, where that is wider than
    what they are computed in."""
    names = {given.name for given in graph.of_kind(InputKind.PARAMETER)}
    rewriter = Rewriter(graph)
    summed: dict[Value, Value] = {}
    for output in graph.outputs:
        left = output.value
        made = made_in(left)
        if output.kind is not OutputKind.GRADIENT or output.name not in names or _is_wide(made, dtype):
            continue
        if left.type.dtype is dtype and left.node is not None:
            left.node.attrs = {**left.node.attrs, SUMS_BEHIND: True}
            continue
        if left not in summed:
            wide = rewriter.after(made.node, _cast(made, dtype))
            wide.attrs = {SUMS_BEHIND: True}
            summed[left] = rewriter.after(wide, _cast(wide.outs[0], left.type.dtype)).outs[0]
        rewriter.replace(left, summed[left], users=[output])
    if rewriter.apply():
        dead_code(graph)
        graph.rename()


def _is_wide(value: Value, dtype: torch.dtype) -> bool:
    """Whether a value is no floating number, or one that holds all of ``dtype``."""
    return not value.type.dtype.is_floating_point or keeps_precision(dtype, value.type.dtype)


def made_in(gradient: Value) -> Value:
    """The gradient before it was cast to its parameter's dtype."""
    node = gradient.node
    is_cast = node is not None and node.phase is Phase.BACKWARD and node.op is aten._to_copy.default
    if node is None or not is_cast or not keeps_precision(node.operands[0].type.dtype, gradient.type.dtype):
        return gradient
    return node.operands[0]


def _cast(value: Value, dtype: torch.dtype) -> Node:
    type = TensorType(value.shape, dtype)
    kwargs = {"dtype": dtype}
    return Rewriter.make(aten._to_copy.default, (value,), type, like=value.node, kwargs=kwargs, phase=Phase.BACKWARD)
