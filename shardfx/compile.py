"""Compilation of a model, a mesh and hints to a plan: capture, then the pipeline of passes that the hints ask for."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from shardfx.ir.capture.canonical.batch_norms import ONE, BatchParts
from shardfx.ir.capture.canonical.mixed_precision import MixedPrecision
from shardfx.ir.capture.frontend.dynamo import DynamoTrace, TracedCall, trace_call
from shardfx.ir.capture.frontend.loss_module import OwnLoss
from shardfx.ir.capture.model_and_loss import leaf_names
from shardfx.ir.capture.trace import Captured, capture
from shardfx.ir.context.attention_masks import note_dense_masks
from shardfx.ir.cost.machine import Machine
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, OutputKind
from shardfx.ir.mesh import Mesh
from shardfx.ir.names import pattern
from shardfx.ir.ops.redistribute import Redistribution
from shardfx.ir.rules.book import RuleBook
from shardfx.ir.unfolding.unfold import unfolded
from shardfx.passes import (
    COMM_EXPLICIT,
    ORDER,
    WITH_ROOM,
    BucketComm,
    Context,
    ContextParallel,
    EmbeddingTables,
    Loops,
    Offload,
    Pass,
    PassContext,
    Pipeline,
    Propagate,
    Recompute,
    RematerializeCasts,
    RematerializeGathers,
    RematerializeKeys,
    TableRows,
    Zero,
    arrange,
    check_order,
    is_full_pipeline,
    run_passes,
)
from shardfx.passes.pipeline import may_leave_out
from shardfx.passes.rank import Arena, RankPass, built_in
from shardfx.passes.sharding.bind_hints import as_spec
from shardfx.passes.unfold_repeats import PLANNED_WHOLE, of_those_there, why_whole
from shardfx.plan import PlannedSpecs, as_said
from shardfx.runtime.distributed.peers import Subjects, subjects
from shardfx.runtime.verify.interface import without_content

from .hints import Hints, specs_in_iterations, with_iterations
from .plugins import as_passes, as_rank_passes


@dataclass(frozen=True)
class Compiled:
    """A captured model before and after its passes."""

    hints: Hints
    captured: Captured
    after: Graph
    context: PassContext
    passes: tuple[Pass, ...]

    def subjects(self) -> Subjects:
        """What all ranks must have planned alike, as lines by subject."""
        update = self.captured.update
        groups = update.groups if update is not None else ()
        return subjects(self.captured.graph, self.after, {"the optimizer": [str(group.options) for group in groups]})

    @property
    def trains(self) -> bool:
        """Whether there is a loss."""
        return any(output.kind is OutputKind.LOSS for output in self.after.outputs)

    @property
    def has_gradients(self) -> bool:
        """Whether the plan is for training."""
        return any(output.kind is OutputKind.GRADIENT for output in self.after.outputs)

    @cached_property
    def before(self) -> Graph:
        """The captured graph with all its blocks."""
        return unfolded(self.captured.graph)


def default_passes(hints: Hints) -> tuple[Pass, ...]:
    """The passes that hints ask for, in order: a pure function of the hints (and of the plugins that they name).

    Raises:
        Error: a pass is not known or has no place; the order lacks something.

    Example::

        [str(each) for each in default_passes(Hints(args=(x,), bucket_mb=1))]    # ["bind-hints", "propagate{...}", ...]
    """
    custom = as_passes(hints.passes)
    asked = _asked(hints)
    passes = arrange([each for kind in ORDER for each in asked.get(kind, (kind(),))], custom)
    if is_full_pipeline(custom):
        for each in fields(hints):
            if each.name in OPTIONS and getattr(hints, each.name) != each.default:
                raise Error(
                    f"Hints({each.name}=...) says nothing where Hints(passes=...) is the whole pipeline",
                    expected=f"an option of its pass: {OPTIONS[each.name]}",
                    got=f"{each.name}={getattr(hints, each.name)!r}",
                )
    check_order(passes, wanted=(COMM_EXPLICIT,))
    return passes


OPTIONS = {
    "strict": "propagate{strict=True}",
    "bucket_mb": "bucket-comm{mb=25.0}",
    "zero": "zero{level=3} behind propagate, and rematerialize-gathers behind partition",
    "recompute": "recompute{modules='layers.*'} behind partition",
    "offload": "offload{what=('activations',)} behind order",
}
"""The hints that are options of passes."""


def _asked(hints: Hints) -> dict[type[Pass], tuple[Pass, ...]]:
    """The built-in passes that hints configure; None for those that they do not ask for."""
    contexts = [each for each in as_said(hints).specs.values() if isinstance(each, Context)]
    axes = (hints.zero_axis,) if isinstance(hints.zero_axis, str) else tuple(hints.zero_axis)
    away = tuple(left for each in offloads(hints) for left in each.without("rows"))
    tables = tuple(TableRows(each.modules, each.min_numel) for each in offloads(hints) if "rows" in each.whats)
    auto = hints.recompute == "auto"  # which a plan without it decides, and what activations are offloaded
    asked = None if auto else hints.recompute
    requested = (asked,) if isinstance(asked, (str, Recompute)) else tuple(asked or ())
    names = tuple(each for each in requested if isinstance(each, str))
    again = (Recompute(names if len(names) > 1 else names[0]),) if names else ()
    return {
        Propagate: (Propagate(strict=hints.strict),),
        ContextParallel: (ContextParallel(),) if contexts else (),
        BucketComm: (BucketComm(mb=hints.bucket_mb),),
        Zero: (Zero(hints.zero, axes, hints.zero_min_numel),) if hints.zero else (),
        Pipeline: () if hints.pipeline is None else (hints.pipeline,),
        RematerializeGathers: (RematerializeGathers(),) if hints.zero == 3 else (),
        RematerializeCasts: (RematerializeCasts(),) if hints.mixed_precision is not None and hints.zero < 3 else (),
        Recompute: (*again, *(each for each in requested if isinstance(each, Recompute))),
        RematerializeKeys: (RematerializeKeys(),) if contexts else (),
        TableRows: tables,
        EmbeddingTables: (EmbeddingTables(capacity=0),) if tables else (EmbeddingTables(),),
        Loops: (Loops(fetch=hints.zero == 3, strict=hints.strict),),
        Offload: tuple(left for each in away for left in (each.without("activations") if auto else (each,))),
    }


def offloads(hints: Hints) -> tuple[Offload, ...]:
    """The offload passes that hints ask for, with default options."""
    words: tuple[Any, ...] = tuple(each for each in hints.offload if isinstance(each, str))
    usual = (Offload(words),) if words else ()
    return (*usual, *(each for each in hints.offload if isinstance(each, Offload)))


def check_offload(hints: Hints) -> None:
    """Check that the values which hints offload exist.

    Raises:
        Error: the plan is for inference, has no optimizer in it, or a folder is none.
    """
    asked = offloads(hints)
    whats = {what for each in asked for what in each.whats}
    nowhere = next((each.directory for each in asked if each.directory and not os.path.isdir(each.directory)), "")
    expected, got = "a directory that exists" if nowhere else "", nowhere
    if "optimizer" in whats and hints.optimizer is None:
        expected, got = "an optimizer in the program: Hints(optimizer=...)", "none"
    if whats and hints.loss is None:
        expected, got = "a plan for training: Hints(loss=...)", "one for inference"
    if expected:
        raise Error(
            "this cannot be offloaded",
            where=f"Hints(offload={tuple(hints.offload)})",
            expected=expected,
            got=got,
            remedy="say what it needs, or leave it out",
        )


def default_rank_passes(hints: Hints, device: str = "cpu") -> tuple[RankPass, ...]:
    """The passes on the ranks' programs that hints ask for, on a kind of device: the built-in ones, and the user's
    behind them; one that has the name of a built-in one takes its place.

    Raises:
        Error: a rank pass is not known, or is none.
    """
    ours, custom = built_in(device), as_rank_passes(hints.rank_passes)
    own = {each.name: each for each in custom}
    names = {each.name for each in ours}
    behind = [each for each in custom if each.name not in names and not isinstance(each, Arena)]
    arena = [each for each in custom if isinstance(each, Arena)] or ([Arena()] if hints.arena else [])
    return (*(own.get(each.name, each) for each in ours), *behind, *arena)  # who knows what the others need


@contextmanager
def no_collection() -> Iterator[None]:
    """Disable garbage collection, a third of the time: passes and proofs make many small objects, and few cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def capture_model(
    model: nn.Module | torch.export.ExportedProgram,
    mesh: Mesh,
    hints: Hints,
    found: DynamoTrace | None = None,
) -> Captured:
    """Capture ``model`` for the examples of the hints; ``found`` is Dynamo's trace of it."""
    return capture(
        model,
        mesh,
        args=hints.args,
        kwargs=hints.kwargs,
        loss=hints.loss,
        targets=hints.targets,
        guard=hints.guard,
        optimizer=hints.optimizer if hints.loss is not None else None,
        clip=hints.clip_grad_norm,
        scheduled=hints.scheduled_options,
        batch_parts=batch_parts(mesh, hints),
        compute=MixedPrecision.of(hints.mixed_precision),
        found=found,
    )


