"""Predicted steps of pipelines compared with measured ones, on 2 gloo ranks of this host: ``pm.timeline()`` on the
machine by ``sx.Machine.measure()``.

    python -m benchmarks.timeline [--dim 128 --layers 4 --microbatches 4 --rounds 15 --only gpipe 1f1b zb-h1]

Steps are forward and backward of all micro-batches, without an update. The prediction is compared with the wall clock,
median and minimum, which agrees where each rank has a core for itself; and elsewhere *by work*: the CPU time of each
action in the median step (copies for sends included, waits excluded), arranged by the schedule, and the time around
actions. Exits with 1 where the prediction is more than 15 % off the latter.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

import shardfx as sx
from shardfx.ir.cost.amounts import Cost, Work
from shardfx.ir.cost.curve import Curve
from shardfx.ir.cost.replay import replay
from shardfx.ir.graph import Input
from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.timing.rank_tasks import RankTask, rank_tasks
from shardfx.ir.timing.simulate import simulate_ranks

from .contenders import RANKS, Contender, Times, size_of, sized, take_iterations, with_ranks
from .models import GPT, Size, next_token

CHUNKS = {"interleaved": 2}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")
AIM, LOOKED_AT = 0.15, 15
LOOK = 7e-7
"""Seconds that the probe of a call takes."""


def planned(
    model: GPT, schedule: str, microbatches: int, machine: sx.Machine, x: Tensor, y: Tensor
) -> sx.ParallelModule:
    """The plan of a schedule for a machine: as many blocks in each stage."""
    chunks = CHUNKS.get(schedule, 1)
    each = len(model.layers) // (RANKS * chunks)
    hints = sx.Hints(
        args=(x,),
        loss=next_token,
        targets=(y,),
        specs={"args.0": "mb, -", "targets.0": "mb, -"},
        machine=machine,
        pipeline=sx.Pipeline(schedule=schedule, stages_per_rank=chunks, stages=(each,) * (RANKS * chunks)),
    )
    return sx.parallelize(model, sx.Mesh(pp=RANKS, mb=sx.Loop(microbatches)), hints)


def step_of(pm: sx.ParallelModule, x: Tensor, y: Tensor) -> Contender:
    """The module, and its step."""
    return pm, lambda: pm(x, y)


class CpuTimeProbe:
    """A probe that accumulates the CPU seconds of each call of this rank, over all micro-batches of a step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._last = 0.0

    def watch(self, rank: int) -> CpuTimeProbe:
        self.steps.append(defaultdict(float))
        return self

    def inputs(self, inputs: Sequence[Input], tensors: Sequence[Tensor]) -> None:
        self._last = time.thread_time()

    def __call__(self, node: fx.Node, result: Any, operands: tuple[Any, ...]) -> None:
        now = time.thread_time()
        self.steps[-1][node.name] += now - self._last - LOOK
        self._last = now


def by_work(pm: sx.ParallelModule, x: Tensor, y: Tensor) -> float:
    """Seconds of a step by work, on rank 0; called by all ranks."""
    watch, plain = CpuTimeProbe(), list[float]()
    for number in range(2 * LOOKED_AT):
        dist.barrier()
        pm._watch = watch if number % 2 else None
        pm.zero_grad(set_to_none=True)
        started = time.thread_time()
        pm(x, y).backward()
        if pm._watch is None:
            plain.append(time.thread_time() - started)
    pm._watch = None
    step = statistics.median(plain)
    calls = {name: max(statistics.median(each[name] for each in watch.steps), 0.0) for name in watch.steps[0]}
    every: list[Any] = [None] * RANKS
    dist.all_gather_object(every, (calls, step - sum(calls.values())))
    if dist.get_rank():
        return 0.0
    courses = simulate_ranks([tasks_by_seconds(pm, rank, seconds) for rank, (seconds, _) in enumerate(every)])
    around = max(0.0, *(each for _, each in every))
    return max(span.end for course in courses for span in course.spans.values()) + around


def tasks_by_seconds(pm: sx.ParallelModule, rank: int, seconds: Mapping[str, float]) -> list[RankTask]:
    """The tasks of a rank, given the seconds of its calls in a step: each is a kind of its own."""
    program = pm.rank_program(rank)
    footprint = replay(program)
    messages = [call for call in footprint.calls if (row := row_of(call.target)) is not None and row.message == "sends"]
    waits = [call for call in footprint.calls if (row := row_of(call.target)) is not None and row.waits]
    sent = sum(seconds[each.name] for each in (*messages, *waits)) / (len(messages) + len(waits))
    costs = [Cost({Work(0.0, 1.0, kind=call.name): 1}) for call in footprint.calls]
    kinds = {call.name: Curve(((1.0, seconds.get(call.name, 0.0)),)) for call in footprint.calls}
    machine = replace(sx.Machine.load("cpu-laptop"), curves=kinds, hides=False)
    assert pm.planned.pipeline is not None and pm.schedule is not None
    link = sx.Link(1e30, 2 * sent / len(pm.schedule.microbatches))  # to copy out, and in
    mesh = pm.planned.mesh.with_links({pm.planned.pipeline.axis: link})
    return rank_tasks(program, replace(footprint, costs=tuple(costs)), machine, mesh)


def rank_main(rank: int, size: Size, microbatches: int, rounds: int, steps: int, only: list[str], ends: Any) -> None:
    torch.manual_seed(0)
    model = GPT(size)
    x, y = torch.randint(size.vocab, (2, size.batch, size.length)).unbind()
    machine = sx.Machine.measure("cpu")
    plans = {name: planned(model, name, microbatches, machine, x, y) for name in only}
    times = take_iterations({name: step_of(pm, x, y) for name, pm in plans.items()}, rounds, steps)
    worked = {name: by_work(pm, x, y) for name, pm in plans.items()}
    again = sx.Machine.measure("cpu")
    if rank == 0:
        ends.put([report(name, pm, again, times[name], worked[name]) for name, pm in plans.items()])


def report(name: str, pm: sx.ParallelModule, again: sx.Machine, times: Times, worked: float) -> bool:
    """Whether the prediction is within the aim."""
    first, second = (pm.timeline(each).step * 1e3 for each in (None, again))
    step, by_work = (first + second) / 2, worked * 1e3
    median, least = statistics.median(times.clock), min(times.clock)
    said = f"predicted {step:6.1f} ms ({first:.1f} before, {second:.1f} behind)   by work {by_work:6.1f}"
    print(f"{name:12} {said}: {step / by_work:.2f} of it   by the clock {median:6.1f}, least {least:6.1f}")
    return abs(step / by_work - 1) <= AIM


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    sized(parser, dim=128)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=2, help="steps of a schedule in a round")
    parser.add_argument("--only", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    given = vars(parser.parse_args())
    ends = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with_ranks(rank_main, size_of(given), given["microbatches"], given["rounds"], given["steps"], given["only"], ends)
    return int(not all(ends.get()))


if __name__ == "__main__":
    sys.exit(main())
