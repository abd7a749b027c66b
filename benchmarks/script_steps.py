"""Full training steps as in scripts (``loss = pm(x, y)``, ``loss.backward()``, ``optimizer.step()``,
``optimizer.zero_grad()``) compared with DDP's (with sharded parameters, FSDP2's), on 2 gloo ranks of this host,
with the user's own ``torch.optim.AdamW``.

    python -m benchmarks.script_steps [--rounds 15 --steps 3 --only gpt-0.17m bert-tiny --parts]

Each rank passes its own shard of the batch to either. Both share the same two processes, one thread each, and
alternate, round by round, so that a busy neighbour slows both alike. Printed are, for each model, medians of the clock
of a step (the slowest rank's) and of the processor's time that a rank spends in it (their mean), and the medians of
the rounds' ratios, ours over DDP's. Where the machine has more to do than cores, the processor's time is the one to
trust. ``--parts`` prints where the processor's time of a step goes: the call, the backward, the optimizer.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardfx as sx

from .contenders import RANKS, with_ranks
from .script_models import CASES, Case

PARTS = ("call", "backward", "optimizer")
Call = Callable[[], Tensor]
"""Gives the loss; its ``backward()`` is still to come."""


class Variant:
    """A module with its optimizer, and the times of its steps so far: of the clock, of the processor, of its parts."""

    def __init__(self, module: nn.Module, call: Call) -> None:
        self.module, self.call = module, call
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        self.clock: list[float] = []
        self.processor: list[float] = []
        self.parts: list[list[float]] = []
        self.loss = 0.0

    def run(self, steps: int) -> None:
        """Some steps, and their times, the same on all ranks: milliseconds of one step."""
        spent = [0.0] * len(PARTS)
        dist.barrier()
        started, worked = time.perf_counter(), time.process_time()
        for _ in range(steps):
            at = [time.process_time()]
            loss = self.call()
            at.append(time.process_time())
            loss.backward()
            at.append(time.process_time())
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            at.append(time.process_time())
            spent = [all_ + b - a for all_, a, b in zip(spent, at, at[1:], strict=False)]
        clock = torch.tensor(time.perf_counter() - started)
        work = torch.tensor([time.process_time() - worked, *spent]) / RANKS
        dist.all_reduce(clock, dist.ReduceOp.MAX)
        dist.all_reduce(work)
        self.clock.append(clock.item() / steps * 1e3)
        work_of, *parts = (work / steps * 1e3).tolist()
        self.processor.append(work_of)
        self.parts.append(parts)
        self.loss = loss.item()


def ours(case: Case, mine: Case) -> Variant:
    """Our plan of the model, for the batch of all ranks."""
    specs = {name: ", ".join(["dp"] + ["-"] * (x.dim() - 1)) for name, x in case.inputs.items()}
    hints = sx.Hints(
        args=case.args,
        kwargs=case.kwargs,
        loss=case.loss,
        targets=case.targets,
        specs=specs,
        batch_stats=case.batch_stats,
        zero=case.zero,
    )
    pm = sx.parallelize(case.model, sx.Mesh(dp=RANKS), hints)
    return Variant(pm, lambda: pm(*mine.args, *mine.targets, **mine.kwargs))


def theirs(case: Case, mine: Case) -> Variant:
    copied = deepcopy(case.model)
    if case.zero == 3:
        for layer in copied.get_submodule("layers").children():
            fully_shard(layer)
        module: nn.Module = fully_shard(copied)
    else:
        module = DistributedDataParallel(copied, gradient_as_bucket_view=True)
    return Variant(module, lambda: case.loss(module(*mine.args, **mine.kwargs), *mine.targets))


def part_of(case: Case, rank: int) -> Case:
    """A rank's part of the batch."""

    def shard(x: Tensor) -> Tensor:
        return x.chunk(RANKS)[rank].contiguous()

    kwargs = {name: shard(x) for name, x in case.kwargs.items()}
    return Case(case.model, tuple(map(shard, case.args)), kwargs, case.loss, tuple(map(shard, case.targets)))


def rank_main(rank: int, rounds: int, steps: int, only: list[str], parts: bool) -> None:
    if rank == 0:
        print(
            f"{'':16} {'parameters':>10}   {'clock: DDP':>10} {'ours':>8} {'ratio':>6}   "
            f"{'processor: DDP':>14} {'ours':>8} {'ratio':>6}  {'aim':>4}"
        )
    for name in only:
        torch.manual_seed(0)
        case = CASES[name]()
        case.model.train()
        mine = part_of(case, rank)
        made = {"DDP": theirs(case, mine), "ours": ours(case, mine)}
        gc.collect()
        for _ in range(rounds + 2):
            for each in made.values():
                each.run(steps)
        if rank == 0:
            report(name, case, made, parts)


def report(name: str, case: Case, made: dict[str, Variant], parts: bool) -> None:
    count = sum(p.numel() for p in case.model.parameters()) / 1e6
    line = f"{name:16} {count:8.2f} M   "
    for kind, width in (("clock", 10), ("processor", 14)):
        ddp, our = getattr(made["DDP"], kind)[2:], getattr(made["ours"], kind)[2:]
        ratio = statistics.median(b / a for a, b in zip(ddp, our, strict=True))
        line += f"{statistics.median(ddp):{width}.1f} {statistics.median(our):8.1f} {ratio:5.2f}x   "
    print(f"{line[:-1]} {case.aim:4.1f}x", flush=True)
    for which, each in made.items() if parts else ():
        spent = [statistics.median(column) for column in zip(*each.parts[2:], strict=True)]
        text = ", ".join(f"{part} {ms:.2f}" for part, ms in zip(PARTS, spent, strict=True))
        print(f"    {which}: {text} ms of the processor; loss {each.loss:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=3, help="steps of a variant in a round")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--parts", action="store_true", help="call, backward and optimizer apart")
    given: Any = parser.parse_args()
    with_ranks(rank_main, given.rounds, given.steps, given.only, given.parts)


if __name__ == "__main__":
    main()
