"""Capture: from a user's module to one functional graph of forward, loss and backward.

``torch.export`` (non-strict) keeps the names of modules and lines; the backward is then written beside the forward,
by :mod:`.joint.joint_graph` or by AOTAutograd; :mod:`shardfx.ir.builder` turns that into our IR. Nothing is computed:
weights may be fake, or on ``meta``, and examples may be fake.

    >>> captured = capture(model, Mesh(dp=2), args=(x,), loss=F.cross_entropy, targets=(y,))
    >>> print(captured.graph)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph
from shardfx.ir.mesh import Mesh
from shardfx.ir.spec import laid_of
from shardfx.ir.unfolding.regular import Irregular
from shardfx.ir.unfolding.unfold import check_regular

from .carried.autograd_history import reject_history
from .carried.between_forms import between_forms, trained_by
from .carried.earlier import Earlier
from .carried.two_calls import Called, reject_carried
from .compared.as_eager import AsItIs
from .compared.both_runs import Named
from .compared.mended import AS_TORCH, mended
from .compared.step_rewrites import compare_rewrites
from .convert import Names
from .decisions import NotKnown, with_numbers
from .forms.compute import Compute
from .forms.loss_scaling import LossScale
from .forms.parts_of_batch import ONE, BatchParts
from .forms.wide_sums import sum_gradients_in
from .intake.batch_norms import alone
from .intake.explained import DataDependent, explain
from .intake.given import as_module, no_library_of_cpus, no_log_of_failures, on_cpu
from .intake.hooks import WatchedHooks
from .intake.refusals import reject_loss
from .intake.surroundings import Surroundings
from .intake.transforms import transforms_left
from .model_and_loss import ModelAndLoss, Results, leaf_names, loss_source
from .named.code_names import one_where_asked
from .named.left_as_found import left_as_found
from .named.ties import aliases_of, name_ties
from .repeats import TRACED_WHOLE, Shortened, find_repeats
from .shells import Outcomes
from .update.behind import Behind
from .update.loss_scale import SCALE
from .update.made_groups import Factory
from .update.stepped import Update
from .write_graph import exported_of, names_of_one, write_graph


@dataclass(frozen=True)
class Captured:
    """A captured model: the graph, and how the leaves of inputs and results are arranged.

    ``leaves`` are the names (``args.0``) of the tensor inputs, in order; ``aliases`` name tied parameters. ``update``
    is what the graph has of an optimizer, ``checkpointed`` the modules (patterns) that the model's code checkpoints, by
    call. ``keeps``: the model's code changes what it holds beside buffers. ``compared``: what was written into the step
    and compared with plain torch.
    """

    graph: Graph
    leaves: tuple[str, ...]
    result_tree: pytree.TreeSpec
    result_leaves: tuple[Any, ...]
    aliases: Mapping[str, str]
    update: Update | None = None
    checkpointed: tuple[tuple[str, ...], ...] = ()
    keeps: bool = False
    compared: tuple[str, ...] = ()


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
    compute: Compute | None = None,
    behind: Sequence[Earlier] = (),
) -> Captured:
    """Capture ``model`` (and its loss and backward, if ``loss`` is given) as one graph of global shapes.

    A model may ask what it made itself holds (``nn.Transformer`` whether its mask is causal): that is no data.

    Args:
        optimizer: makes the optimizer whose step stands behind the backward (see :mod:`.update.written`).
        clip: what the norm of all gradients may be at the most (see :mod:`.update.clip`).
        scheduled: options of the optimizer's groups that are inputs, beside the rate.
        fold: leave out equal blocks (see :mod:`.repeats`), as the graph's ``repeats`` say.
        guard: what depends on the data is as it is for the examples, and watched by guards (see :mod:`.decisions`).
        batch_parts: batch norms normalise these parts of the batch apart (see :mod:`.forms.parts_of_batch`).
        compute: in which dtype the model computes, and its gradients are summed (see :mod:`.forms.compute`).
        behind: the calls in other forms for which it was captured before.

    Raises:
        Error: the model cannot be captured (data-dependent shapes, a loss that is not a scalar, ...).
    """
    given = (model, mesh, args, dict(kwargs or {}), loss, targets, fold)
    further = (optimizer, clip, scheduled, batch_parts, compute, behind)
    try:
        return _capture(*given, guard, *further)
    except DataDependent as error:
        if guard:
            raise
        return _settled(partial(_capture, *given, True, *further, real=False), error)


def _settled(capture: Callable[[], Captured], error: DataDependent) -> Captured:
    """What is captured with guards, if there are none: what the model asks for is the same at every call.

    Raises:
        DataDependent: it is not: as ``error`` says, which may not know where.
    """
    try:
        made = capture()
    except NotKnown as unknown:
        raise error.at(unknown.where or error.where) from None
    except Error:
        raise error from None
    if _decisions(made.graph):
        raise error
    return made


def _decisions(graph: Graph) -> int:
    """How many times the data decide what the model does."""
    return sum(output.guard is not None and not output.guard.op for output in graph.outputs)


def _capture(
    model: nn.Module | torch.export.ExportedProgram,
    mesh: Mesh,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Callable[..., torch.Tensor] | None,
    targets: tuple[Any, ...],
    fold: bool,
    guard: bool,
    optimizer: Factory | None,
    clip: float | None,
    scheduled: Sequence[str],
    batch_parts: BatchParts,
    compute: Compute | None,
    behind: Sequence[Earlier],
    real: bool = True,
) -> Captured:
    """``real``: what guards go by is what weights and examples hold, not only what the model makes itself."""
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
    own = tensors
    with ExitStack() as stack:
        for each in (alone(), transforms_left(), no_library_of_cpus(), no_log_of_failures()):
            stack.enter_context(each)
        reject_loss(loss)
        hooks = WatchedHooks(as_module(model))
        with with_numbers() if guard else nullcontext():
            traced, tensors = on_cpu(hooks.model, tensors, stack, guard and real)
        params = dict(traced.named_parameters(remove_duplicate=False))
        buffers = dict(traced.named_buffers(remove_duplicate=False))
        aliases = aliases_of({**params, **buffers})
        if compute is not None:
            compute.check(traced)
        results = Results()
        around = Surroundings(traced, loss)
        one = one_where_asked(own, around.names.named)

        def program(model: nn.Module) -> ModelAndLoss:
            return ModelAndLoss(model, tree, leaves, loss, len(targets), results, guard, compute, real, one)

        short = Shortened(traced)
        scale = compute.scale if compute is not None else None
        if fold:
            with left_as_found(around):
                short = find_repeats(traced, tensors, lambda model, given: program(model)(*given), aliases)
        adapts = isinstance(scale, LossScale)
        begins = scale.init if isinstance(scale, LossScale) else scale or 1.0
        wanted = Names(tuple(names), aliases, loss_source(loss), seed=begins, seed_state=SCALE if adapts else "")
        trace = partial(_trace, mesh=mesh, names=wanted, batch_parts=batch_parts, compute=compute)
        trace = partial(trace, outcomes=short.outcomes, trained=trained_by(behind))
        graph, note = trace(program(short.model), tuple(tensors)), short.note
        graph.repeats = short.repeats
        try:
            check_regular(graph)
        except Irregular as error:
            graph = trace(program(traced), tuple(tensors))
            note = f"{TRACED_WHOLE} ({error.what})"
        between_forms(Called(program(traced), tensors), behind)
    hooks.check()
    name_ties(graph, aliases)
    known = {**params, **buffers, **dict(zip(names, tensors, strict=True))}
    for given in graph.inputs:
        content = given.constant if given.constant is not None else known.get(given.name)
        given.laid = laid_of(content) if content is not None else ()
    step = Behind(scale if loss is not None else None, clip, optimizer, scheduled)
    compared = compare_rewrites(graph, step, compute, batch_parts)
    graph, update, apart = step.write(graph, dict(traced.named_parameters()))
    guards = _decisions(graph)
    said = f"the data decide {guards} times what the model does, which is checked at every call" if guards else ""
    count = batch_parts.count
    parts = f"batch norms normalise each of {count} parts of the batch apart" if count > 1 else ""
    asked = results.checkpointed
    again = asked.patterns(traced, {node.where.module for node in graph.nodes})
    unsaid = NO_MODULE if asked.others and loss is not None else ""
    graph.notes = [each for each in (*graph.notes, note, apart, said, parts, unsaid) if each]
    return Captured(graph, tuple(names), results.tree, results.leaves, aliases, update, again, results.keeps, compared)


NO_MODULE = (
    "a function that the model checkpoints calls no module, and what it makes is kept: Hints(recompute=...) says by "
    "modules what is made again"
)


def _trace(program: ModelAndLoss, tensors: tuple[torch.Tensor, ...], **how: Any) -> Graph:
    """The graph of a program's forward and backward. Code that asks whether it is compiled is told so; where it then
    cannot be captured, or does something else, it is traced once more and told that it is not."""
    try:
        return _traced(program, tensors, **how)
    except DataDependent:
        raise
    except Error as error:
        if not program.results.asked_whether_compiled or program.unasked:
            raise
        program.unasked = True
        try:
            return _traced(program, tensors, **how)
        except Error:
            raise error from None


def _traced(
    program: ModelAndLoss,
    tensors: tuple[torch.Tensor, ...],
    mesh: Mesh,
    names: Names,
    batch_parts: BatchParts,
    compute: Compute | None,
    outcomes: Outcomes | None,
    trained: Collection[str],
) -> Graph:
    """The graph of a program's forward and backward, by one trace: it makes of the example what the program makes."""
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    around = Surroundings(program.model, program.loss)
    named = Named(names.aliases, names.leaves, names.seed, names.seed_state, batch_parts)
    as_it_is: AsItIs | None = None
    try:
        with warnings.catch_warnings(), _use_lazy_graph_module(True):  # nobody reads their code
            warnings.simplefilter("ignore")
            as_it_is = AsItIs(
                program,
                tensors,
                named,
                around,
                trains=names.loss is not None,
                guarded=program.by_example,
                recast=compute is not None,
            )
            write = partial(write_graph, mesh=mesh, batch_parts=batch_parts)
            graph, drawn = write(program, tensors, names=names, outcomes=outcomes, as_torch=AS_TORCH)
            with left_as_found(around):
                difference = as_it_is.difference(graph, drawn)
            if difference is not None:
                graph = mended(
                    difference,
                    as_it_is,
                    tensors,
                    partial(exported_of, program, tensors),
                    lambda ops: write(program, tensors, names=names, outcomes=outcomes, as_torch=ops),
                    lambda one, given: write(one, given, names=names_of_one(given)),
                    names.loss,
                )
        reject_history(Called(program, tensors), graph, around)
        if program.results.keeps:
            reject_carried(Called(program, tensors), around, trained=trained)
        graph.notes = [each for each in (as_it_is.note, *graph.notes) if each]
        if compute is not None:
            sum_gradients_in(graph, compute.sums)
        return graph
    except Error:
        raise
    except Exception as error:
        asked = program.model, program.loss, program.guard, around.tensors, program.unseen
        raise explain(error, *asked, as_it_is.raised if as_it_is is not None else None) from error
