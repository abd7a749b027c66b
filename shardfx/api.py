"""The entry point: :func:`parallelize`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardfx.ir.capture.frontend.dynamo import UntracedByDynamo
from shardfx.ir.capture.frontend.loss_module import with_own_loss
from shardfx.ir.capture.frontend.model_preparation import as_module, without_weights
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph
from shardfx.ir.mesh import Mesh
from shardfx.ir.unfolding.unfold import unfolded
from shardfx.memory.budget import within_budget
from shardfx.module.call_signature import autocast_around, reject_traces
from shardfx.module.execution_target import ExecutionTarget
from shardfx.module.model_state import SourceModel
from shardfx.module.parallel_module import ParallelModule
from shardfx.module.rule_checks import check_own_rules
from shardfx.module.specializations import Specializations
from shardfx.module.state_checks import unwatched, watch_original
from shardfx.passes import Pass
from shardfx.plan import PlannedSpecs
from shardfx.runtime.distributed.groups import check_size, initialise, is_dry_run, launched
from shardfx.runtime.distributed.peers import Peers
from shardfx.runtime.local_device import local_device
from shardfx.runtime.verify.interface import without_content

from .compile import Compiled, capture_model, check_offload, compile_model, no_collection, trace_model
from .gradients import check_gradients, check_scale, check_stepped, product, reject_half
from .hints import Hints
from .plugins import all_rules
from .redundant_compute import report_redundant_compute

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def parallelize(
    model: nn.Module | torch.export.ExportedProgram,
    mesh: Mesh | DeviceMesh,
    hints: Hints,
    *,
    on_pass: Callable[[Pass, Graph], None] | None = None,
    virtual: bool | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
) -> ParallelModule:
    """Make ``model`` parallel over ``mesh``: the same computation, one program per rank.

    Args:
        model: any ``nn.Module`` that Dynamo traces as one graph (an ``fx.GraphModule`` is one), or an
            ``ExportedProgram``. Its attributes and modes are those of the parallel module, whose calls change them as
            eager calls do; its own parameters do not train, and hooks notice when it is called or saved while only the
            parallel module was trained. Weights may be fake, or on ``meta``:
            then there is a plan, and no weights. Of several processes it is rank 0's model that counts: the others'
            weights may be on ``meta``.
        mesh: a :class:`Mesh`, or a torch ``DeviceMesh`` with named dimensions.
        hints: example inputs, loss, and how a few values are sharded (see :class:`Hints`).
        on_pass: called with each pass and the graph after it; all blocks are then planned one by one, for it to see.
        virtual: run all ranks in this process. By default so, unless ``torch.distributed`` is initialised or the
            process was started by ``torchrun``: then it is one rank of the mesh (and joins the job if need be). The
            only process of a job that ``torchrun`` started is the rank of a mesh of one, and has all ranks of a larger
            one. On torch's ``fake`` process group this process runs its rank alone, a dry run: shapes, memory, kernels
            and the order of starts and waits are real, and numbers are not, for those of the others are missing.
        optimizer: one that was made of the model's parameters, or several: it goes on with those of the parallel
            module, in the same groups and with its states. (One that is not given and steps the model's own
            parameters later is an error, for they no longer train.)

    Raises:
        Error: a hint that cannot be followed, a model that cannot be captured, a device that is not there, a process
            group that does not serve it (gloo does not serve CUDA tensors), ...

    Example::

        mesh = sx.Mesh(dp=2, tp=2)
        hints = sx.Hints(args=(x,), loss=F.cross_entropy, targets=(y,), specs={"args.0": "dp, -"})
        pm = sx.parallelize(model, mesh, hints)
        loss = pm(x, y)
        loss.backward()
    """
    if not isinstance(hints, Hints):
        raise Error("these are no hints", where="parallelize(...)", expected="a shardfx.Hints", got=repr(hints))
    if isinstance(model, ParallelModule):
        raise Error(
            "this model is parallel already",
            where="parallelize(...)",
            expected="the model that it was made of",
            got="a ParallelModule",
            remedy="with pm.gathered() as model: gives one with the weights of the moment",
        )
    reject_traces("parallelize(...)")
    described = mesh if isinstance(mesh, Mesh) else Mesh.from_device_mesh(mesh)
    given = as_module(model)
    module, loss = with_own_loss(given, hints.loss)
    hints = replace(hints, loss=loss)
    check_offload(hints)
    check_scale(hints)
    with no_collection(), unwatched(), torch.inference_mode(False), torch.enable_grad():  # wherever this is called

        def build(model: nn.Module, hints: Hints, *further: Any) -> Compiled:
            asked = torch.is_grad_enabled()
            with torch.inference_mode(False), torch.set_grad_enabled(asked):  # which a model may ask
                made = compile_model(model, described, hints, all_rules(hints.rules), None, *further)
                if hints.loss is not product and asked:
                    check_gradients(model, made)
                return checked(made)

        def first() -> Compiled:
            if not place.virtual:
                check_size(described)
            rules = all_rules(hints.rules)
            found = refused = None
            if variants.traces and not later:
                try:
                    found = trace_model(source.module, hints)
                except UntracedByDynamo as error:  # which torch.export may take
                    refused, variants.traces = error, False
                except Error:  # torch.export may say more of why
                    capture_model(module, described, hints)
                    raise
            compiled = compile_model(module, described, hints, rules, on_pass, found)
            if found is None and compiled.captured.sets and not later:
                raise refused or keeps_state(compiled.captured.sets)
            if refused is not None:
                compiled.after.notes.append(f"{UNGUARDED} ({refused.where}: {refused.got})")
            check_gradients(module, compiled)
            check_stepped(module, compiled)
            return checked(compiled)

        def checked(compiled: Compiled) -> Compiled:
            reject_half(compiled, autocast_around())
            compiled = within_budget(compiled, place)
            if isinstance(compiled.hints.specs, PlannedSpecs):
                compiled.hints.specs.plan.check_planned(compiled)
            check_own_rules(compiled.after, compiled.context, hints.rules)
            report_redundant_compute(compiled)
            return compiled

        tensors = [*module.parameters(), *module.buffers()]
        place = _place(tensors, described, hints, virtual)
        later = place.virtual and any(map(without_content, tensors))
        watch, source = watch_original(given), SourceModel(given, loss)
        traces = not hints.guard and not isinstance(model, torch.export.ExportedProgram)
        variants = Specializations(source, without_weights(module), hints, build, traces)
        peers = Peers(alone=place.virtual or is_dry_run())
        with peers.calling():
            compiled = peers.planned(first, Compiled.subjects)
            pm = ParallelModule(compiled, place, peers, module, variants, optimizer)
    if pm._store.parameters:  # weights that may become stale
        watch.begin(given, pm._store)
        pm._watch_model(given, watch)
    return pm


UNGUARDED = "Dynamo does not trace the model, so changes of what it reads beside its attributes are not seen"


def keeps_state(names: Sequence[str]) -> Error:
    """The error of a model that sets attributes, and is exported."""
    return Error(
        "the model keeps something from call to call, and with guards no program does",
        where=", ".join(names[:5]),
        expected="what forward returns, parameters and buffers",
        got="attributes that its code sets",
        remedy="make it a buffer, or return it; without guard=True, it is as in eager code",
    )


def trace(model: nn.Module | torch.export.ExportedProgram, hints: Hints, mesh: Mesh | None = None) -> Graph:
    """Capture ``model``, its loss and its backward as a graph, before any pass: ``print`` shows it.

    Args:
        model: as for :func:`parallelize`.
        hints: example inputs and loss; placements are not asked for.
        mesh: what the graph is to be placed on; one device, if there is none.

    Raises:
        Error: the model cannot be captured.
    """
    mesh = Mesh(dp=1) if mesh is None else mesh
    module, loss = with_own_loss(as_module(model), hints.loss)
    with unwatched():
        return unfolded(capture_model(module, mesh, replace(hints, loss=loss)).graph)


def _place(tensors: Sequence[torch.Tensor], mesh: Mesh, hints: Hints, virtual: bool | None) -> ExecutionTarget:
    """The execution target of a model with these tensors: all ranks in this process, or this process as one of them.

    Raises:
        Error: a device that is not there, for a model with weights, or for a rank of a job.
    """
    weights = next((t.device for t in tensors), torch.device("cpu"))
    real = not virtual and launched(mesh.size)
    device = local_device(hints.device, weights, real)
    if real or not any(map(without_content, tensors)):
        torch.empty(0, device=device)  # raises before planning, if there is none
    if real:
        initialise(device)
    return ExecutionTarget(not real, device)
