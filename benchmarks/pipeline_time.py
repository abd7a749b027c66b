"""Step time of pipelines (forward and backward of all turns) beside ``torch.distributed.pipelining`` on 2 gloo ranks
of this machine, and what a rank holds in it at most.

    python -m benchmarks.pipeline_time [--dim 256 --layers 4 --turns 4 --rounds 15 --only 1f1b]

Both train the same GPT in the same two stages, with the same schedule and turns. All variants live in the same two
processes, one thread each, and take turns, round after round, so that a busy neighbour slows all of them alike. A
round's time is the slowest rank's. Printed are medians, and the median over the rounds of each ratio.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
import warnings
from collections.abc import Callable
from copy import deepcopy
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardfx as sx

from .models import GPT, Size, next_token

RANKS = 2
THEIRS: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
OWN = ("zb-h1",)
"""Schedules that are compared with our own 1F1B."""
Step = Callable[[], float]
"""Runs a step, with gradients behind it; gives the loss, on ranks that know it."""


class Stage(nn.Module):
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


def ours(model: GPT, schedule: str, turns: int, x: Tensor, y: Tensor) -> tuple[nn.Module, Step]:
    """Our plan of the model, and its step on the global batch."""
    second = f"layers.{len(model.layers) // RANKS}"
    hints = sx.Hints(
        args=(x,),
        loss=next_token,
        targets=(y,),
        specs={"args.0": "mb, -", "targets.0": "mb, -"},
        pipeline=sx.Pipeline(schedule=schedule, stages=("layers.0", second)),
    )
    pm = sx.parallelize(model, sx.Mesh(pp=RANKS, mb=sx.Time(turns)), hints)

    def step() -> float:
        loss = pm(x, y)
        loss.backward()
        return float(loss.detach())

    return pm, step


def theirs(model: GPT, schedule: str, turns: int, x: Tensor, y: Tensor) -> tuple[nn.Module, Step]:
    """Their stage of this rank, and its step."""
    rank = dist.get_rank()
    module = Stage(model, rank)
    stage = PipelineStage(module, rank, RANKS, torch.device("cpu"))
    made = THEIRS[schedule](stage, turns, loss_fn=next_token)

    def step() -> float:
        if rank == 0:
            made.step(x)
            return 0.0
        losses: list[Tensor] = []
        made.step(target=y, losses=losses)
        return float(torch.stack(losses).mean())

    return module, step


def variants(model: GPT, turns: int, x: Tensor, y: Tensor, only: list[str]) -> dict[str, tuple[nn.Module, Step]]:
    """Module and step by name."""
    made: dict[str, tuple[nn.Module, Step]] = {}
    for schedule in only:
        if schedule in THEIRS:
            made[f"torch, {schedule}"] = theirs(deepcopy(model), schedule, turns, x, y)
        made[f"ours, {schedule}"] = ours(model, schedule, turns, x, y)
    return made


class Held(TorchDispatchMode):
    """The bytes of the memory that was made within and is there, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self._there = 0, dict[int, tuple[StorageWeakRef, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu":
                storage = leaf.untyped_storage()
                if func._schema.name not in ("aten::detach", "aten::alias"):
                    self._there.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self._there = {key: each for key, each in self._there.items() if not each[0].expired()}
        self.most = max(self.most, sum(nbytes for _, nbytes in self._there.values()))
        return out


def held(module: nn.Module, step: Step) -> float:
    """Megabytes that a step holds at most beside parameters and inputs, gradients among them: the larger rank's."""
    given = {p.untyped_storage()._cdata for p in module.parameters()}
    with Held() as measured:
        measured._there.update({key: (_Never(), 0) for key in given})  # type: ignore[dict-item]
        for _ in range(2):
            module.zero_grad(set_to_none=True)
            step()
    most = torch.tensor(measured.most / 1e6)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()


class _Never:
    """What is there all the time."""

    def expired(self) -> bool:
        return False


def measure(module: nn.Module, step: Step, steps: int) -> tuple[float, float]:
    """Milliseconds of a step, of the slowest rank; and the loss."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(steps):
        module.zero_grad(set_to_none=True)
        loss = step()
    spent = torch.tensor([(time.perf_counter() - started) / steps * 1e3, loss])
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return spent[0].item(), spent[1].item()


def rank_main(rank: int, port: int, size: Size, turns: int, rounds: int, steps: int, only: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS, timeout=timedelta(minutes=5))
    torch.manual_seed(0)
    model = GPT(size)
    x, y = torch.randint(size.vocab, (2, size.batch, size.length)).unbind()
    made = variants(model, turns, x, y, only)
    most = {name: held(module, step) for name, (module, step) in made.items()}
    times: dict[str, list[float]] = {name: [] for name in made}
    for number in range(rounds + 2):
        for name, (module, step) in made.items():
            spent, loss = measure(module, step, steps)
            if number >= 2:
                times[name].append(spent)
            elif rank == 0:
                print(f"warming up: {name}, loss {loss:.4f}")
    if rank == 0:
        report(times, most, only)
    dist.destroy_process_group()


def report(times: dict[str, list[float]], most: dict[str, float], only: list[str]) -> None:
    for name, spent in times.items():
        print(
            f"{name:14} {statistics.median(spent):7.1f} ms   least {min(spent):7.1f}   most {max(spent):7.1f}   "
            f"holds {most[name]:6.1f} MB"
        )
    for schedule in only:
        mine, other = f"ours, {schedule}", f"torch, {schedule}" if schedule in THEIRS else "ours, 1f1b"
        if other in times:
            ratios = [b / a for a, b in zip(times[mine], times[other], strict=True)]
            print(f"{mine} is {statistics.median(ratios):.2f} x as fast as {other}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for field, value in vars(Size()).items():
        parser.add_argument(f"--{field}", type=int, default=value)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=2, help="steps of a variant in a round")
    parser.add_argument("--only", nargs="+", choices=[*THEIRS, *OWN], default=["gpipe", "1f1b"])
    given = vars(parser.parse_args())
    turns, rounds, steps, only = (given.pop(name) for name in ("turns", "rounds", "steps", "only"))
    os.environ["OMP_NUM_THREADS"] = "1"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(rank_main, (port, Size(**given), turns, rounds, steps, only), nprocs=RANKS)


if __name__ == "__main__":
    main()
