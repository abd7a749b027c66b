"""The backward of a loss that is multiplied by a number, so that what is small does not vanish in float16.

    %0 = aten.full([], 16384.0)                      where the backward begins, in place of 1
    ...
    %9 = aten._to_copy(%8, dtype=f32)                a gradient in its parameter's dtype, 16384 times what it is
    %10 = aten.mul(%9, 1 / 16384.0)                  what leaves, and what is clipped and stepped with
    ...
    %30 = aten.le(%29, 3.4e38)                       whether the squares of all gradients have a finite sum
    %31 = aten.where(%30, %28, %w)                   a new parameter, or the old one: a step that overflowed is none

On ranks that hold pieces the sum is partial, so that all of them step, or none.
"""

from __future__ import annotations

import torch

from shardfx.ir.builder import GraphBuilder
from shardfx.ir.graph import Graph, InputKind, OutputKind, Phase, Where

from .clip import MODULE, aten, sum_of_squares


def unscale_gradients(graph: Graph, scale: float) -> None:
    """Divide the gradients that leave a captured graph by ``scale``, those of parameters as a part of the update."""
    parameters = {given.name for given in graph.of_kind(InputKind.PARAMETER)}
    builder = GraphBuilder(graph.mesh)
    builder.graph = graph
    outputs = [output for output in graph.outputs if output.kind is OutputKind.GRADIENT]
    for output in sorted(outputs, key=lambda each: each.name in parameters):
        builder.phase = Phase.UPDATE if output.name in parameters else Phase.BACKWARD
        builder.where = Where(output.name.rpartition(".")[0])
        output.value = builder.add(aten.mul.Tensor, (output.value, 1 / scale), output.value.type)
    graph.rename()


def skip_overflow(graph: Graph) -> None:
    """Leave parameters and states as they are in a step some gradient of which is not finite."""
    builder = GraphBuilder(graph.mesh)
    builder.graph, builder.phase = graph, Phase.UPDATE
    names = {given.name for given in graph.of_kind(InputKind.PARAMETER)}
    outputs = [output for output in graph.outputs if output.kind is OutputKind.GRADIENT and output.name in names]
    total = sum_of_squares(builder, outputs)
    builder.where = Where(MODULE)
    finite = builder.add(aten.le.Scalar, (total, torch.finfo(total.type.dtype).max))
    for output in graph.outputs:
        if output.kind.is_stepped:
            builder.where = Where(output.name.rpartition(".")[0])
            before = graph.input(output.name).value
            output.value = builder.add(aten.where.self, (finite, output.value, before), before.type)
    graph.rename()
