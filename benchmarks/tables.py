"""Embedding tables sharded over the batch's ranks: bytes that a rank sends in a step, and its peak memory.

    python -m benchmarks.tables [--rows 10000000] [--batch 32768] [--ranks 8] [--run]

A DLRM (examples/dlrm.py) of three tables of 64 columns in float32, with sparse gradients and one id of each table for a
sample. Bytes are those of all collectives but the all-reduces of the MLPs' gradients; beside them the formula, of ids
(of 4 bytes) and rows there and back: by rows ids are sent to the ranks of their rows, with room for 1.25 x the mean,
or four deviations above it;
for "sums", and by columns, to all ranks. With ``--run`` a step runs on virtual ranks,
with tables of at most 100,000 rows (the bytes do not depend on it), and what is sent is counted. Aim: within 5 % of the
formula, and a peak of at most 1.25 x the shards of the tables and their states.
"""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import optim

import shardfx as sx
from shardfx.passes import EmbeddingTables
from tests.collective_counts import count_collectives

EXAMPLE = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "dlrm.py"))
TABLES, COLUMNS = 3, 64
STEPS: dict[str, tuple[Any, int]] = {
    "SGD": (lambda params: optim.SGD(params, lr=0.1), 1),
    "Adagrad": (lambda params: optim.Adagrad(params, lr=0.1), 2),
    "SparseAdam": (
        lambda params: [optim.SparseAdam(list(params)[:TABLES]), optim.SGD(list(params)[TABLES:], lr=0.1)],
        3,
    ),
}
"""Optimizers, and the values that they have of each of a table's: itself and its states."""


def formula(by: str, batch: int, ranks: int) -> float:
    """The bytes that a rank sends."""
    mean = batch / ranks**2
    room = max(1.25 * mean, mean + 4 * mean**0.5) * ranks / batch
    of_ids, of_rows = {"rows": (room, room), "sums": (1, 1), "columns": (1, 1 / ranks)}[by]
    return TABLES * (ranks - 1) / ranks * batch * (4 * of_ids + 2 * COLUMNS * 4 * of_rows)


def planned(by: str, step: str, rows: int, batch: int, ranks: int, device: str) -> sx.ParallelModule:
    with torch.device(device):
        model = EXAMPLE["DLRM"]((rows,) * TABLES, COLUMNS, sparse=True)
    given = EXAMPLE["batch"]((rows,) * TABLES, batch)
    spec = "-, dp" if by == "columns" else "dp, -"
    hints = sx.Hints(
        args=given[:2],
        loss=F.binary_cross_entropy_with_logits,
        targets=given[2:],
        specs={"args.*": "dp, -", "targets.0": "dp", "tables.*.weight": spec},
        optimizer=STEPS[step][0],
        passes=(EmbeddingTables(capacity=0),) if by == "sums" else (),
    )
    return sx.parallelize(model, sx.Mesh(dp=ranks), hints, virtual=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--batch", type=int, default=32_768)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--run", action="store_true", help="run a step, and count what is sent")
    args = parser.parse_args()
    rows, device = (min(args.rows, 100_000), "cpu") if args.run else (args.rows, "meta")
    print(f"{'by':10}{'optimizer':12}{'sent, MB':>10}{'formula':>10}{'peak, MB':>10}{'shards':>10}{'peak/shards':>13}")
    for by in ("rows", "sums", "columns"):
        for step, (_, values) in STEPS.items():
            pm = planned(by, step, rows, args.batch, args.ranks, device)
            if args.run:
                dense, ids, labels = EXAMPLE["batch"]((rows,) * TABLES, args.batch, seed=1)
                with count_collectives() as counts:
                    pm.step(dense, ids, labels)
                sent = sum(count.nbytes for (kind, _), count in counts.items() if "all_reduce" not in kind)
            else:
                sent = sum(row.nbytes for row in pm.report().communication.rows if row.kind != "all-reduce")
            peak, shards = pm.memory().peak, TABLES * rows * COLUMNS * 4 * values / args.ranks
            line = f"{by:10}{step:12}{sent / 1e6:10.2f}{formula(by, args.batch, args.ranks) / 1e6:10.2f}"
            print(f"{line}{peak / 1e6:10.0f}{shards / 1e6:10.0f}{peak / shards:13.2f}", flush=True)


if __name__ == "__main__":
    main()
