"""Pipelines on real ranks (see :mod:`.workers`)."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

import shardfx as sx
import tests.plans
from tests.plans import plan, specs_of, train_beside
from tests.zoo import make

from .step_workers import WORKERS
from .workers import worker

__all__ = ["WORKERS"]

PIPELINES = {
    "pp2": sx.Mesh(pp=2, mb=sx.Time(4)),
    "pp4": sx.Mesh(pp=4, mb=sx.Time(4)),
    "pp2dp2": sx.Mesh(pp=2, dp=2, mb=sx.Time(2)),
    "pp2tp2": sx.Mesh(pp=2, tp=2, mb=sx.Time(2)),
    "dp2pp2": sx.Mesh(dp=2, pp=2, mb=sx.Time(2)),
}


def in_turns(name: str, mesh: sx.Mesh) -> dict[str, str]:
    """The batch of a case in turns, before the ranks cut it."""
    case = make(name)
    named = [(f"args.{i}", t) for i, t in enumerate(case.args)]
    named += [(f"targets.{i}", t) for i, t in enumerate(case.targets)]
    rows = "mb dp" if "dp" in mesh.names else "mb"
    return specs_of(case, mesh) | {name: ", ".join([rows, *["-"] * (t.dim() - 1)]) for name, t in named}


def hints_of(name: str, mesh: str, zero: str = "0") -> dict[str, Any]:
    """The hints of a case on one of these meshes."""
    return {"specs": in_turns(name, PIPELINES[mesh]), "pipeline": sx.Pipeline(), "zero": int(zero), "zero_min": 0}


def prepare(name: str, mesh: str, zero: str = "0") -> None:
    """Plan and train alone, once for all ranks that are forked."""
    plan(make(name), PIPELINES[mesh], **hints_of(name, mesh, zero))
    tests.plans.single_device(make(name), 3)


@worker
def pipelines_train_like_one_device(name: str, mesh: str, zero: str = "0") -> None:
    """Loss, gradients, buffers, and parameters after three steps of AdamW."""
    difference = train_beside(name, PIPELINES[mesh], **hints_of(name, mesh, zero))
    assert dist.get_world_size() == PIPELINES[mesh].size
    assert difference.worst < 1e-9, difference
