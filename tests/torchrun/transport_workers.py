"""Pipelines whose stages send in one way or another (see :mod:`.workers`)."""

from __future__ import annotations

import gc
import os
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfx as sx
from shardfx.ir.program.rank_program import RankProgram
from shardfx.module import execution_target
from shardfx.runtime.distributed import process_engine
from shardfx.runtime.distributed import stage_transport as messages
from shardfx.runtime.distributed.groups import find_group
from shardfx.runtime.distributed.shm import open_groups
from tests.live_memory import check_footprint, held_in_a_step
from tests.plans import plan, train_beside
from tests.zoo import make

from .pipeline_workers import (
    PIPELINES,
    PLANS,
    WORKERS,
    Tied,
    data,
    hints_of,
    in_iterations,
    loss_of,
    pipelines_train_like_one_device,
)
from .program_workers import on_gloo
from .workers import same_state, worker

__all__ = ["WORKERS"]


@worker
def pipelines_train_on_gloo(name: str, mesh: str) -> None:
    """The same between machines, whose ranks share no memory."""
    with on_gloo():
        pipelines_train_like_one_device(name, mesh)


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
def ranks_hold_their_own_stages(name: str, weights: str) -> None:
    """Once the model is gone, what a rank holds are the weights of its own stages; behind a step no more than is
    predicted, and its own programs. Weights are rank 0's: of its model, beside which others may be on ``meta``, or of
    a state dict."""
    (x, y), (mesh, specs, more), rank = data(), PLANS[name], int(os.environ["RANK"])
    torch.manual_seed(0)
    alone = Tied().double()
    model = deepcopy(alone)
    if weights == "later" or (weights == "first" and rank):
        with torch.device("meta"):  # moved there, it would have no ties
            model = Tied().double()
    others = {id(each) for each in gc.get_objects() if type(each) is RankProgram}
    before = real_bytes({})
    own = {each.data_ptr() for each in (*model.parameters(), *model.buffers())}
    before = {place: nbytes for place, nbytes in before.items() if place not in own}
    hints = sx.Hints((x,), loss=loss_of, targets=(y,), specs=specs, zero_min_numel=0, **more)
    pm = sx.parallelize(model, mesh, hints)
    del model, own
    if weights == "later":
        whole = alone.state_dict() if rank == 0 else {n: t.to("meta") for n, t in alone.state_dict().items()}
        pm.load_full_state_dict(whole)
        del whole
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
