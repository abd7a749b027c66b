"""parallelize: the front door."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardfx.ir.graph import Graph
from shardfx.ir.mesh import Mesh
from shardfx.module.modes import OtherMode, without_weights
from shardfx.module.parallel_module import ParallelModule
from shardfx.module.place import Place
from shardfx.passes import Pass
from shardfx.runtime.distributed.groups import initialise, launched

from .compile import compile_model
from .hints import Hints
from .plugins import all_rules

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def parallelize(
    model: nn.Module,
    mesh: Mesh | DeviceMesh,
    hints: Hints,
    *,
    on_pass: Callable[[Pass, Graph], None] | None = None,
    virtual: bool | None = None,
) -> ParallelModule:
    """Make ``model`` parallel over ``mesh``: the same computation, one program per rank.

    Args:
        model: any ``nn.Module`` that ``torch.export`` takes; it is left as it is. Weights may be fake, or on
            ``meta``: then there is a plan, and no weights.
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
    compiled = compile_model(model, described, hints, all_rules(), on_pass)
    other = OtherMode(without_weights(model), hints, lambda m, h: compile_model(m, described, h, all_rules()))
    return ParallelModule(compiled, _place(model, described, virtual), model, other)


def _place(model: nn.Module, mesh: Mesh, virtual: bool | None) -> Place:
    """All ranks in this process, or this process as one of them."""
    device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    kind = "cpu" if device.type == "meta" else device.type
    if virtual or not launched(mesh):
        return Place(True, torch.device(kind))
    initialise(kind)
    return Place(False, torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind))
