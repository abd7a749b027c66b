"""Peak memory and time of a step with the loss of a large vocabulary in chunks, compared with unchunked logits.

    python -m benchmarks.chunked_loss [--words 131072] [--width 256] [--tokens 2048] [--chunks 16]

Peaks are those of the replay of the program; ``with parameters`` adds parameters and batch, which are live all the
time. Seconds are CPU time (of one thread, the minimum of a few steps), which other processes do not affect.
Exits with 1 where the peak is above a fifth of that of unchunked logits, or the time above 1.1 times theirs.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import shardfx as sx
from shardfx.ir.text.printer import size_text

PEAK, TIME, STEPS = 0.2, 1.1, 3


class Language(nn.Module):
    """A table, a layer and a head."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(words, width), nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [batch, tokens, words] of tokens [batch, tokens]."""
        return self.head(torch.tanh(self.inner(self.embed(x))))


def next_tokens(out: Tensor, y: Tensor) -> Tensor:
    """The mean over tokens that are not ignored."""
    return F.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=-100)


@dataclass(frozen=True)
class Measured:
    """Bytes, and CPU seconds."""

    peak: int
    beside: int
    seconds: float


def measure(words: int, width: int, tokens: int, chunks: int) -> Measured:
    """One plan, and a few steps of it."""
    torch.manual_seed(0)
    x, y = torch.randint(words, (2, tokens // 2)), torch.randint(words, (2, tokens // 2))
    mesh = sx.Mesh(dp=1, chunk=sx.Loop(chunks)) if chunks > 1 else sx.Mesh(dp=1)
    specs = {"args.0": "dp, -", **({"head": "dp, chunk, -"} if chunks > 1 else {})}
    hints = sx.Hints(args=(x,), loss=next_tokens, targets=(y,), specs=specs)
    pm = sx.parallelize(Language(words, width), mesh, hints, virtual=True)
    memory = pm.report().memory
    taken = []
    for _ in range(STEPS):
        for parameter in pm.parameters():
            parameter.grad = None
        begin = time.process_time()
        pm(x, y).backward()
        taken.append(time.process_time() - begin)
    stored = sum(memory.stored.values())
    return Measured(memory.peak - stored, stored, min(taken))


def main() -> int:
    parser = argparse.ArgumentParser()
    for name, default in (("words", 131072), ("width", 256), ("tokens", 2048), ("chunks", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    torch.set_num_threads(1)
    whole, chunked = (measure(given.words, given.width, given.tokens, chunks) for chunks in (1, given.chunks))
    table = Table("", "peak", "with parameters", "seconds of a step", box=box.SIMPLE_HEAD)
    for name, each in (("whole", whole), (f"{given.chunks} chunks", chunked)):
        table.add_row(name, size_text(each.peak), size_text(each.peak + each.beside), f"{each.seconds:.2f}")
    peak, seconds = chunked.peak / whole.peak, chunked.seconds / whole.seconds
    both = (chunked.peak + chunked.beside) / (whole.peak + whole.beside)
    table.add_row("share", f"{peak:.3f}", f"{both:.3f}", f"{seconds:.3f}")
    Console(width=100).print(table)
    return int(peak > PEAK or seconds > TIME)


if __name__ == "__main__":
    sys.exit(main())
