"""Capture: from a user's module to one functional graph of forward, loss and backward.

``torch.export`` (non-strict) keeps the names of modules and lines; the backward is then written beside the forward,
by :mod:`.joint_graph` or by AOTAutograd; :mod:`.convert` makes our IR of that. Nothing is computed: weights may be
fake, or on ``meta``, and examples may be fake.

    >>> captured = capture(model, Mesh(dp=2), args=(x,), loss=F.cross_entropy, targets=(y,))
    >>> print(captured.graph)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, ParamSpec

import torch
import torch.utils._pytree as pytree
from torch import nn

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph
from shardfx.ir.mesh import Mesh
from shardfx.ir.repeat import Repeat
from shardfx.ir.spec import dim_order_of
from shardfx.ir.unfolding.regular import IrregularBlocks
from shardfx.ir.unfolding.unfold import check_regular

from .abstract_tensors import OutcomeCache
from .canonical.batch_norms import ONE, BatchParts, plain_batch_norms
from .canonical.mixed_precision import LossScale, MixedPrecision, sum_gradients_in
from .convert import ProgramNames
from .data_dependent import UnknownContent, stored, with_real_tensors
from .eager_comparison import EagerReference
from .export_program import write_graph
from .frontend.autograd_in_forward import transforms_exited
from .frontend.capture_errors import DataDependent, explain
from .frontend.dynamo import DynamoTrace
from .frontend.model_preparation import (
    as_module,
    attributes_of,
    on_cpu,
    python_state_restored,
    quiet_fake_tensors,
    without_onednn,
)
from .frontend.traced_program import TracedProgram, without_repeats
from .model_and_loss import ModelAndLoss, TraceResults, leaf_names, loss_source
from .optimizer.optimizer_groups import Factory
from .optimizer.sparse_rows import name_rows
from .optimizer.training_step import SCALE, TrainingStep
from .optimizer.update_spec import UpdateSpec
from .repeated_blocks import TRACED_WHOLE, FoldedModel, find_repeats


@dataclass(frozen=True)
class Captured:
    """A captured model: the graph, and how the leaves of inputs and results are arranged.

    ``leaves`` are the names (``args.0``) of the tensor inputs, in order; ``aliases`` name tied parameters. ``update``
    is what the graph has of an optimizer, ``checkpointed`` the modules (patterns) that the model's code checkpoints, by
    call. ``trace``: that of Dynamo, if it traced the model; if not, ``sets`` are attributes that the model's code sets.
    """

    graph: Graph
    leaves: tuple[str, ...]
    result_tree: pytree.TreeSpec
    result_leaves: tuple[Any, ...]
    aliases: Mapping[str, str]
    update: UpdateSpec | None = None
    checkpointed: tuple[tuple[str, ...], ...] = ()
    trace: DynamoTrace | None = None
    sets: tuple[str, ...] = ()


def _decisions(graph: Graph) -> int:
    """The number of data-dependent decisions."""
    return sum(output.guard is not None and not output.guard.op for output in graph.outputs)


P = ParamSpec("P")


def _with_constant_content(capture: Callable[P, Captured]) -> Callable[P, Captured]:
    """A capture that takes what depends on content which is the same at every call: it is captured again with guards,
    and none remains."""

    @wraps(capture)
    def captured(*args: P.args, **kwargs: P.kwargs) -> Captured:
        try:
            return capture(*args, **kwargs)
        except DataDependent as error:
            if kwargs.get("guard"):
                raise
            depends = error
        try:
            made = capture(*args, **{**kwargs, "guard": True, "real": False})  # type: ignore[arg-type]
        except UnknownContent as unknown:
            raise depends.at(unknown.where or depends.where) from None
        except Error:
            raise depends from None
        if _decisions(made.graph):
            raise depends
        return made

    return captured


@_with_constant_content
def capture(
    model: nn.Module | torch.export.ExportedProgram,
    mesh: Mesh,
    *,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[..., torch.Tensor] | None = None,
    targets: tuple[Any, ...] = (),
    fold: bool = True,
    guard: bool = False,
    optimizer: Factory | None = None,
    clip: float | None = None,
    scheduled: Sequence[str] = (),
    batch_parts: BatchParts = ONE,
    compute: MixedPrecision | None = None,
    found: DynamoTrace | None = None,
    real: bool = True,
) -> Captured:
    """Capture ``model`` (and its loss and backward, if ``loss`` is given) as one graph of global shapes.

    A model may ask what it made itself holds (``nn.Transformer`` whether its mask is causal): that is no data.

    Args:
        optimizer: makes the optimizer whose step is emitted behind the backward (see :mod:`.optimizer.emit_update`).
        clip: the maximum norm of all gradients (see :mod:`.optimizer.training_step`).
        scheduled: options of the optimizer's groups that are inputs, beside the rate.
        fold: leave out equal blocks (see :mod:`.repeated_blocks`), as the graph's ``repeats`` say.
        guard: what depends on the data is as for the examples, and checked by guards (see :mod:`.data_dependent`).
        batch_parts: batch norms normalise these parts of the batch apart (see :mod:`.canonical.batch_norms`).
        compute: the dtypes of computing and of reducing gradients (see :mod:`.canonical.mixed_precision`).
        found: Dynamo's trace of the call, or of it without the loss; None: ``torch.export`` traces the model itself.
        real: guards go by the content of weights and examples, not only by what the model makes itself.

    Raises:
        Error: the model cannot be captured (data-dependent shapes, a loss that is not a scalar, ...).
    """
    kwargs = dict(kwargs or {})
    named = leaf_names(args, kwargs, targets)
    leaves, tree = pytree.tree_flatten((args, kwargs, targets))
    names = [name for name, leaf in named if isinstance(leaf, torch.Tensor)]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not tensors:
        raise Error(
            "there is no example input",
            where="Hints(args=..., kwargs=...)",
            expected="the global batch as tensors (fake ones will do)",
            got=f"args={args!r}, kwargs={kwargs!r}",
        )
    if found is not None:
        names, tensors = [*names, *found.others], [*tensors, *found.others.values()]
    with ExitStack() as stack:
        for each in (plain_batch_norms(), transforms_exited(), without_onednn(), quiet_fake_tensors()):
            stack.enter_context(each)
        module = as_module(model)
        stack.enter_context(python_state_restored(module))
        with with_real_tensors() if guard else nullcontext():
            traced, tensors = on_cpu(module, tensors, stack, guard and real)
        aliases = aliases_of(stored(traced))
        if compute is not None:
            compute.check(traced)
        results = TraceResults()
        if found is not None:
            results.kept = found.kept

        def program(model: nn.Module, left_out: Sequence[Repeat] = ()) -> ModelAndLoss:
            program = model, tree, leaves, loss, len(targets), results, guard, compute, real
            if found is None:
                return ModelAndLoss(*program)
            return TracedProgram(without_repeats(found, left_out), names, *program)

        short = FoldedModel(traced)
        scale = compute.loss_scale if compute is not None else None
        if fold:
            short = find_repeats(traced, tensors, program, aliases)
        adapts = isinstance(scale, LossScale)
        begins = scale.init if isinstance(scale, LossScale) else scale or 1.0
        wanted = ProgramNames(tuple(names), aliases, loss_source(loss), seed=begins, seed_state=SCALE if adapts else "")
        trace = partial(_trace, mesh=mesh, names=wanted, batch_parts=batch_parts, compute=compute)
        trace = partial(trace, outcomes=short.outcomes, gives_rows=optimizer is None)
        graph, note = trace(program(short.model, short.repeats), tuple(tensors)), short.note
        graph.repeats = short.repeats
        try:
            check_regular(graph)
        except IrregularBlocks as error:
            graph = trace(program(traced), tuple(tensors))
            note = f"{TRACED_WHOLE} ({error.what})"
    name_ties(graph, aliases)
    known = {**stored(traced), **dict(zip(names, tensors, strict=True))}
    for inp in graph.inputs:
        content = inp.constant if inp.constant is not None else known.get(inp.name)
        inp.dim_order = dim_order_of(content) if content is not None else ()
    step = TrainingStep(scale if loss is not None else None, clip, optimizer, scheduled)
    graph, update, apart = step.write(graph, dict(traced.named_parameters()))
    guards = _decisions(graph)
    said = f"the data decide {guards} times what the model does, which is checked at every call" if guards else ""
    count = batch_parts.count
    parts = f"batch norms normalise each of {count} parts of the batch apart" if count > 1 else ""
    asked = results.checkpointed
    again = asked.patterns(traced, {node.where.module for node in graph.nodes})
    unsaid = NO_MODULE if asked.others and loss is not None else ""
    graph.notes = [each for each in (*graph.notes, note, apart, said, parts, unsaid) if each]
    layout = results.tree, results.leaves, aliases
    return Captured(graph, tuple(names), *layout, update, again, found, results.sets)


NO_MODULE = (
    "a function that the model checkpoints calls no module, and its results are saved: Hints(recompute=...) says by "
    "modules what is recomputed"
)


def _trace(
    program: ModelAndLoss,
    tensors: tuple[torch.Tensor, ...],
    mesh: Mesh,
    names: ProgramNames,
    batch_parts: BatchParts,
    compute: MixedPrecision | None,
    outcomes: OutcomeCache | None,
    gives_rows: bool,
) -> Graph:
    """The graph of a program's forward and backward, by one trace, compared with eager PyTorch on the example."""
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    eager: EagerReference | None = None
    before = attributes_of(program.model) if program is program.eager else {}
    try:
        with warnings.catch_warnings(), _use_lazy_graph_module(True):  # nobody reads their code
            warnings.simplefilter("ignore")
            how: dict[str, Any] = {"guarded": program.by_example, "recast": compute is not None}
            how |= {"kept": program.results.kept or (), "scopes": program.scopes}
            eager = EagerReference(program.eager, tensors, names, batch_parts, **how)
            how = {"mesh": mesh, "names": names, "batch_parts": batch_parts, "outcomes": outcomes}
            graph, drawn = write_graph(program, tensors, **how)
            if program is program.eager:
                now = attributes_of(program.model)
                program.results.sets = tuple(name for name, text in now.items() if text != before.get(name))
            eager.check(graph, drawn)
        graph.notes = [each for each in (eager.note, *graph.notes) if each]
        if compute is not None:
            sum_gradients_in(graph, compute.sums)
        if gives_rows:
            name_rows(graph)
        return graph
    except Error:
        raise
    except Exception as error:
        asked = program.model, program.guard, program.unseen
        raise explain(error, *asked, eager.raised if eager is not None else None) from error


def aliases_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The first name of the same tensor, for every name (itself, mostly)."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}


def name_ties(graph: Graph, aliases: Mapping[str, str]) -> None:
    """Set on each input the other names that the model has for it."""
    others: dict[str, list[str]] = {}
    for name, first in aliases.items():
        if name != first:
            others.setdefault(first, []).append(name)
    for inp in graph.inputs:
        inp.aliases = tuple(others.get(inp.name, ()))
