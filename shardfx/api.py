"""parallelize: the front door."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from shardfx.ir.graph import Graph
from shardfx.ir.mesh import Mesh
from shardfx.ir.rulebook import default_rules
from shardfx.passes import Pass
from shardfx.runtime.engine import VirtualEngine

from .compile import compile_model
from .hints import Hints
from .module import ParallelModule

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def parallelize(
    model: nn.Module,
    mesh: Mesh | DeviceMesh,
    hints: Hints,
    *,
    on_pass: Callable[[Pass, Graph], None] | None = None,
) -> ParallelModule:
    """Make ``model`` parallel over ``mesh``: the same computation, one program per rank.

    Args:
        model: any ``nn.Module`` that ``torch.export`` takes; it is left as it is. Weights may be fake, or on
            ``meta``: then there is a plan, and no weights.
        mesh: a :class:`Mesh`, or a torch ``DeviceMesh`` with named dimensions.
        hints: example inputs, loss, and how a few values are cut (see :class:`Hints`).
        on_pass: called with each pass and the graph after it.

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
    compiled = compile_model(model, described, hints, default_rules(), on_pass)
    engine = VirtualEngine(compiled.after, compiled.context.rules)
    aliases = compiled.captured.aliases
    state = {aliases.get(n, n): t for n, t in (*model.named_parameters(), *model.named_buffers())}
    if not any(t.is_meta or isinstance(t, FakeTensor) for t in state.values()):
        trainable = {aliases.get(n, n): p.requires_grad for n, p in model.named_parameters()}
        with torch.no_grad():
            engine.load(state, trainable)
    return ParallelModule(compiled, described, engine, model)
