"""parallelize: the front door."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from shardfx.ir.capture.given import as_module
from shardfx.ir.capture.trace import capture
from shardfx.ir.graph import Graph
from shardfx.ir.mesh import Mesh
from shardfx.module.modes import OtherMode, without_weights
from shardfx.module.parallel_module import ParallelModule
from shardfx.passes import Pass
from shardfx.runtime.distributed.groups import initialise, launched
from shardfx.runtime.virtual.virtual_engine import VirtualEngine

from .compile import compile_model
from .compiled import Compiled
from .hints import Hints
from .plugins import all_rules

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from shardfx.runtime.distributed.process_engine import DistributedEngine


def parallelize(
    model: nn.Module | torch.export.ExportedProgram,
    mesh: Mesh | DeviceMesh,
    hints: Hints,
    *,
    on_pass: Callable[[Pass, Graph], None] | None = None,
    virtual: bool | None = None,
) -> ParallelModule:
    """Make ``model`` parallel over ``mesh``: the same computation, one program per rank.

    Args:
        model: any ``nn.Module`` that ``torch.export`` takes (an ``fx.GraphModule`` is one), or an
            ``ExportedProgram``; it is left as it is. Weights may be fake, or on ``meta``: then there is a plan, and no
            weights.
        mesh: a :class:`Mesh`, or a torch ``DeviceMesh`` with named dimensions.
        hints: example inputs, loss, and how a few values are cut (see :class:`Hints`).
        on_pass: called with each pass and the graph after it.
        virtual: run all ranks in this process. By default so, unless ``torch.distributed`` is initialised or the
            process was started by ``torchrun``: then it is one rank of the mesh (and joins the job if need be).

    Raises:
        Error: a hint that cannot be followed, a model that cannot be captured, ...

    Example::

        mesh = sx.Mesh(dp=2, tp=2)
        hints = sx.Hints(args=(x,), loss=F.cross_entropy, targets=(y,), specs={"args.0": "dp, -"})
        pm = sx.parallelize(model, mesh, hints)
        loss = pm(x, y)
        loss.backward()
    """
    described = mesh if isinstance(mesh, Mesh) else Mesh.from_device_mesh(mesh)
    module = as_module(model)
    made = _build(module, described, hints, on_pass, virtual)
    made.set_other_mode(OtherMode(without_weights(module), hints, lambda m, h: _build(m, described, h, None, virtual)))
    return made


def trace(model: nn.Module | torch.export.ExportedProgram, hints: Hints, mesh: Mesh | None = None) -> Graph:
    """The captured program of ``model``, its loss and its backward, before any pass: ``print`` shows it.

    Args:
        model: as for :func:`parallelize`.
        hints: example inputs and loss; placements are not asked for.
        mesh: what the graph is to be placed on; one device, if there is none.

    Raises:
        Error: the model cannot be captured.

    Example::

        print(sx.trace(model, sx.Hints(args=(x,), loss=F.cross_entropy, targets=(y,))))
    """
    mesh = Mesh(dp=1) if mesh is None else mesh
    return capture(model, mesh, args=hints.args, kwargs=hints.kwargs, loss=hints.loss, targets=hints.targets).graph


def _build(
    model: nn.Module,
    described: Mesh,
    hints: Hints,
    on_pass: Callable[[Pass, Graph], None] | None,
    virtual: bool | None,
) -> ParallelModule:
    compiled = compile_model(model, described, hints, all_rules(), on_pass)
    engine = _engine(compiled, model, virtual)
    aliases = compiled.captured.aliases
    state = {aliases.get(n, n): t for n, t in (*model.named_parameters(), *model.named_buffers())}
    if not any(t.is_meta or isinstance(t, FakeTensor) for t in state.values()):
        trainable = {aliases.get(n, n): p.requires_grad for n, p in model.named_parameters()}
        with torch.no_grad():
            engine.load(state, trainable)
    return ParallelModule(compiled, described, engine, model)


def _engine(compiled: Compiled, model: nn.Module, virtual: bool | None) -> VirtualEngine | DistributedEngine:
    """All ranks in this process, or this process as one of them."""
    graph, rules = compiled.after, compiled.context.rules
    if virtual or not launched(graph.mesh):
        return VirtualEngine(graph, rules)
    from shardfx.runtime.distributed.process_engine import DistributedEngine

    device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    kind = "cpu" if device.type == "meta" else device.type
    initialise(kind)
    return DistributedEngine(
        graph, rules, torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    )
