"""Every schedule on real ranks, as programs are written and through ``torch.compile`` (see :mod:`.workers`)."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import shardfx as sx
from tests.deep import AGAIN, CHUNKS, alone, deep, in_stages, worst
from tests.zoo import Case

from .pipeline_workers import WORKERS
from .program_workers import on_gloo
from .workers import same_state, worker

__all__ = ["WORKERS"]

MESHES = {
    "pp2": sx.Mesh(pp=2, mb=sx.Loop(5)),
    "pp4": sx.Mesh(pp=4, mb=sx.Loop(9)),
    "pp2dp2": sx.Mesh(pp=2, dp=2, mb=sx.Loop(5)),
    "dp2pp2": sx.Mesh(dp=2, pp=2, mb=sx.Loop(5)),
    "pp2tp2": sx.Mesh(pp=2, tp=2, mb=sx.Loop(5)),
}
"""Iterations are no multiple of the stages' ranks."""
HOW: dict[str, dict[str, Any]] = {
    "": {},
    "zero3": {"zero": 3, "zero_min_numel": 0},
    "zero1": {"zero": 1, "zero_min_numel": 0},
    "recompute": {},
    "zero3 recompute": {"zero": 3, "zero_min_numel": 0},
}


def staged(name: str, mesh: str, how: str, schedule: str) -> tuple[Case, sx.ParallelModule]:
    """A model by a schedule; the batch is no multiple of the iterations."""
    over, chunks = MESHES[mesh], CHUNKS[schedule]
    iterations = over["mb"].size
    case = deep(name, over["pp"].size * chunks, iterations, over["dp"].size if "dp" in over.names else 1)
    again = {"recompute": AGAIN[name]} if "recompute" in how else {}
    return case, in_stages(
        case, over, pipeline=sx.Pipeline(schedule=schedule, stages_per_rank=chunks), **HOW[how], **again
    )


@worker
def stages_are_the_whole_batch(name: str, mesh: str, how: str, *schedules: str) -> None:
    """Loss, gradients and buffers are one device's."""
    for schedule in schedules:
        case, pm = staged(name, mesh, how, schedule)
        assert dist.get_world_size() == MESHES[mesh].size
        assert worst(pm, case, alone(case, MESHES[mesh]["mb"].size)) < 1e-9, (name, mesh, how, schedule)


@worker
def compiled_stages_are_the_same(backend: str, name: str, mesh: str, how: str, *schedules: str) -> None:
    """Through ``torch.compile``, in three steps and an evaluation."""
    for schedule in schedules:
        case, pm = staged(name, mesh, how, schedule)
        found = alone(case, MESHES[mesh]["mb"].size)
        before = {key: value.clone() for key, value in pm.state_dict().items()}
        pm.compile(backend=backend)
        for _ in range(3):
            pm.load_state_dict(before)
            pm.zero_grad()
            assert worst(pm, case, found) < 1e-9, (backend, name, mesh, how, schedule)
        with torch.no_grad():
            loss = pm(*case.args, *case.targets, **case.kwargs)
        assert abs(loss.item() - found.loss) < 1e-9 * abs(found.loss), (backend, name, mesh, how, schedule)


@worker
def compiled_stages_on_gloo(backend: str, name: str, mesh: str, how: str, *schedules: str) -> None:
    """The same between machines, whose ranks share no memory: what is sent waits until it is received."""
    with on_gloo():
        compiled_stages_are_the_same(backend, name, mesh, how, *schedules)


@worker
def compiled_steps_are_the_same(backend: str, mesh: str, how: str, schedule: str) -> None:
    """With the optimizer in the program, and recorded meanwhile."""
    case, _ = staged("mlp", mesh, how, schedule)
    model, x, y = deepcopy(case.model), *case.args, *case.targets
    optimizer = {"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9), "clip_grad_norm": 0.5}
    pipeline = sx.Pipeline(schedule=schedule, stages_per_rank=CHUNKS[schedule])
    pm = in_stages(case, MESHES[mesh], pipeline=pipeline, **HOW[how], **optimizer)
    pm.compile(backend=backend)
    theirs = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        theirs.zero_grad()
        loss = case.loss(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        theirs.step()
        assert abs(pm.step(x, y).item() - loss.item()) < 1e-9
    same_state(pm.full_state_dict(), model.state_dict(), 1e-9)


def prepare(worker: str, given: Sequence[str]) -> None:
    """Plan once for all ranks that are forked."""
    name, mesh, how, *schedules = given[1:] if worker.startswith("compiled") else given
    for schedule in schedules:
        staged(name, mesh, how, schedule)


PREPARED = ("stages_are_the_whole_batch", "compiled_stages_are_the_same", "compiled_stages_on_gloo")
