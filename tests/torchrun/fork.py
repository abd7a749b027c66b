"""``python -m tests.torchrun.fork 4 NAME:ARGUMENT,...`` forks 4 ranks that call functions of :mod:`.workers`.

To import torch and to capture a model takes longer than what is tested: the parent does both, once, and the ranks find
the plans that it made (see :func:`remember_plans`).
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import shardfx as sx
import shardfx.api
import tests.plans
from shardfx.compile import compile_model
from shardfx.compiled import Compiled
from tests.plans import MESHES, plan
from tests.reference import Reference, single_device
from tests.zoo import Case, make

from .program_workers import WORKERS
from .workers import PLANS, gated


def remember_plans() -> None:
    """Let ``parallelize`` capture equal models with equal hints on equal meshes once; ranks inherit what is known."""
    known: dict[str, Compiled] = {}

    def compile_once(model: nn.Module, mesh: sx.Mesh, hints: sx.Hints, *rest: object) -> Compiled:
        shapes = [(n, t.shape, t.dtype) for n, t in model.state_dict().items()]
        key = repr(
            (
                type(model),
                shapes,
                model.training,
                mesh,
                hints.loss is None,
                sorted(hints.specs.items(), key=repr),
                hints.rank_passes,
            )
        )
        if key not in known:
            known[key] = compile_model(model, mesh, hints, *rest)  # type: ignore[arg-type]
        return known[key]

    shardfx.api.compile_model = compile_once  # type: ignore[assignment]
    references: dict[str, Reference] = {}

    def train_once(case: Case, steps: int = 3) -> Reference:
        return references.setdefault(case.name, references.get(case.name) or single_device(case, steps))

    tests.plans.single_device = train_once


def rank_main(rank: int, size: int, port: int, calls: list[str]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for call in calls:
        name, _, arguments = call.partition(":")
        started = time.perf_counter()
        WORKERS[name](*(arguments.split(",") if arguments else ()))
        if rank == 0:
            print(
                f"{call}: {time.perf_counter() - started:.1f} s, {time.process_time():.1f} s of CPU in all", flush=True
            )
    dist.destroy_process_group()


def main(size: int, calls: list[str]) -> int:
    torch.set_num_threads(1)
    remember_plans()
    for name, mesh in {tuple(c.partition(":")[2].split(",")[:2]) for c in calls if ":" in c and "dp2tp2" in c}:
        plan(make(name), MESHES[mesh])
        tests.plans.single_device(make(name), 3)
    if any(call in GATED for call in calls):
        for name in PLANS:
            gated(name)
    print(f"plans: {time.process_time():.1f} s of CPU", flush=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=rank_main, args=(rank, size, port, calls)) for rank in range(size)]
    for each in ranks:
        each.start()
    while any(each.is_alive() for each in ranks) and not any(each.exitcode for each in ranks):
        ranks[0].join(0.1)
    for each in ranks:
        each.join(5 if any(r.exitcode for r in ranks) else None)
        each.kill()
    return max(abs(each.exitcode or 0) for each in ranks)


GATED = (
    "evaluates_with_the_trained_weights",
    "checkpoints_move_between_plans",
    "takes_global_or_local_batches",
    "accumulates_and_scales_gradients",
)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