def traced_call(
    model: nn.Module, hints: Hints, args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: tuple[Any, ...]
) -> TracedCall:
    """A call under these hints; ``model`` is without the loss that is a submodule."""
    loss = hints.loss.module if isinstance(hints.loss, OwnLoss) else hints.loss
    compute = MixedPrecision.of(hints.mixed_precision) or MixedPrecision()
    return TracedCall(model, loss, args, dict(kwargs), targets, compute.output_dtype)


def trace_model(
    model: nn.Module,
    hints: Hints,
    changing: Collection[str] = (),
    trainable: Collection[str] | None = None,
    known: Collection[str] | None = None,
) -> DynamoTrace:
    """Dynamo's trace of the call of the examples."""
    name = hints.loss.name if isinstance(hints.loss, OwnLoss) else "loss"
    compute = MixedPrecision.of(hints.mixed_precision)
    call = traced_call(model, hints, hints.args, hints.kwargs, hints.targets)
    return trace_call(call, changing, compute, trainable, name, known)


def batch_parts(mesh: Mesh, hints: Hints) -> BatchParts:
    """The parts of the batch with statistics of their own, by the hints: the leading dims of inputs.

    Raises:
        Error: iterations are to have their own, and are no contiguous ranges of the batch.
    """
    if hints.batch_stats is None:
        return ONE
    axes: dict[str, None] = {}
    for name, leaf in leaf_names(hints.args, hints.kwargs, ()):
        for text, hint in (
            specs_in_iterations(mesh, hints).items() if isinstance(leaf, torch.Tensor) and leaf.ndim else ()
        ):
            if pattern(text).fullmatch(name):
                axes |= dict.fromkeys(as_spec(hint, mesh, leaf.ndim, text).dims[0].axes)
    if hints.batch_stats == "local":
        return BatchParts(mesh.extent(axes))
    iterations = [axis for axis in axes if mesh[axis].loop]
    if list(axes)[: len(iterations)] != iterations:
        raise Error(
            "an iteration's part of the batch is no segment of it",
            where="Hints(batch_stats='microbatch')",
            expected="loop axes in front: "
            + " ".join([*iterations, *(axis for axis in axes if axis not in iterations)]),
            got=" ".join(axes),
        )
    return BatchParts(mesh.extent(iterations), one_by_one=True)


