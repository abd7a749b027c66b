"""Pipelines on real ranks (see :mod:`.workers`)."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import shardfx as sx
import tests.plans
from tests.plans import plan, specs_of, train_beside
from tests.reference import rel_err
from tests.zoo import make

from .step_workers import WORKERS
from .workers import same_state, worker

__all__ = ["WORKERS"]

PIPELINES = {
    "pp2": sx.Mesh(pp=2, mb=sx.Loop(4)),
    "pp4": sx.Mesh(pp=4, mb=sx.Loop(4)),
    "pp2dp2": sx.Mesh(pp=2, dp=2, mb=sx.Loop(2)),
    "pp2tp2": sx.Mesh(pp=2, tp=2, mb=sx.Loop(2)),
    "dp2pp2": sx.Mesh(dp=2, pp=2, mb=sx.Loop(2)),
}


def in_iterations(name: str, mesh: sx.Mesh) -> dict[str, str]:
    """The batch of a case in iterations, before the ranks sharding it."""
    case = make(name)
    named = [(f"args.{i}", t) for i, t in enumerate(case.args)]
    named += [(f"targets.{i}", t) for i, t in enumerate(case.targets)]
    rows = "mb dp" if "dp" in mesh.names else "mb"
    return specs_of(case, mesh) | {name: ", ".join([rows, *["-"] * (t.dim() - 1)]) for name, t in named}


def hints_of(name: str, mesh: str, zero: str = "0") -> dict[str, Any]:
    """The hints of a case on one of these meshes."""
    return {
        "specs": in_iterations(name, PIPELINES[mesh]),
        "pipeline": sx.Pipeline(),
        "zero": int(zero),
        "zero_min_numel": 0,
    }


@worker
def pipelines_train_like_one_device(name: str, mesh: str, zero: str = "0") -> None:
    """Loss, gradients, buffers, and parameters after three steps of AdamW."""
    difference = train_beside(name, PIPELINES[mesh], **hints_of(name, mesh, zero))
    assert dist.get_world_size() == PIPELINES[mesh].size
    assert difference.worst < 1e-9, difference


@worker
def interleaved_iterations_train_like_one_device(name: str) -> None:
    """Collectives of two iterations are under way at once."""
    mesh = sx.Mesh(mb=sx.Loop(2, interleave=True), tp=dist.get_world_size())
    difference = train_beside(name, mesh, specs=in_iterations(name, mesh))
    assert difference.worst < 1e-9, difference


# ---- a small model: a tied embedding, a buffer that all blocks use, a skip over all stages


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + torch.tanh(self.fc(self.norm(x))) * scale


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(Block(8) for _ in range(4))
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))

    def forward(self, tokens: Tensor) -> Tensor:
        first = x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x, self.scale)
        return self.head(x + first)


def loss_of(out: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), labels.flatten())


PLANS: dict[str, tuple[sx.Mesh, dict[str, str], dict[str, Any]]] = {
    "dp2": (sx.Mesh(dp=2), {"args.0": "dp, -", "targets.0": "dp, -"}, {"zero": 3}),
    "pp2": (sx.Mesh(pp=2, mb=sx.Loop(4)), {"args.0": "mb, -", "targets.0": "mb, -"}, {"pipeline": sx.Pipeline()}),
    "pp2uneven": (
        sx.Mesh(pp=2, mb=sx.Loop(2)),
        {"args.0": "mb, -", "targets.0": "mb, -"},
        {"pipeline": sx.Pipeline(stages=(1, 3))},
    ),
    "pp2chunks": (
        sx.Mesh(pp=2, mb=sx.Loop(2)),
        {"args.0": "mb, -", "targets.0": "mb, -"},
        {"pipeline": sx.Pipeline(schedule="interleaved", stages_per_rank=2)},
    ),
    "pp4": (sx.Mesh(pp=4, mb=sx.Loop(4)), {"args.0": "mb, -", "targets.0": "mb, -"}, {"pipeline": sx.Pipeline()}),
    "pp2dp2": (
        sx.Mesh(pp=2, dp=2, mb=sx.Loop(2)),
        {"args.0": "mb dp, -", "targets.0": "mb dp, -"},
        {"pipeline": sx.Pipeline(), "zero": 3},
    ),
    "dp4": (sx.Mesh(dp=4), {"args.0": "dp, -", "targets.0": "dp, -"}, {}),
}


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randint(12, (2, 8, 5), generator=generator).unbind()
    return x, y


def tied(name: str, seed: int = 0, **hints: Any) -> tuple[nn.Module, sx.ParallelModule]:
    torch.manual_seed(seed)
    model, (x, y), (mesh, specs, more) = Tied().double(), data(), PLANS[name]
    given = sx.Hints((x,), loss=loss_of, targets=(y,), specs=specs, zero_min_numel=0, **more, **hints)
    return model, sx.parallelize(model, mesh, given)


def trained(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int, clip_grad_norm: Any) -> list[float]:
    losses, (x, y) = [], data()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = module(x, y) if isinstance(module, sx.ParallelModule) else loss_of(module(x), y)
        loss.backward()
        losses.append(float(clip_grad_norm(module)))
        optimizer.step()
        losses.append(loss.item())
    return losses


def torchs_clip(module: nn.Module) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)


def our_clip(module: nn.Module) -> Tensor:
    return module.clip_grad_norm_(0.5) if isinstance(module, sx.ParallelModule) else torchs_clip(module)


@worker
def pipelines_serve_torchs_tools(name: str) -> None:
    """Norms are those of the whole model; optimizers have states of this rank's parameters, and give the whole."""
    model, pm = tied(name)
    alone = deepcopy(model)
    mine, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (pm, alone))
    for clip in (torchs_clip, our_clip):
        for a, b in zip(trained(pm, mine, 2, clip), trained(alone, theirs, 2, clip), strict=True):
            assert rel_err(a, b) < 1e-11, (clip, a, b)
    same_state(pm.full_state_dict(), alone.state_dict(), 1e-10)
    same_state(pm.full_grads(), {n: p.grad for n, p in alone.named_parameters()}, 1e-10)  # type: ignore[misc]
    here = [parameter_name for parameter_name, _ in pm.named_parameters()]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, here)
    assert {n for names in every for n in names} == {n for n, _ in alone.named_parameters()}
    assert all(len(names) < len(list(alone.parameters())) for names in every), every
    whole, expected = pm.full_optimizer_state_dict(mine), theirs.state_dict()
    assert whole["param_groups"][0]["params"] == expected["param_groups"][0]["params"]
    for number, state in expected["state"].items():
        same_state(whole["state"][number], state, 1e-10)
    other, again = tied(name, seed=1)
    del other
    again.load_full_state_dict(alone.state_dict())
    optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
    again.load_full_optimizer_state_dict(optimizer, expected)
    carried = sx.parallelize(alone, PLANS[name][0], pm._compiled.hints, optimizer=(moved := deepcopied(theirs, alone)))
    losses = trained(alone, theirs, 2, our_clip)
    for module, its in ((again, optimizer), (carried, moved)):
        for a, b in zip(trained(module, its, 2, our_clip), losses, strict=True):
            assert rel_err(a, b) < 1e-10, (module, a, b)


