"""``main(["4", "NAME:ARGUMENT,...", ...])`` forks 4 ranks that call functions of :mod:`.workers`.

To capture a model takes longer than what is tested: the parent does it, once, and the ranks find the plans that it
made (see :func:`remember_plans`).
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import socket
import time
from dataclasses import fields, replace
from typing import Any

import torch.distributed as dist
from torch import nn

import shardfx as sx
import shardfx.api
import tests.plans
from shardfx.compile import Compiled, compile_model
from shardfx.ir.capture.frontend.dynamo import DynamoTrace
from shardfx.ir.capture.model_and_loss import leaf_names
from shardfx.ir.rules.book import RuleBook
from tests.deep import CHUNKS
from tests.plans import MESHES, plan, stored_specs
from tests.reference import Reference, single_device
from tests.zoo import Case, make

from . import (  # noqa: F401
    agreement_workers,
    call_workers,
    optimizer_workers,
    pipeline_workers,
    scene_workers,
)
from .pipeline_workers import WORKERS
from .workers import PLANS, gated


def leaf_shapes(hints: sx.Hints) -> list[object]:
    """The shapes of example inputs."""
    leaves = leaf_names(hints.args, hints.kwargs, hints.targets)
    return [(name, getattr(leaf, "shape", leaf), getattr(leaf, "requires_grad", False)) for name, leaf in leaves]


GIVEN = ("args", "kwargs", "targets", "loss", "specs", "check_inputs")
"""Hints that are compared otherwise, or change no plan."""
OTHERS = tuple(each.name for each in fields(sx.Hints) if each.name not in GIVEN)
"""Hints that are equal where their texts are, in one process."""


def remember_plans() -> None:
    """Let ``parallelize`` capture equal models with equal hints on equal meshes once; ranks inherit what is known."""
    known: dict[str, Compiled] = {}

    def compile_once(
        model: nn.Module,
        mesh: sx.Mesh,
        hints: sx.Hints,
        rules: RuleBook,
        on_pass: Any = None,
        found: DynamoTrace | None = None,
    ) -> Compiled:
        shapes = [(n, t.shape, t.dtype) for n, t in model.state_dict().items()]
        key = repr(
            (
                type(model),
                shapes,
                model.training,
                mesh,
                hints.loss is None,
                leaf_shapes(hints),
                sorted(hints.specs.items(), key=repr),
                [getattr(hints, name) for name in OTHERS],
            )
        )
        if key not in known or (found is not None and found.keeps):
            known[key] = compile_model(model, mesh, hints, rules, on_pass, found)
        return replace(known[key], captured=replace(known[key].captured, trace=found))

    shardfx.api.compile_model = compile_once  # type: ignore[assignment]
    references: dict[str, Reference] = {}

    def train_once(case: Case, steps: int = 3) -> Reference:
        return references.setdefault(case.name, references.get(case.name) or single_device(case, steps))

    tests.plans.single_device = train_once


STUCK = 60.0
"""After so many seconds ranks print where they are."""


def rank_main(rank: int, size: int, port: int, calls: list[str]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    faulthandler.dump_traceback_later(STUCK, repeat=True)
    for call in calls:
        name, _, arguments = call.partition(":")
        started = time.perf_counter()
        WORKERS[name](*(arguments.split(",") if arguments else ()))
        if rank == 0:
            print(
                f"{call}: {time.perf_counter() - started:.1f} s, {time.process_time():.1f} s of CPU in all", flush=True
            )
    dist.destroy_process_group()


def prepare(worker: str, arguments: list[str]) -> None:
    """Make what the ranks will ask for."""
    name, mesh, *more = arguments
    case = make(name)
    plan(case, MESHES[mesh], specs=stored_specs(case) if "stored" in more else {})
    if worker == "trains_like_one_device":
        tests.plans.single_device(case, 3)


def main(arguments: list[str]) -> int:
    size, calls = int(arguments[0]), arguments[1:]
    remember_plans()
    for call in calls:
        worker, _, given = call.partition(":")
        if len(given.split(",")) > 1 and given.split(",")[1] in MESHES:
            prepare(worker, given.split(","))
        if worker in pipeline_workers.PREPARED:
            pipeline_workers.prepare(worker, given.split(","))
        for schedule in filter(CHUNKS.__contains__, given.split(",")):
            pipeline_workers.staged(schedule)
    if any(call.partition(":")[0] in GATED for call in calls):
        for name in PLANS:
            gated(name)
    if any(call.partition(":")[0] in call_workers.PREPARED for call in calls):
        call_workers.prepare()
    if any(call.partition(":")[0] not in WORKERS for call in calls):
        importlib.import_module("tests.torchrun.script_workers").prepare(calls)  # whose imports take seconds
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
    "checkpoints_move_between_plans",
    "takes_global_or_local_batches",
    "accumulates_and_scales_gradients",
    "torchs_optimizers_step_shards",
    "other_optimizers_step_what_is_shown",
    "steps_among_others",
    "modules_and_state_dicts_are_copied",
)