def compile_model(
    model: nn.Module,
    mesh: Mesh,
    hints: Hints,
    rules: RuleBook,
    on_pass: Callable[[Pass, Graph], None] | None = None,
    found: DynamoTrace | None = None,
) -> Compiled:
    """Capture ``model`` as :func:`capture_model` does, and run the passes. Links that the mesh does not
    state are those of the machine."""
    passes, mesh = default_passes(hints), Machine.of(hints.machine).connect(mesh)
    mesh = with_iterations(mesh, hints)
    with no_collection():
        captured = capture_model(model, mesh, hints, found)
        note_dense_masks(captured.graph, hints.strict)
        said = as_checkpointed(captured, hints)
        if said is not hints:
            hints, passes = said, default_passes(said)
        if isinstance(hints.specs, PlannedSpecs):
            hints.specs.plan.check(unfolded(captured.graph))
        graph, context = plan_graph(captured, hints, rules, passes, on_pass)
    return Compiled(hints, captured, graph, context, passes)


def as_checkpointed(captured: Captured, hints: Hints) -> Hints:
    """The hints; where they say nothing of recomputation, with the checkpoints of the model's own code."""
    asked = captured.checkpointed if hints.loss is not None else ()
    if hints.recompute is not None or not asked or is_full_pipeline(as_passes(hints.passes)):
        return hints
    said = ", ".join(" to ".join(dict.fromkeys((texts[0], texts[-1]))) for texts in asked)
    captured.graph.notes.append(
        f"{said}: recomputed in the backward, as the model checkpoints them; Hints(recompute=()) keeps them"
    )
    again = (Recompute(texts, segment=len(texts)) if len(texts) > 1 else texts[0] for texts in asked)
    return replace(hints, recompute=tuple(again))