def deepcopied(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    made = torch.optim.AdamW(model.parameters(), lr=1e-2)
    made.load_state_dict(deepcopy(optimizer.state_dict()))
    return made


@worker
def pipelines_are_called_in_other_forms(name: str) -> None:
    """Evaluation, results with gradients, another batch, whole weights; the stages stay where they are."""
    model, pm = tied(name)
    (x, y), alone = data(), deepcopy(model)
    with torch.no_grad():
        assert rel_err(pm(x), alone(x)) < 1e-12
        assert rel_err(pm(x[:4], y[:4]), loss_of(alone(x[:4]), y[:4])) < 1e-12
    (pm(x) ** 2).mean().backward()
    (alone(x) ** 2).mean().backward()
    same_state(pm.full_grads(), {n: p.grad for n, p in alone.named_parameters()}, 1e-10)  # type: ignore[misc]
    pm.zero_grad(), alone.zero_grad()
    loss, out = pm(x, y, with_results=True)
    loss.backward()
    assert rel_err(out, alone(x)) < 1e-12
    loss_of(alone(x), y).backward()
    same_state(pm.full_grads(), {n: p.grad for n, p in alone.named_parameters()}, 1e-10)  # type: ignore[misc]
    with pm.gathered() as whole, torch.no_grad():
        assert rel_err(whole(x), alone(x)) < 1e-12
    pm.eval()
    with torch.no_grad():
        assert rel_err(pm(x, y), loss_of(alone(x), y)) < 1e-12
    held = {key: value.clone() for key, value in pm.state_dict().items()}
    with torch.no_grad():
        for parameter in pm.parameters():
            parameter.zero_()
    pm.load_state_dict(held)
    same_state(pm.full_state_dict(), alone.state_dict(), 1e-12)
    assert pm.verify()
    for parameter_name, parameter in pm.named_parameters():
        parameter.requires_grad_(parameter_name != "layers.3.fc.weight")
    with pytest.raises(sx.Error, match=r"gradient of layers\.3\.fc\.weight"):
        pm(x, y)


@worker
def pipelines_give_inputs_gradients() -> None:
    """Also to a rank whose stage does not use them; and a stage may have nothing to train."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)]).double()
    x, y = torch.randn(2, 8, 6).double().unbind()
    for wants in (True, False):
        x = x.detach().requires_grad_(wants)
        rows = {"args.0": "mb, -", "targets.0": "mb, -"}
        hints = sx.Hints((x,), loss=F.mse_loss, targets=(y,), specs=rows, pipeline=sx.Pipeline())
        pm = sx.parallelize(model, sx.Mesh(pp=2, mb=sx.Loop(2)), hints)
        pm(x, y).backward()
        mine, x.grad = x.grad, None
        F.mse_loss(model(x), y).backward()
        expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        same_state(pm.full_grads(), expected, 1e-12)
        assert mine is None if x.grad is None else rel_err(mine, x.grad) < 1e-12
        if training := [p for p in pm.parameters() if p.requires_grad]:
            torch.optim.SGD(training, lr=0.0).step()
        pm(x, y)
        model.zero_grad()
        model[2:].requires_grad_(False)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


STEPPED: dict[str, Any] = {"optimizer": adamw, "clip_grad_norm": 0.5}


@worker
def pipelines_step_like_one_device(name: str) -> None:
    """With the optimizer in the program, and its states saved whole."""
    model, pm = tied(name, **STEPPED)
    (x, y), alone = data(), deepcopy(model)
    theirs = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    losses = trained(alone, theirs, 3, torchs_clip)[1::2]
    assert max(rel_err(pm.step(x, y), loss) for loss in losses) < 1e-11
    same_state(pm.full_state_dict(), alone.state_dict(), 1e-10)
    whole = pm.optimizer.full_state_dict()
    names = [n for n, _ in alone.named_parameters()]
    for number, state in theirs.state_dict()["state"].items():
        same_state(whole["state"][names[number]], state, 1e-10)


# ---- what the parent of all ranks does for them


PREPARED = (
    "pipelines_train_like_one_device",
    "pipelines_serve_torchs_tools",
    "pipelines_step_like_one_device",
    "checkpoints_move_between_pipelines",
)


def prepare(worker: str, given: Sequence[str]) -> None:
    """Plan, and train alone, once for all ranks that are forked."""
    if worker == "pipelines_train_like_one_device":
        name, mesh, *zero = given
        plan(make(name), PIPELINES[mesh], **hints_of(name, mesh, *zero))
        tests.plans.single_device(make(name), 3)
    else:
        for name in filter(PLANS.__contains__, given):
            tied(name, **(STEPPED if worker == "pipelines_step_like_one_device" else {}))


# ---- checkpoints


@worker
def checkpoints_move_between_pipelines(folder: str, *names: str) -> None:
    """Train on one plan, save with DCP, load into each other one: parameters, buffers, and AdamW's states."""
    for source in names:
        _, pm = tied(source)
        mine = torch.optim.AdamW(pm.parameters(), lr=1e-2)
        trained(pm, mine, 2, our_clip)
        held, moments = get_state_dict(pm, mine)
        dcp.save({"model": held, "optimizer": moments}, checkpoint_id=f"{folder}/{source}")
        for target in names:
            _, other = tied(target, seed=1)
            optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
            held, moments = get_state_dict(other, optimizer)
            dcp.load({"model": held, "optimizer": moments}, checkpoint_id=f"{folder}/{source}")
            set_state_dict(other, optimizer, model_state_dict=held, optim_state_dict=moments)
            same_state(other.full_state_dict(), pm.full_state_dict(), 0.0)
            whole, old = other.full_optimizer_state_dict(optimizer), pm.full_optimizer_state_dict(mine)
            assert whole["state"].keys() == old["state"].keys()
            for number, state in old["state"].items():
                same_state(whole["state"][number], state, 0.0)


@worker
def program_states_move_between_pipelines(folder: str, *names: str) -> None:
    """The same with the optimizer in the program: by DCP, and whole."""
    factory = {"optimizer": adamw}
    x, y = data()
    for source in names:
        _, pm = tied(source, **factory)
        pm.step(x, y)
        kept = {"model": pm.state_dict(), "optimizer": pm.optimizer.state_dict()["state"]}
        dcp.save(kept, checkpoint_id=f"{folder}/{source}")
        weights, whole = pm.full_state_dict(), pm.optimizer.full_state_dict()
        losses = [pm.step(x, y).item() for _ in range(2)]
        for target in names:
            for how in ("dcp", "whole"):
                _, other = tied(target, seed=1, **factory)
                if how == "whole":
                    other.load_full_state_dict(weights)
                    other.optimizer.load_full_state_dict(whole)
                else:
                    held = {"model": other.state_dict(), "optimizer": other.optimizer.state_dict()["state"]}
                    dcp.load(held, checkpoint_id=f"{folder}/{source}")
                    other.load_state_dict(held["model"])
                again = [other.step(x, y).item() for _ in range(2)]
                assert max(map(rel_err, again, losses)) < 1e-11, (source, target, how, again, losses)
