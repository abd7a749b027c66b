"""Llama-3-70B's shapes on dp=8 x tp=8, planned without weights: from the module to one rank's program.

    python -m benchmarks.plan_scale [--layers 80] [--update] [--bfloat16]

With ``--update`` the step of AdamW, clipping and ``zero=1`` are in the program; with ``--bfloat16`` it computes in
mixed precision.
Prints the seconds of each step and the peak memory of the process. Aim: under 6 s and 0.6 GB on 2 cores
that are not shared.
"""

from __future__ import annotations

import argparse
import resource
import time
from typing import Any

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import shardfx as sx

SPECS = {
    "args.0": "dp, -",
    "targets.0": "dp, -",
    "model.embed_tokens.weight": "tp, -",
    "lm_head.weight": "tp, -",
    "model.layers.*.self_attn.q_proj.weight": "tp, -",
    "model.layers.*.self_attn.k_proj.weight": "tp, -",
    "model.layers.*.self_attn.v_proj.weight": "tp, -",
    "model.layers.*.self_attn.o_proj.weight": "-, tp",
    "model.layers.*.mlp.gate_proj.weight": "tp, -",
    "model.layers.*.mlp.up_proj.weight": "tp, -",
    "model.layers.*.mlp.down_proj.weight": "-, tp",
}

UPDATE: dict[str, Any] = {"optimizer": torch.optim.AdamW, "clip_grad_norm": 1.0, "zero": 1}


def loss(out, y):
    return F.cross_entropy(out.logits.flatten(0, 1), y.flatten())


def planned(layers: int, mesh: sx.Mesh, batch: int, **hints: Any) -> sx.ParallelModule:
    """The plan for ``batch`` samples of 4,096 tokens."""
    model, x = llama(layers, batch)
    return sx.parallelize(model, mesh, sx.Hints(args=(x,), loss=loss, targets=(x,), specs=SPECS, **hints))


def llama(layers: int, batch: int) -> tuple[LlamaForCausalLM, torch.Tensor]:
    """The model without weights, and an input."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    return model, torch.empty(batch, 4096, dtype=torch.long, device="meta")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--update", action="store_true", help="with the optimizer's step, clipping and zero=1")
    parser.add_argument("--bfloat16", action="store_true", help="computed in bfloat16, with master weights in float32")
    given = parser.parse_args()
    layers, more = given.layers, UPDATE if given.update else {}
    more = more | ({"mixed_precision": torch.bfloat16} if given.bfloat16 else {})
    model, x = llama(layers, batch=8)
    started, busy = time.perf_counter(), time.process_time()
    hints = sx.Hints(args=(x,), loss=loss, targets=(x,), specs=SPECS, **more)
    pm = sx.parallelize(model, sx.Mesh(dp=8, tp=8), hints)
    ready = time.perf_counter()
    pm.rank_program(0)
    done, busy, peak = time.perf_counter(), time.process_time() - busy, most_memory()
    module = pm.rank_module(0)
    shown = time.perf_counter()
    passes = pm._compiled.context.seconds
    print(f"layers                 {layers}, {len(pm.planned.nodes)} IR nodes, {len(module.graph.nodes)} fx nodes")
    print(f"capture                {ready - started - sum(passes.values()):6.1f} s")
    for name, seconds in passes.items():
        print(f"{name:<22} {seconds:6.1f} s")
    print(f"one rank's program     {done - ready:6.1f} s")
    print(f"model to program       {done - started:6.1f} s, {busy:.1f} s of them on a processor")
    print(f"most memory            {peak:6.2f} GB, of which torch and transformers are the most")
    print(f"its GraphModule        {shown - done:6.1f} s, made anew, with its Python written and compiled")
    print(f"most memory            {most_memory():6.2f} GB")


def most_memory() -> float:
    """The peak memory of this process, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


if __name__ == "__main__":
    main()