def plan_graph(
    captured: Captured,
    hints: Hints,
    rules: RuleBook,
    passes: tuple[Pass, ...],
    on_pass: Callable[[Pass, Graph], None] | None = None,
) -> tuple[Graph, PassContext]:
    """Plan a copy of the captured graph; returns it with the passes' context.

    Equal blocks are planned once. Where a hint tells them apart, or they come out planned apart, all of them are
    planned, and a note says so; and so they are where somebody's own pass, or ``on_pass``, is to see them.
    """
    why = ""
    if captured.graph.repeats and may_leave_out(passes) and on_pass is None:
        graph = own_constants(captured.graph.copy())
        context = new_context(hints, graph, rules)
        why = why_whole(graph, context.specs) or why_whole(graph, context.strategies)
        context.specs, context.strategies = (
            of_those_there(graph, specs) for specs in (context.specs, context.strategies)
        )
        if not why:
            try:
                run_passes(graph, passes, context, each_validated=False)
                return graph, context
            except Error as error:  # if blocks are not the reason, it is raised again, and then knows all their names
                why = error.what
    graph = own_constants(unfolded(captured.graph))
    context = new_context(hints, graph, rules)
    if why:
        graph.notes.append(f"{PLANNED_WHOLE} ({why})")
    run_passes(graph, passes, context, on_pass)
    return graph, context


def replanned(compiled: Compiled, hints: Hints) -> Compiled:
    """Plan the same captured model again under other hints."""
    passes = default_passes(hints)
    graph, context = plan_graph(compiled.captured, hints, compiled.context.rules, passes)
    return Compiled(hints, compiled.captured, graph, context, passes)


def with_more_room(compiled: Compiled) -> Compiled:
    """The plan with more room for the rows of experts, and for ids of tables."""
    more = [replace(each, room=each.room + 1) for each in compiled.passes if isinstance(each, WITH_ROOM)]
    passes = tuple(each for each in compiled.hints.passes if not isinstance(each, WITH_ROOM))
    return replanned(compiled, replace(compiled.hints, passes=(*passes, *more)))


def own_constants(graph: Graph) -> Graph:
    """The same graph with copies of its constants, so that passes do not write into the captured ones."""
    for inp in graph.inputs:
        if inp.constant is not None and not without_content(inp.constant):
            inp.constant = inp.constant.clone()
    return graph


def new_context(hints: Hints, graph: Graph, rules: RuleBook) -> PassContext:
    """The initial context of the passes."""
    hints = as_said(hints)
    each = hints.reduce == "each" or (hints.reduce == "auto" and hints.zero >= 2)
    specs = specs_in_iterations(graph.mesh, hints)
    machine = Machine.of(hints.machine)
    return PassContext(
        rules, Redistribution(graph.mesh, each), specs=specs, strategies=hints.strategies, machine=machine
    )
