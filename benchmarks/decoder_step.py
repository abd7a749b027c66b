"""A step of a Hugging Face Llama at 4096 tokens on one rank, compared with the plain model: time, and peak memory.

    python -m benchmarks.decoder_step [--tokens 4096] [--rounds 7]

In one process, interleaved, medians of ratios. Aim: at most 1.05 x the plain model's time, and no more memory: no mask
of tokens x tokens, and no keys that are repeated for all heads.
"""

from __future__ import annotations

import argparse
import statistics
import time
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardfx as sx

from .contenders import Step, peak


def loss(out: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(out.logits.flatten(0, 1).float(), labels.flatten())


def contenders(tokens: int) -> dict[str, tuple[torch.nn.Module, Step]]:
    """The plain model, and ours; each with a function that gives the loss of a step."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=tokens,
    )
    plain = transformers.LlamaForCausalLM(config)
    ids = torch.randint(0, config.vocab_size, (1, tokens))
    given: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    hints = sx.Hints(kwargs=given, loss=loss, targets=(ids,))
    pm = sx.parallelize(deepcopy(plain), sx.Mesh(cp=1), hints, virtual=True)
    return {"plain": (plain, lambda: loss(plain(**given), ids)), "ours": (pm, lambda: pm(ids, **given))}


def seconds(module: torch.nn.Module, step: Step) -> float:
    module.zero_grad(set_to_none=True)
    begun = time.perf_counter()
    step().backward()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    made = contenders(args.tokens)
    rounds = [{name: seconds(*each) for name, each in made.items()} for _ in range(args.rounds + 1)][1:]
    for name, (module, step) in made.items():
        took = statistics.median(each[name] for each in rounds)
        print(f"{name:6} {took:7.2f} s {peak(module, step, module.parameters()) / 1e6:9.1f} MB", flush=True)
    print(f"ours to plain: {statistics.median(each['ours'] / each['plain'] for each in rounds):.3f} x the time")


if __name__ == "__main__":
    main()
