"""Pipelines on real ranks (see :mod:`.workers`)."""

from __future__ import annotations

import gc
import os
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
from shardfx.ir.program.rank_program import RankProgram
from shardfx.module import execution_target
from shardfx.runtime.distributed import process_engine
from shardfx.runtime.distributed import stage_transport as messages
from shardfx.runtime.distributed.groups import find_group
from shardfx.runtime.distributed.shm import open_groups
from tests.deep import CHUNKS, alone, deep, in_stages, worst
from tests.live_memory import check_footprint, held_in_a_step
from tests.plans import plan, specs_of, train_beside
from tests.reference import rel_err
from tests.zoo import Case, make

from .program_workers import on_gloo
from .step_workers import WORKERS
from .workers import same_state, worker

__all__ = ["WORKERS"]

PIPELINES = {
    "pp2": sx.Mesh(pp=2, mb=sx.Loop(4)),
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
    for number, state in theirs.state_dict()["state"].items():
        same_state(whole["state"][number], state, 1e-10)


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


# ---- how stages send, and what they hold


@worker
def pipelines_train_by_stream(name: str, mesh: str, schedule: str = "1f1b") -> None:
    """As on NCCL: messages without tags, in groups for each direction, in the order of the programs."""
    with on_gloo(), pytest.MonkeyPatch.context() as patch:
        for module in (process_engine, execution_target):
            patch.setattr(module, "by_stream", lambda device: True)
        hints = hints_of(name, mesh) | {"pipeline": sx.Pipeline(schedule=schedule)}
        difference = train_beside(name, PIPELINES[mesh], **hints)
        assert difference.worst < 1e-9, difference
        assert find_group(f"{PIPELINES[mesh].group_name(dist.get_rank(), ['pp'])}{messages.BACK}") is not None


@worker
def pipelines_hold_what_is_predicted(name: str, mesh: str, schedule: str = "1f1b", how: str = "near") -> None:
    """Call by call, what was received among it, and what is received ahead; and at most."""
    case = make(name)
    if how == "gloo":
        with on_gloo():
            pipelines_hold_what_is_predicted(name, mesh, schedule)
        return
    pm = plan(
        case, PIPELINES[mesh], specs=in_iterations(name, PIPELINES[mesh]), pipeline=sx.Pipeline(schedule=schedule)
    )
    ((rank, held),) = held_in_a_step(pm, case).items()
    found = check_footprint(pm.rank_program(rank), held, exact=False, ahead=pm._target.ahead_here)
    assert pm.memory(rank).footprint.peak.nbytes == found.peak.nbytes


def real_bytes(besides: dict[int, int]) -> dict[int, int]:
    """The bytes of the storages of all tensors that there are, but for some; what has no content counts none."""
    gc.collect()
    there = [each.untyped_storage() for each in gc.get_objects() if type(each) in (Tensor, torch.nn.Parameter)]
    found = {storage.data_ptr(): storage.nbytes() for storage in there if storage.device.type == "cpu"}
    carried = {each.data_ptr() for group in open_groups for each in group.memory}
    return {place: nbytes for place, nbytes in found.items() if place and place not in {*besides, *carried}}


@worker
def ranks_hold_their_own_stages(name: str) -> None:
    """Once the model is gone, what a rank holds are the weights of its own stages; behind a step no more than is
    predicted, and its own programs. Weights are those of rank 0's model, beside which others are on ``meta``."""
    (x, y), (mesh, specs, more), rank = data(), PLANS[name], int(os.environ["RANK"])
    torch.manual_seed(0)
    alone = Tied().double()
    model = deepcopy(alone)
    if rank:
        with torch.device("meta"):  # moved there, it would have no ties
            model = Tied().double()
    others = {id(each) for each in gc.get_objects() if type(each) is RankProgram}
    before = real_bytes({})
    own = {each.data_ptr() for each in (*model.parameters(), *model.buffers())}
    before = {place: nbytes for place, nbytes in before.items() if place not in own}
    hints = sx.Hints((x,), loss=loss_of, targets=(y,), specs=specs, zero_min_numel=0, **more)
    pm = sx.parallelize(model, mesh, hints)
    del model, own
    stored = [pm.planned.input(n) for n in (*pm._state.store.parameters, *pm._state.store.buffers)]
    assert all(pm.planned.is_here(given.at, mesh.coords(rank)) for given in stored)
    expected = sum(given.value.local_bytes(mesh) for given in stored)
    every = sum(each.nbytes for each in (*alone.parameters(), *alone.buffers()))
    held = sum(real_bytes(before).values())
    assert expected <= held <= expected + 64, (held, expected)
    assert held < 0.9 * every, (held, every)
    pm(x, y).backward()
    assert sum(real_bytes(before).values()) <= pm.memory(rank).peak + 4 * 64
    made = {each.rank for each in gc.get_objects() if type(each) is RankProgram and id(each) not in others}
    assert made == {rank}, made
    loss_of(alone(x), y).backward()
    same_state(pm.full_grads(), {n: p.grad for n, p in alone.named_parameters()}, 1e-10)  # type: ignore[misc]


# ---- every schedule, and programs through torch.compile

MESH = sx.Mesh(pp=2, mb=sx.Loop(5))
"""Iterations are no multiple of the stages' ranks."""


def staged(schedule: str) -> tuple[Case, sx.ParallelModule]:
    """A model by a schedule; the batch is no multiple of the iterations."""
    chunks = CHUNKS[schedule]
    case = deep("mlp", 2 * chunks, 5, 1)
    return case, in_stages(case, MESH, pipeline=sx.Pipeline(schedule=schedule, stages_per_rank=chunks))


@worker
def stages_are_the_whole_batch(*schedules: str) -> None:
    """Loss, gradients and buffers are one device's."""
    for schedule in schedules:
        case, pm = staged(schedule)
        assert worst(pm, case, alone(case, 5)) < 1e-9, schedule


@worker
def compiled_stages_on_gloo(backend: str, schedule: str) -> None:
    """Through ``torch.compile``, in three steps and an evaluation; between machines, whose ranks share no memory: what
    is sent waits until it is received."""
    case, pm = staged(schedule)
    found = alone(case, 5)
    with on_gloo():
        before = {key: value.clone() for key, value in pm.state_dict().items()}
        pm.compile(backend=backend)
        for _ in range(3):
            pm.load_state_dict(before)
            pm.zero_grad()
            assert worst(pm, case, found) < 1e-9, (backend, schedule)
        with torch.no_grad():
            loss = pm(*case.args, *case.targets, **case.kwargs)
        assert abs(loss.item() - found.loss) < 1e-9 * abs(found.loss), (backend, schedule)
