"""Pipelines whose stages send in one way or another (see :mod:`.workers`)."""

from __future__ import annotations

import shardfx as sx
from tests.live_memory import check_footprint, held_in_a_step
from tests.plans import plan
from tests.zoo import make

from .pipeline_workers import PIPELINES, WORKERS, in_turns, pipelines_train_like_one_device
from .program_workers import on_gloo
from .workers import worker

__all__ = ["WORKERS"]


@worker
def pipelines_train_on_gloo(name: str, mesh: str) -> None:
    """The same between machines, whose ranks share no memory."""
    with on_gloo():
        pipelines_train_like_one_device(name, mesh)


@worker
def pipelines_hold_what_is_predicted(name: str, mesh: str, schedule: str = "1f1b", how: str = "near") -> None:
    """Call by call, what was received among it, and what is received ahead; and at most."""
    case = make(name)
    if how == "gloo":
        with on_gloo():
            pipelines_hold_what_is_predicted(name, mesh, schedule)
        return
    pm = plan(case, PIPELINES[mesh], specs=in_turns(name, PIPELINES[mesh]), pipeline=sx.Pipeline(schedule=schedule))
    ((rank, held),) = held_in_a_step(pm, case).items()
    found = check_footprint(pm.rank_program(rank), held, exact=False, transport=pm._place.transport_here)
    assert pm.memory(rank).footprint.peak.nbytes == found.peak.nbytes
