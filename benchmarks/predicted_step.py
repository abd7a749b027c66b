"""Predicted seconds of uncompiled steps compared with measured ones, on the machine by ``sx.Machine.measure()``.

    python -m benchmarks.predicted_step [--device cuda] [--machine mine.json] [--rounds 15]

One rank, forward and backward, and the same with AdamW's step in the program. On a CPU of one thread the seconds are
those that it worked; the models are larger on CUDA, in bfloat16. Exits with 1 where a prediction is more than 15 % off.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import shardfx as sx
from shardfx.ir.cost.calibrate import clock
from shardfx.ir.cost.replay import replay
from shardfx.module.programs import STEP, TRAIN

from .models import GPT, Size, next_token

AIM = 0.15
SMALL, LARGE = Size(), Size(dim=2048, layers=16, heads=16, length=2048, batch=4, vocab=32000)


def cases(device: torch.device) -> Iterator[tuple[str, nn.Module, tuple[Any, ...], tuple[Any, ...], Any]]:
    """A name, a model, what it is called with, targets and the loss."""
    cuda = device.type == "cuda"
    size, rows, dtype = (LARGE, 8192, torch.bfloat16) if cuda else (SMALL, 512, torch.float32)
    tokens, labels = (torch.randint(0, size.vocab, (size.batch, size.length), device=device) for _ in range(2))
    yield "GPT", GPT(size).to(device, dtype), (tokens,), (labels,), next_token
    wide = size.dim
    layers = nn.Linear(wide, 4 * wide), nn.GELU(), nn.Linear(4 * wide, 4 * wide), nn.GELU(), nn.Linear(4 * wide, wide)
    x, y = (torch.randn(rows, wide, device=device, dtype=dtype) for _ in range(2))
    yield "MLP", nn.Sequential(*layers).to(device, dtype), (x,), (y,), nn.functional.mse_loss


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4)


def measured(run: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Seconds of a step in the median round."""
    now, times = clock(device), list[float]()
    for _ in range(3):
        run()
    for _ in range(rounds):
        begin = now()
        run()
        times.append(now() - begin)
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--machine", help="a file to read; by default it is measured")
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    device = torch.device(given.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    begin = time.perf_counter()
    machine = sx.Machine.load(given.machine) if given.machine else sx.Machine.measure(device)
    print(f"{machine.source}; {time.perf_counter() - begin:.1f} s")
    worst = 0.0
    for name, model, args, targets, loss in cases(device):
        hints = sx.Hints(args=args, targets=targets, loss=loss, optimizer=adamw, machine=machine, device=device)
        pm = sx.parallelize(model, sx.Mesh(dp=1), hints, virtual=True)

        def train(pm: sx.ParallelModule = pm, given: tuple[Any, ...] = (*args, *targets)) -> None:
            pm(*given).backward()

        def step(pm: sx.ParallelModule = pm, given: tuple[Any, ...] = (*args, *targets)) -> None:
            pm.step(*given)

        for what, run, kinds in (("forward and backward", train, TRAIN), ("with the update", step, STEP)):
            seconds = measured(run, device, given.rounds)
            predicted = replay(pm._programs.running(0, kinds)).cost.seconds(machine, pm.mesh)
            worst = max(worst, abs(predicted / seconds - 1))
            found = f"{seconds * 1e3:8.2f} ms, predicted {predicted * 1e3:8.2f} ({predicted / seconds:.2f})"
            print(f"{name:4} {what:22} {found}")
    return int(worst > AIM)


if __name__ == "__main__":
    sys.exit(main())
