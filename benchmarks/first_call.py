"""Time of ``parallelize`` beside the first call of ``torch.compile``, on an unedited Llama of Hugging Face.

    python -m benchmarks.first_call [--layers 4 24] [--rounds 3]

Both are run in fresh processes, alternating; imports are not counted. ``torch.compile`` has the backend ``aot_eager``,
which writes the joint graph and compiles no kernel. Prints medians, in seconds, and their ratio.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import shardfx as sx

WAYS = ("shardfx", "torch")


def model_of(layers: int) -> LlamaForCausalLM:
    """A small Llama."""
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, num_key_value_heads=2, use_cache=False, **sizes))


def loss(out: Any, labels: torch.Tensor) -> torch.Tensor:
    """The loss of the next tokens."""
    return F.cross_entropy(out.logits.flatten(0, 1), labels.flatten())


def seconds(way: str, layers: int) -> float:
    """The seconds of one way, in this process."""
    model, ids = model_of(layers), torch.randint(0, 256, (2, 32))
    if way == "shardfx":
        begun = time.perf_counter()
        sx.parallelize(model, sx.Mesh(dp=1), sx.Hints(args=(ids,), loss=loss, targets=(ids,)), virtual=True)
        return time.perf_counter() - begun
    compiled = torch.compile(lambda ids, labels: loss(model(ids), labels), backend="aot_eager", fullgraph=True)
    begun = time.perf_counter()
    compiled(ids, ids)
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 24])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--way", choices=WAYS, help="print the seconds of one way alone")
    given = parser.parse_args()
    if given.way:
        print(seconds(given.way, given.layers[0]))
        return
    for layers in given.layers:
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(given.rounds):
            for way in WAYS:
                command = [sys.executable, "-m", "benchmarks.first_call", "--way", way, "--layers", str(layers)]
                out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                times[way].append(float(out.split()[-1]))
        ours, theirs = (statistics.median(times[way]) for way in WAYS)
        print(f"{layers:3} layers: parallelize {ours:.2f} s, torch.compile {theirs:.2f} s, ratio {ours / theirs:.2f}")


if __name__ == "__main__":
    main()
