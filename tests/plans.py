"""Plans that tests share: the hints of a case on a mesh, the plan, and its training against one device's."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import shardfx as sx
from tests.captures import captured_once
from tests.printed import check_printed, noting_programs
from tests.reference import Reference, rel_err, single_device
from tests.zoo import Case, make

MESHES = {
    "dp2": sx.Mesh(dp=2),
    "tp2": sx.Mesh(tp=2),
    "dp2tp2": sx.Mesh(dp=2, tp=2),
    "tp4": sx.Mesh(tp=4),
    "2x2x2": sx.Mesh(dp=2, cp=2, tp=2),
    "ep2": sx.Mesh(ep=2),
    "dp2ep2": sx.Mesh(dp=2, ep=2),
}


def specs_of(case: Case, mesh: sx.Mesh, sequence: bool = False) -> dict[str, str]:
    """The case's hints on a mesh: the batch over dp, the weights over tp; with a cp axis the weights over both."""
    specs: dict[str, str] = {}
    if "dp" in mesh.names:
        named = [(f"args.{i}", t) for i, t in enumerate(case.args)]
        named += [(f"targets.{i}", t) for i, t in enumerate(case.targets)]
        named += [(f"kwargs.{k}", t) for k, t in case.kwargs.items()]
        specs.update({name: ", ".join(["dp"] + ["-"] * (t.dim() - 1)) for name, t in named})
    if "tp" in mesh.names:
        weights = dict(case.megatron_specs)
        if sequence:
            batch = "dp" if "dp" in mesh.names else "-"
            weights |= {k: batch + v[1:] for k, v in (case.sequence_specs or {}).items()}
        specs.update({k: v.replace("tp", "cp tp") if "cp" in mesh.names else v for k, v in weights.items()})
    if "ep" in mesh.names:
        specs.update(case.expert_specs)
    return specs


def stored_specs(case: Case, axis: str = "dp") -> dict[str, str]:
    """Every parameter that divides, stored sharded over a data axis."""
    size = {name: tensor.shape for name, tensor in case.model.named_parameters()}
    return {name: ", ".join([axis] + ["-"] * (len(shape) - 1)) for name, shape in size.items() if shape[0] % 2 == 0}


def plan(case: Case, mesh: sx.Mesh, sequence: bool = False, **hints: object) -> sx.ParallelModule:
    """The case, parallel."""
    given = sx.Hints(
        args=case.args,
        kwargs=case.kwargs,
        loss=case.loss,
        targets=case.targets,
        specs=specs_of(case, mesh, sequence) | dict(hints.pop("specs", {})),  # type: ignore[call-overload]
        **hints,  # type: ignore[arg-type]
    )
    with captured_once(case.name):
        return sx.parallelize(case.model, mesh, given)


@dataclass(frozen=True)
class Difference:
    """The largest relative errors of a training against one device's."""

    loss: float
    grads: float
    buffers: float
    params: float

    @property
    def worst(self) -> float:
        return max(self.loss, self.grads, self.buffers, self.params)


def train_beside(
    name: str,
    mesh: sx.Mesh,
    sequence: bool = False,
    steps: int = 3,
    **hints: object,
) -> Difference:
    """Train the case on the mesh and alone, with AdamW; says how far apart they end.

    What the engine runs is what the plan prints.
    """
    reference: Reference = single_device(make(name), steps)
    case = make(name)
    pm = plan(case, mesh, sequence, **hints)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-3, foreach=False)
    losses, grads = [], {}
    with noting_programs() as ran:
        for step in range(steps):
            optimizer.zero_grad()
            loss = pm(*case.args, *case.targets, **case.kwargs)
            loss.backward()
            losses.append(loss.item())
            if step == 0:
                grads = pm.full_grads()
            optimizer.step()
    check_printed(pm, ran)
    state = pm.full_state_dict()
    assert set(grads) == set(reference.grads)
    return Difference(
        max(rel_err(a, b) for a, b in zip(losses, reference.losses, strict=True)),
        max(rel_err(grads[k], v) for k, v in reference.grads.items()),
        max((rel_err(state[k], v) for k, v in reference.buffers.items() if k in state), default=0.0),
        max(rel_err(state[k], v) for k, v in reference.params.items()),
    )
