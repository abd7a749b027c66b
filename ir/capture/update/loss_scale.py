"""The backward of a loss that is multiplied by a number, so that what is small does not vanish in float16.

    %0 = aten.full([], 16384.0)                      where the backward begins, in place of 1
    ...
    %9 = aten._to_copy(%8, dtype=f32)                a gradient in its parameter's dtype, 16384 times what it is
    %10 = aten.mul(%9, 1 / 16384.0)                  what leaves, and what is clipped and stepped with
    ...
    %30 = aten.le(%29, 3.4e38)                       whether the squares of all gradients have a finite sum
    %31 = aten.where(%30, %28, %w)                   a new parameter, or the old one: a step that overflowed is none

On ranks that hold pieces the sum is partial, so that all of them step, or none. A scale that adapts
(:class:`~shardfx.ir.capture.forms.loss_scaling.LossScale`) is a state in the place of the number.
"""

from __future__ import annotations

import torch

from shardfx.ir.builder import GraphBuilder
from shardfx.ir.capture.forms.loss_scaling import LossScale
from shardfx.ir.graph import Graph, InputKind, Output, OutputKind, Phase, Value, Where

from .clip import MODULE, aten, scaled, sum_of_squares
from .stepped import Count

SCALE, STEPS = "optimizer.loss_scale", "optimizer.loss_scale.steps"
"""The states of a scale that adapts: it, and how many steps one behind the other did not overflow."""


def unscale_gradients(graph: Graph, scale: float | LossScale) -> None:
    """Divide the gradients that leave a captured graph by ``scale``, those of parameters as a part of the update."""
    parameters = {given.name for given in graph.of_kind(InputKind.PARAMETER)}
    builder = GraphBuilder(graph.mesh)
    builder.graph = graph
    inverse: dict[tuple[Phase, torch.dtype], Value] = {}
    outputs = [output for output in graph.outputs if output.kind is OutputKind.GRADIENT]
    for output in sorted(outputs, key=lambda each: each.name in parameters):
        builder.phase = Phase.UPDATE if output.name in parameters else Phase.BACKWARD
        builder.where = Where(output.name.rpartition(".")[0])
        by: float | Value
        if isinstance(scale, LossScale):
            key = builder.phase, output.value.type.dtype.to_real()
            by = inverse[key] = inverse.get(key) or _inverse(builder, key[1])
        else:
            by = 1 / scale
        output.value = scaled(builder, output.value, by)
    graph.rename()


def _inverse(builder: GraphBuilder, dtype: torch.dtype) -> Value:
    inverse = builder.add(aten.reciprocal.default, (builder.graph.input(SCALE).value,))
    made: Value = inverse if dtype is torch.float64 else builder.add(aten._to_copy.default, (inverse,), dtype=dtype)
    return made


def skip_overflow(graph: Graph) -> Value:
    """Leave parameters and states as they are in a step some gradient of which is not finite; gives whether all are."""
    builder = GraphBuilder(graph.mesh)
    builder.graph, builder.phase = graph, Phase.UPDATE
    names = {given.name for given in graph.of_kind(InputKind.PARAMETER)}
    outputs = [output for output in graph.outputs if output.kind is OutputKind.GRADIENT and output.name in names]
    total = sum_of_squares(builder, outputs)
    builder.where = Where(MODULE)
    finite: Value = builder.add(aten.le.Scalar, (total, torch.finfo(total.type.dtype).max))
    for output in graph.outputs:
        if output.kind.is_stepped:
            builder.where = Where(output.name.rpartition(".")[0])
            before = graph.input(output.name).value
            output.value = builder.add(aten.where.self, (finite, output.value, before), before.type)
    graph.rename()
    return finite


def adapt(graph: Graph, finite: Value, scale: LossScale) -> dict[str, Count]:
    """Write how the scale goes on from a step, as ``GradScaler.update`` does; gives what its states begin with.

    %50 = aten.add.Tensor(%steps, 1)                       the steps that went well, this one among them
    %51 = aten.ge.Scalar(%50, 2000)
    %53 = aten.where(%51, 2 * %scale, %scale)              not where that is more than the loss's dtype holds
    %55 = aten.where(%finite, %53, 0.5 * %scale)
    """
    builder = GraphBuilder(graph.mesh)
    builder.graph, builder.phase, builder.where = graph, Phase.UPDATE, Where(MODULE)
    add = builder.add
    begun = {SCALE: Count(scale.init, scale.init), STEPS: Count(0.0, 0.0)}
    now = graph.input(SCALE).value
    steps = builder.input(InputKind.STATE, STEPS, now.type)
    (loss,) = (output.value for output in graph.outputs if output.kind is OutputKind.LOSS)
    larger = add(aten.mul.Tensor, (now, scale.growth))
    holds = add(aten.le.Scalar, (larger, torch.finfo(loss.type.dtype).max))
    well = add(aten.add.Tensor, (steps, 1))
    grows = add(aten.ge.Scalar, (well, scale.interval))
    grown = add(aten.where.self, (add(aten.logical_and.default, (grows, holds)), larger, now))
    none = add(aten.mul.Tensor, (steps, 0.0))
    counted = add(aten.where.self, (grows, none, well))
    less = add(aten.mul.Tensor, (now, scale.backoff))
    for name, one, other in ((SCALE, grown, less), (STEPS, counted, none)):
        graph.outputs.append(Output(OutputKind.STATE, name, add(aten.where.self, (finite, one, other), now.type)))
    graph.rename()
    return begun
