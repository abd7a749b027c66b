"""Expert parallelism: the bytes that a rank sends for one layer of experts, its peak memory, and the time to plan.

    python -m benchmarks.experts [--layers 2] [--tokens 4096] [--plan]

Hugging Face models of the shapes of Qwen3-MoE and Mixtral in bfloat16 on ``meta``, 4096 tokens a rank, experts over the
8 ranks that shard the tokens. Bytes are those of the all-to-alls, by layer, forward and backward, in MB. The formula is
four moves of the rows that go to other ranks, ``4 (1 - 1/ep) tokens k hidden 2``, without room that is not used;
aim: at most 1.30 x. Peaks are those of the model, and of the experts of one layer alone with their router, at most 1.5
and 2.7 GB. ``--plan`` plans Qwen3-235B-A22B (94 layers, 128 experts) on ep 32 x dp 8; aim: 10 s.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardfx as sx

QWEN3 = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts_per_tok": 8}
SHAPES: dict[str, tuple[str, dict[str, int]]] = {
    "H 2048, top-8, 128 x 1024": (
        "Qwen3Moe",
        {"hidden_size": 2048, "moe_intermediate_size": 1024, "num_experts": 128, "intermediate_size": 6144, **QWEN3},
    ),
    "H 4096, top-2, 8 x 14336": (
        "Mixtral",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
}
SENT = ("dispatch", "combine", "all-to-all")
"""The kinds of communication that bring rows to experts and back, and how many they are."""
HEADS = "shape", "formula", "sent, MB", "ratio", "model, GB", "layer, GB", "plan, s"
LARGE = {"hidden_size": 4096, "moe_intermediate_size": 1536, "num_experts": 128, "intermediate_size": 12288, **QWEN3}
LARGE |= {"num_attention_heads": 64, "num_hidden_layers": 94, "vocab_size": 151936}


def loss(out: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(out.logits.flatten(0, 1).float(), labels.flatten())


def planned(kind: str, sizes: dict[str, int], mesh: sx.Mesh, ranks: int, tokens: int) -> sx.ParallelModule:
    """A model planned on ``meta``, with ``tokens`` tokens on each of the ranks."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**sizes)
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16)
    ids = torch.empty(ranks, tokens, dtype=torch.int64, device="meta")
    batch = " ".join(axis.name for axis in mesh.axes)
    specs = {"kwargs.input_ids": f"{batch}, -", "targets.0": f"{batch}, -", "**.experts": sx.Experts("ep")}
    kwargs = {"input_ids": ids, "use_cache": False}
    hints = sx.Hints(kwargs=kwargs, loss=loss, targets=(ids,), specs=specs, machine="h100-dgx")
    return sx.parallelize(model, mesh, hints)


def layer(kind: str, sizes: dict[str, int], tokens: int) -> sx.ParallelModule:
    """The experts of one layer and their router, planned on ``meta`` on 8 ranks."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(num_hidden_layers=1, **sizes)
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16)
    x = torch.empty(8, tokens, sizes["hidden_size"], dtype=torch.bfloat16, device="meta", requires_grad=True)
    specs = {"args.0": "ep, -, -", "experts": sx.Experts("ep")}
    return sx.parallelize(model.model.layers[0].mlp, sx.Mesh(ep=8), sx.Hints((x,), loss=torch.sum, specs=specs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="of a rank")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--plan", action="store_true", help="plan Qwen3-235B-A22B alone")
    args = parser.parse_args()
    if args.plan:
        begun = time.perf_counter()
        planned("Qwen3Moe", LARGE, sx.Mesh(dp=8, ep=32), 256, args.tokens)
        print(f"Qwen3-235B-A22B on ep 32 x dp 8: planned in {time.perf_counter() - begun:.1f} s")
        return
    print("{:28}{:>10}{:>10}{:>7}{:>11}{:>11}{:>9}".format(*HEADS))
    for name, (kind, sizes) in SHAPES.items():
        begun = time.perf_counter()
        pm = planned(kind, {**sizes, "num_hidden_layers": args.layers}, sx.Mesh(ep=8), 8, args.tokens)
        took = time.perf_counter() - begun
        sent = sum(row.nbytes for row in pm.report().communication.rows if row.kind in SENT) / args.layers
        rows = 4 * (1 - 1 / 8) * args.tokens * sizes["num_experts_per_tok"] * sizes["hidden_size"] * 2
        peaks = pm.memory().peak / 1e9, layer(kind, sizes, args.tokens).memory().peak / 1e9
        figures = rows / 1e6, sent / 1e6, sent / rows, *peaks, took
        print("{:28}{:10.0f}{:10.0f}{:7.2f}{:11.2f}{:11.2f}{:9.1f}".format(name, *figures), flush=True)


if __name__ == "__main__":
    main()
