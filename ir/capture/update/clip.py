"""The gradients of all parameters scaled down together, where their norm is more than is wanted.

    %30 = aten.pow(%w's gradient, 2),  %31 = aten.sum(%30),  ...      the squares of all gradients, summed
    %40 = aten.sqrt(%39)                                              their norm
    %43 = aten.clamp(max_norm / (%40 + 1e-6), max=1)                  as torch.nn.utils.clip_grad_norm_ has it
    %44 = aten.mul(%w's gradient, %43)                                what leaves, and what is stepped with

On ranks that hold pieces the sums are partial, and one small all-reduce for
each set of axes makes the norm.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardfx.ir.builder import GraphBuilder
from shardfx.ir.graph import Graph, InputKind, Output, OutputKind, Phase, Value, Where

aten = torch.ops.aten
MODULE = "clip"
"""The module path of what all gradients have in common."""
SMALL = 1e-6


def clip_gradients(graph: Graph, most: float) -> None:
    """Scale the gradients that leave a captured graph so that their norm is ``most`` at the most."""
    names = {given.name for given in graph.of_kind(InputKind.PARAMETER)}
    outputs = [output for output in graph.outputs if output.kind is OutputKind.GRADIENT and output.name in names]
    if not outputs:
        return
    builder = GraphBuilder(graph.mesh)
    builder.graph, builder.phase = graph, Phase.UPDATE
    total = sum_of_squares(builder, outputs)
    norm = builder.add(aten.add.Tensor, (builder.add(aten.sqrt.default, (total,)), SMALL))
    ratio = builder.add(aten.mul.Tensor, (builder.add(aten.reciprocal.default, (norm,)), float(most)))
    scale = builder.add(aten.clamp.default, (ratio, None, 1.0))
    for output in outputs:
        builder.where = _of(output)
        output.value = scaled(builder, output.value, scale)
    graph.rename()


def scaled(builder: GraphBuilder, gradient: Value, by: Value | float) -> Value:
    """A gradient times a real number, in its own dtype."""
    made: Value = builder.add(aten.mul.Tensor, (gradient, by), gradient.type if gradient.shape else None)
    if made.type.dtype is not gradient.type.dtype:  # of numbers without dims the wider dtype
        made = builder.add(aten._to_copy.default, (made,), dtype=gradient.type.dtype)
    return made


def sum_of_squares(builder: GraphBuilder, outputs: Sequence[Output]) -> Value:
    """The sum of the squares of all that leaves: the squares first, so that their reductions travel together."""
    squares = []
    for output in outputs:
        builder.where = _of(output)
        squares.append(_square(builder, output.value))
    total: Value = squares[0]
    for output, square in zip(outputs[1:], squares[1:], strict=True):
        builder.where = _of(output)
        total = builder.add(aten.add.Tensor, (total, square))
    builder.where = Where(MODULE)
    return total


def _of(output: Output) -> Where:
    return Where(output.name.rpartition(".")[0])


def _square(builder: GraphBuilder, gradient: Value) -> Value:
    """The sum of the squares of a gradient's absolute values, in float32 at least."""
    if gradient.type.dtype.is_complex:
        gradient = builder.add(aten.abs.default, (gradient,))
    exact = gradient.type.dtype in (torch.float32, torch.float64)
    wide = gradient if exact else builder.add(aten._to_copy.default, (gradient,), dtype=torch.float32)
    square: Value = builder.add(aten.sum.default, (builder.add(aten.pow.Tensor_Scalar, (wide, 2)),))
    return square
