"""Steps of transformers' ``Trainer``, ours compared with a plain one (which wraps the model into DDP), on 2 gloo ranks.

    python -m benchmarks.trainer_time [--rounds 8 --steps 8 --only gpt2-tiny gpt2-2.7m]

Both share the same two processes, one thread each, and alternate, round by round: a round is a ``train()`` of
some steps, clipped, by AdamW and a schedule. Times are from the end of its first step to the end of its last, with the
data loader, callbacks and everything else that a ``Trainer`` does between: the slowest rank's by the clock, and the
mean of what their processors worked; medians over rounds, and the medians of the rounds' ratios, ours over the other's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

import shardfx as sx
from shardfx.integrations.trainer import ParallelTrainer

from .contenders import RANKS, with_ranks

SIZES: dict[str, dict[str, int]] = {
    "gpt2-tiny": {"vocab_size": 1024, "n_positions": 64, "n_embd": 128, "n_layer": 2, "n_head": 2},
    "gpt2-2.7m": {"vocab_size": 512, "n_positions": 128, "n_embd": 256, "n_layer": 3, "n_head": 8},
}
BATCH = 8
"""Rows of a step, of all ranks."""


class Watch(TrainerCallback):  # type: ignore[misc]
    """Clock and processor at the end of each step."""

    def __init__(self) -> None:
        self.at: list[tuple[float, float]] = []

    def on_step_end(self, *given: Any, **more: Any) -> None:
        self.at.append((time.perf_counter(), time.process_time()))


def made(kind: Any, name: str, rows: int, steps: int, folder: str, **more: Any) -> tuple[Trainer, Watch]:
    """A trainer of the model, and the watch of its steps; ``rows`` are those that a process reads in a step."""
    torch.manual_seed(0)
    sizes = SIZES[name]
    undropped = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **undropped, use_cache=False, bos_token_id=0, eos_token_id=0))
    rows_of_all: Tensor = torch.randint(sizes["vocab_size"], (BATCH * (steps + 1), sizes["n_positions"]))
    args = TrainingArguments(
        folder,
        per_device_train_batch_size=rows,
        max_steps=steps,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    watch = Watch()
    data = [{"input_ids": row, "labels": row} for row in rows_of_all]
    trainer = kind(model, args, train_dataset=data, callbacks=[watch], **more)
    trainer.remove_callback(PrinterCallback)
    return trainer, watch


def one_round(trainer: Trainer, watch: Watch) -> tuple[float, float]:
    """Milliseconds of a step in a ``train()``, by the clock and of processors, the same on all ranks."""
    watch.at.clear()
    dist.barrier()
    trainer.train()
    (began, worked), (ended, done), count = watch.at[0], watch.at[-1], len(watch.at) - 1
    clock, work = torch.tensor(ended - began), torch.tensor(done - worked) / RANKS
    dist.all_reduce(clock, dist.ReduceOp.MAX)
    dist.all_reduce(work)
    return clock.item() / count * 1e3, work.item() / count * 1e3


def rank_main(rank: int, rounds: int, steps: int, only: list[str]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}  # which accelerate reads
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    logging.set_verbosity_error()
    if rank == 0:
        columns = f"{'clock: plain':>12} {'ours':>8} {'ratio':>6}", f"{'processor: plain':>16} {'ours':>8} {'ratio':>6}"
        print(f"{'':12} {columns[0]}   {columns[1]}")
    for name in only:
        with tempfile.TemporaryDirectory() as folder:
            plain = made(Trainer, name, BATCH // RANKS, steps, folder)
            ours = made(ParallelTrainer, name, BATCH, steps, folder, mesh=sx.Mesh(dp=RANKS))
            times: dict[str, list[tuple[float, float]]] = {"plain": [], "ours": []}
            for _ in range(rounds + 1):
                times["plain"].append(one_round(*plain))
                times["ours"].append(one_round(*ours))
        if rank == 0:
            report(name, {kind: each[1:] for kind, each in times.items()})


def report(name: str, times: dict[str, list[tuple[float, float]]]) -> None:
    line = f"{name:12}"
    for which, width in ((0, 13), (1, 17)):
        plain, ours = ([each[which] for each in times[kind]] for kind in ("plain", "ours"))
        ratio = statistics.median(b / a for a, b in zip(plain, ours, strict=True))
        line += f"{statistics.median(plain):{width}.1f} {statistics.median(ours):8.1f} {ratio:5.2f}x  "
    print(line.rstrip(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8, help="steps of a train()")
    parser.add_argument("--only", nargs="+", choices=list(SIZES), default=list(SIZES))
    given: Any = parser.parse_args()
    with_ranks(rank_main, given.rounds, given.steps, given.only)


if __name__ == "__main__":
    main()
