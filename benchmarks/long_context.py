"""Context parallelism by strategy: the bytes that a rank sends for one attention, and its peak memory, without weights.

    python -m benchmarks.long_context [--tokens 16384] [--layers 2] [--cp 2 4 8 16] [--how ring]

A Hugging Face Llama (for windows a Mistral with one of 4096 rows) of hidden size 4096, with 32 query heads and 8 key
heads of 128, in bfloat16 on ``meta``, with as many tokens a rank whatever the ranks are.

Bytes are those of all collectives but the all-reduces (of the weights'
gradients), by layer, in MB; beside them the formula. Aim: within 5 % of it, and a peak on 16 ranks of at most 1.03 x
that on 2; gather holds the keys of all rows. ``busiest``: the FLOPs of attention on the busiest rank over the mean of
all ranks; aim: 1.1. For 2d there are two ranks of rows, and the others of heads. The predicted
step is that of the first rank, of 8 H100s in a node; aim: that of auto at most 1.02 x the least of all-to-all, ring and
2d.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardfx as sx
from shardfx.ir.cost.replay import replay

WINDOW = 4096
QUERIES, KEYS = 2 * 4096, 2 * 1024
"""Bytes of a row's queries, and of its keys."""
FORMULAS: dict[str, Callable[[int, int], float]] = {
    "gather": lambda ranks, rows: (ranks - 1) * rows * 6 * KEYS,
    "all-to-all": lambda ranks, rows: (ranks - 1) / ranks * rows * 4 * (QUERIES + KEYS * max(ranks // 8, 1)),
    "ring": lambda ranks, rows: (ranks - 1) * rows * 6 * KEYS,
    "2d": lambda ranks, rows: (1 - 2 / ranks) * rows * 4 * (QUERIES + KEYS * max(ranks // 16, 1)) + rows * 6 * KEYS,
    "auto": lambda ranks, rows: math.nan,
    "window": lambda ranks, rows: WINDOW * (3 * QUERIES + 2 * KEYS),
}
"""Bytes of one attention, forward and backward, by the rows of a rank."""


def loss(out: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(out.logits.flatten(0, 1).float(), labels.flatten())


def planned(how: str, ranks: int, tokens: int, layers: int) -> sx.ParallelModule:
    import transformers

    kind = "Mistral" if how == "window" else "Llama"
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_hidden_layers=layers,
        max_position_embeddings=tokens * ranks,
        **({"sliding_window": WINDOW} if how == "window" else {}),
    )
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16)
    ids = torch.empty(1, tokens * ranks, dtype=torch.int64, device="meta")
    axes, mesh = "cp", sx.Mesh(cp=ranks)
    if how == "2d":
        axes, mesh = "rows heads", sx.Mesh(rows=2, heads=ranks // 2)
    rows = f"-, {axes}"
    specs = {"kwargs.input_ids": rows, "targets.0": rows, "**.self_attn": sx.Context(axes, how=how)}
    hints = sx.Hints(
        kwargs={"input_ids": ids, "use_cache": False}, loss=loss, targets=(ids,), specs=specs, machine="h100-dgx"
    )
    return sx.parallelize(model, mesh, hints)


def busiest(pm: sx.ParallelModule, ranks: int) -> float:
    """The FLOPs of attention on the rank with the most, over the mean."""
    found = []
    for rank in range(ranks):
        made = replay(pm.rank_program(rank))
        calls = zip(made.calls, made.costs, strict=True)
        found.append(sum(cost.flops for call, cost in calls if "attention" in str(call.target)))
    return max(found) * ranks / sum(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384, help="of a rank")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--cp", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--how", nargs="+", default=[], help="some strategies alone")
    args = parser.parse_args()
    heads = "how", "cp", "sent, MB", "formula", "peak, GB", "step, ms", "plan, s", "busiest"
    print("{:12}{:>4}{:>10}{:>10}{:>10}{:>10}{:>9}{:>9}".format(*heads))
    for how, formula in FORMULAS.items():
        if args.how and how not in args.how:
            continue
        for ranks in args.cp:
            begun = time.perf_counter()
            pm = planned(how, ranks, args.tokens, args.layers)
            took = time.perf_counter() - begun
            sent = sum(row.nbytes for row in pm.report().communication.rows if row.kind != "all-reduce") / args.layers
            peak, expected = pm.memory().peak / 1e9, formula(ranks, args.tokens)
            step = pm.report().time.total * 1e3
            line = f"{how:12}{ranks:4}{sent / 1e6:10.0f}{expected / 1e6:10.0f}{peak:10.2f}{step:10.1f}{took:9.1f}"
            print(f"{line}{busiest(pm, ranks):9.3f}", flush=True)


if __name__ == "__main__":
    main()
