"""Step time of pipelines (forward and backward of all micro-batches) compared with ``torch.distributed.pipelining`` on
2 gloo ranks of this host, and the peak memory of a rank.

    python -m benchmarks.pipeline_time [--dim 256 --layers 4 --microbatches 4 --rounds 15 --only 1f1b zb-h1]

Both train the same GPT in the same two stages, with the same schedule and micro-batches, one after the other
(:mod:`.contenders`). Printed are medians, and the median over the rounds of each ratio. Schedules that torch lacks are
compared with our own 1F1B: as it is, which computes and sends first what other stages wait for (so that it has
part of what zero-bubble schedules gain), and *plain*, whose backward is done in the order in which it was captured.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import shardfx as sx
from shardfx.ir.program.loops import schedule_actions

from .contenders import RANKS, Contender, Times, nbytes, peak, ratio, size_of, sized, take_iterations, with_ranks
from .models import GPT, Size, next_token

THEIRS: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
PLAIN = "1f1b-plain"
OWN = ("zb-h1", PLAIN)
"""Schedules that torch lacks."""


class GPTStage(nn.Module):
    """Half of a GPT, as somebody writes it for ``torch.distributed.pipelining``."""

    def __init__(self, model: GPT, rank: int) -> None:
        super().__init__()
        half = len(model.layers) // RANKS
        self.layers = model.layers[rank * half : (rank + 1) * half]
        self.tok_emb, self.pos_emb = (model.tok_emb, model.pos_emb) if rank == 0 else (None, None)
        self.ln_f, self.head = (model.ln_f, model.head) if rank == RANKS - 1 else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.tok_emb is not None and self.pos_emb is not None:
            x = self.tok_emb(x) + self.pos_emb(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            x = layer(x)
        if self.ln_f is not None and self.head is not None:
            x = self.head(self.ln_f(x))
        return x


def ours(model: GPT, schedule: str, microbatches: int, x: Tensor, y: Tensor) -> Contender:
    """Our plan of the model, and its step on the global batch."""
    second = f"layers.{len(model.layers) // RANKS}"
    hints = sx.Hints(
        args=(x,),
        loss=next_token,
        targets=(y,),
        specs={"args.0": "mb, -", "targets.0": "mb, -"},
        pipeline=sx.Pipeline(schedule=schedule.removesuffix("-plain"), stages=("layers.0", second)),
    )
    pm = sx.parallelize(model, sx.Mesh(pp=RANKS, mb=sx.Loop(microbatches)), hints)
    with as_captured() if schedule == PLAIN else nullcontext():
        pm(x, y)  # the program of this rank is written
    return pm, lambda: pm(x, y)


@contextmanager
def as_captured() -> Iterator[None]:
    """Lower programs with the backward of a stage in its captured order."""
    with patch.object(schedule_actions, "send_early", lambda steps, *_: list(steps)):
        yield


def theirs(model: GPT, schedule: str, microbatches: int, x: Tensor, y: Tensor) -> Contender:
    """Their stage of this rank, and its step."""
    rank = dist.get_rank()
    module = GPTStage(model, rank)
    stage = PipelineStage(module, rank, RANKS, torch.device("cpu"))
    made = THEIRS[schedule](stage, microbatches, loss_fn=next_token)

    def step() -> Tensor:
        if rank == 0:
            made.step(x)
            return torch.zeros(())
        losses: list[Tensor] = []
        made.step(target=y, losses=losses)
        return torch.stack(losses).mean().detach()

    return module, step


def variants(model: GPT, microbatches: int, x: Tensor, y: Tensor, only: list[str]) -> dict[str, Contender]:
    """Module and step by name."""
    made: dict[str, Contender] = {}
    for schedule in only:
        if schedule in THEIRS:
            made[f"torch, {schedule}"] = theirs(deepcopy(model), schedule, microbatches, x, y)
        made[f"ours, {schedule}"] = ours(model, schedule, microbatches, x, y)
    return made


def step_memory(contender: Contender, given: list[Tensor]) -> float:
    """Megabytes of a step at its peak without parameters and inputs, gradients included: the larger rank's."""
    module, step = contender
    stored = [*module.parameters(), *given]
    most = torch.tensor((peak(module, step, stored) - nbytes(stored)) / 1e6)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()


def rank_main(rank: int, size: Size, microbatches: int, rounds: int, steps: int, only: list[str]) -> None:
    torch.manual_seed(0)
    model = GPT(size)
    x, y = torch.randint(size.vocab, (2, size.batch, size.length)).unbind()
    made = variants(model, microbatches, x, y, only)
    most = {name: step_memory(each, [x, y]) for name, each in made.items()}
    times = take_iterations(made, rounds, steps)
    if rank == 0:
        report(times, most, only)


def report(times: dict[str, Times], most: dict[str, float], only: list[str]) -> None:
    for name, spent in times.items():
        print(f"{name:16} {spent}   peak {most[name]:6.1f} MB")
    for schedule in only:
        mine = f"ours, {schedule}"
        for other in (f"torch, {schedule}",) if schedule in THEIRS else ("ours, 1f1b", f"ours, {PLAIN}"):
            if other in times and other != mine:
                both = ratio(times[other], times[mine])
                by_time = f"{both.processors:.2f} x by time of processors"
                print(f"{mine} is {both.clock:.2f} x as fast as {other}, {by_time}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    sized(parser)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=2, help="steps of a variant in a round")
    parser.add_argument("--only", nargs="+", choices=[*THEIRS, *OWN], default=["gpipe", "1f1b"])
    given = vars(parser.parse_args())
    told = (given["microbatches"], given["rounds"], given["steps"], given["only"])
    with_ranks(rank_main, size_of(given), *told)


if __name__ == "__main__":
    main()
