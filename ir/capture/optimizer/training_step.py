"""The step behind the backward: gradients unscaled and clipped, the optimizer's update, and the loss scale's.

    %0 = aten.full([], 16384.0)                      where the backward begins, in place of 1
    %9 = aten._to_copy(%8, dtype=f32)                a gradient in its parameter's dtype, 16384 times what it is
    %10 = aten.mul(%9, 1 / 16384.0)                  what leaves, and what is clipped and stepped with
    %20 = aten.pow(%10, 2), %21 = aten.sum(%20), ... the squares of all gradients, summed
    %25 = aten.clamp(max_norm / (sqrt(%24) + 1e-6), max=1)   as torch.nn.utils.clip_grad_norm_ has it
    %26 = aten.mul(%10, %25)                         what leaves where it is clipped
    %30 = aten.le(%29, 3.4e38)                       whether the squares of all gradients have a finite sum
    %31 = aten.where(%30, %28, %w)                   a new parameter, or the old one: a step that overflowed is skipped

On ranks that store shards the sums are partial, and one small all-reduce for each set of axes makes the norm; so all of
them step, or none. A scale that adapts (:class:`~shardfx.ir.capture.canonical.mixed_precision.LossScale`) is a state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from shardfx.ir.capture.canonical.mixed_precision import LossScale
from shardfx.ir.graph import Graph, InputKind, Output, OutputKind, Phase, Value, Where
from shardfx.ir.unfolding.regular import IrregularBlocks
from shardfx.ir.unfolding.unfold import check_regular, unfold

from .emit_update import UpdateBuilder, write_update
from .optimizer_groups import Factory
from .update_spec import CounterState, UpdateSpec

aten = torch.ops.aten
APART = "repeated blocks were planned one by one, which takes longer"
SCALE, STEPS = "optimizer.loss_scale", "optimizer.loss_scale.steps"
"""The states of a dynamic scale: it, and the number of consecutive steps without overflow."""
MODULE = "clip"
"""The module path of nodes that are of all gradients."""
SMALL = 1e-6


@dataclass(frozen=True)
class TrainingStep:
    """The part of a step after the backward: the loss scale, the maximum norm of all gradients, the optimizer, and its
    scheduled options."""

    scale: float | LossScale | None
    clip: float | None
    optimizer: Factory | None
    scheduled: Sequence[str] = ()

    def write(self, graph: Graph, model: Mapping[str, nn.Parameter]) -> tuple[Graph, UpdateSpec | None, str]:
        """Emit it into a captured graph.

        Gives the graph, what it has of an optimizer, and a note. It is another graph, with all blocks, where some were
        left out that are not alike in this.

        Raises:
            Error: the optimizer cannot be traced, or does something else than its trace.
        """
        bare = graph.copy() if graph.repeats else graph
        try:
            update = self._write(graph, model)
            check_regular(graph)
            return graph, update, ""
        except IrregularBlocks as error:
            unfold(bare)
            return bare, self._write(bare, model), f"{APART} ({error.what})"

    def _write(self, graph: Graph, model: Mapping[str, nn.Parameter]) -> UpdateSpec | None:
        builder, update = UpdateBuilder(graph), None
        if self.scale is not None:
            _unscale_gradients(builder, self.scale)
        if self.clip is not None:
            _clip_gradients(builder, self.clip)
        if self.optimizer is not None:
            update = write_update(graph, self.optimizer, model, self.scheduled)
        if update is not None and self.scale is not None:
            finite = _skip_overflow(builder)
            if isinstance(self.scale, LossScale):
                update = replace(update, counts={**update.counts, **_adapt(builder, finite, self.scale)})
        graph.rename()
        return update


def _gradients(graph: Graph) -> list[Output]:
    """The gradients of parameters."""
    names = {inp.name for inp in graph.of_kind(InputKind.PARAMETER)}
    return [output for output in graph.outputs if output.kind is OutputKind.GRADIENT and output.name in names]


def _unscale_gradients(builder: UpdateBuilder, scale: float | LossScale) -> None:
    """Divide all gradients by ``scale``, those of parameters in the update."""
    updated = _gradients(builder.graph)
    others = (each for each in builder.graph.outputs if each.kind is OutputKind.GRADIENT and each not in updated)
    inverse: dict[tuple[Phase, torch.dtype], Value] = {}
    for output in [*others, *updated]:
        builder.phase = Phase.UPDATE if output in updated else Phase.BACKWARD
        builder.where = _of(output)
        by: float | Value
        if isinstance(scale, LossScale):
            key = builder.phase, output.value.type.dtype.to_real()
            by = inverse[key] = inverse.get(key) or _inverse(builder, key[1])
        else:
            by = 1 / scale
        output.value = _scaled(builder, output.value, by)
    builder.phase = Phase.UPDATE


def _inverse(builder: UpdateBuilder, dtype: torch.dtype) -> Value:
    inverse = builder.add(aten.reciprocal.default, (builder.graph.input(SCALE).value,))
    made: Value = inverse if dtype is torch.float64 else builder.add(aten._to_copy.default, (inverse,), dtype=dtype)
    return made


def _clip_gradients(builder: UpdateBuilder, most: float) -> None:
    """Scale the gradients of parameters so that their norm is at most ``most``."""
    outputs = _gradients(builder.graph)
    if not outputs:
        return
    total = _sum_of_squares(builder, outputs)
    norm = builder.add(aten.add.Tensor, (builder.add(aten.sqrt.default, (total,)), SMALL))
    ratio = builder.add(aten.mul.Tensor, (builder.add(aten.reciprocal.default, (norm,)), float(most)))
    scale = builder.add(aten.clamp.default, (ratio, None, 1.0))
    for output in outputs:
        builder.where = _of(output)
        output.value = _scaled(builder, output.value, scale)


def _skip_overflow(builder: UpdateBuilder) -> Value:
    """Skip a step some gradient of which is not finite; returns whether all are."""
    total = _sum_of_squares(builder, _gradients(builder.graph))
    finite: Value = builder.add(aten.le.Scalar, (total, torch.finfo(total.type.dtype).max))
    for output in builder.graph.outputs:
        if output.kind.is_stepped:
            builder.where = _of(output)
            before = builder.graph.input(output.name).value
            output.value = builder.add(aten.where.self, (finite, output.value, before), before.type)
    return finite


def _adapt(builder: UpdateBuilder, finite: Value, scale: LossScale) -> dict[str, CounterState]:
    """Emit the update of the scale, as ``GradScaler.update`` has it; returns the initial states.

    %50 = aten.add.Tensor(%steps, 1)                       the steps that went well, this one among them
    %51 = aten.ge.Scalar(%50, 2000)
    %53 = aten.where(%51, 2 * %scale, %scale)              not where that is more than the loss's dtype holds
    %55 = aten.where(%finite, %53, 0.5 * %scale)
    """
    builder.where, add, outputs = Where(MODULE), builder.add, builder.graph.outputs
    now = builder.graph.input(SCALE).value
    steps = builder.input(InputKind.STATE, STEPS, now.type)
    (loss,) = (output.value for output in outputs if output.kind is OutputKind.LOSS)
    larger = add(aten.mul.Tensor, (now, scale.growth))
    holds = add(aten.le.Scalar, (larger, torch.finfo(loss.type.dtype).max))
    well = add(aten.add.Tensor, (steps, 1))
    grows = add(aten.ge.Scalar, (well, scale.interval))
    grown = add(aten.where.self, (add(aten.logical_and.default, (grows, holds)), larger, now))
    none = add(aten.mul.Tensor, (steps, 0.0))
    counted = add(aten.where.self, (grows, none, well))
    less = add(aten.mul.Tensor, (now, scale.backoff))
    for name, one, other in ((SCALE, grown, less), (STEPS, counted, none)):
        outputs.append(Output(OutputKind.STATE, name, add(aten.where.self, (finite, one, other), now.type)))
    return {SCALE: CounterState(scale.init, scale.init), STEPS: CounterState(0.0, 0.0)}


def _scaled(builder: UpdateBuilder, gradient: Value, by: Value | float) -> Value:
    """A gradient times a real number, in its own dtype."""
    made: Value = builder.add(aten.mul.Tensor, (gradient, by), gradient.type if gradient.shape else None)
    if made.type.dtype is not gradient.type.dtype:  # of numbers without dims the wider dtype
        made = builder.add(aten._to_copy.default, (made,), dtype=gradient.type.dtype)
    return made


def _sum_of_squares(builder: UpdateBuilder, outputs: Sequence[Output]) -> Value:
    """The sum of the squares of all gradients: the squares first, so that their reductions are bucketed."""
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


def _square(builder: UpdateBuilder, gradient: Value) -> Value:
    """The sum of the squares of a gradient's absolute values, in float32 at least."""
    if gradient.type.dtype.is_complex:
        gradient = builder.add(aten.abs.default, (gradient,))
    exact = gradient.type.dtype in (torch.float32, torch.float64)
    wide = gradient if exact else builder.add(aten._to_copy.default, (gradient,), dtype=torch.float32)
    square: Value = builder.add(aten.sum.default, (builder.add(aten.pow.Tensor_Scalar, (wide, 2)),))
    return square
