"""Time to plan, lower, report and prove a loop of hundreds of iterations, compared with a few.

    python -m benchmarks.loop_scale [--iterations 2 16 256] [--rows 1024] [--layers 6]

Seconds are CPU time, the minimum of a few repetitions. With ``--rows 1000`` micro-batches are uneven.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import shardfx as sx

WORDS, WIDTH, LENGTH, TIMES = 500, 32, 12, 3


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape as ``x``, [rows, length, width]."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


def next_tokens(out: Tensor, y: Tensor) -> Tensor:
    """The mean over tokens that are not ignored."""
    return F.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=-100)


def planned(count: int, rows: int, layers: int) -> sx.ParallelModule:
    """A small model on two ranks in so many micro-batches."""
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *(Block() for _ in range(layers)), nn.Linear(WIDTH, WORDS))
    x, y = torch.randint(WORDS, (rows, LENGTH)), torch.randint(WORDS, (rows, LENGTH))
    hints = sx.Hints(args=(x,), loss=next_tokens, targets=(y,), specs={"args.0": "dp, -"}, grad_accumulation=count)
    return sx.parallelize(model, sx.Mesh(dp=2), hints, virtual=True)


def least(work: Callable[[], object]) -> float:
    """CPU seconds."""
    taken = []
    for _ in range(TIMES):
        begin = time.process_time()
        work()
        taken.append(time.process_time() - begin)
    return min(taken)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, nargs="+", default=[2, 16, 256])
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=6)
    given = parser.parse_args()
    torch.set_num_threads(1)
    planned(2, given.rows, given.layers).verify()  # what is loaded and looked up once
    table = Table("iterations", "parallelize", "rank_module", "report", "verify", "calls", box=box.SIMPLE_HEAD)
    for count in given.iterations:
        pm = planned(count, given.rows, given.layers)
        steps: tuple[Callable[[], object], ...] = (
            lambda count=count: planned(count, given.rows, given.layers),  # type: ignore[misc]
            lambda pm=pm: pm.rank_module(1),  # type: ignore[misc]
            pm.report,
            pm.verify,
        )
        table.add_row(str(count), *(f"{least(work):.2f} s" for work in steps), str(len(pm.rank_program(1).graph.nodes)))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
