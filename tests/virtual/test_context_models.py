"""Hugging Face decoders with a sequence over two to four ranks, by each strategy: equal to one device, and proven."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import shardfx as sx
from benchmarks.context_matrix import BOUND, Cell, run

pytestmark = pytest.mark.long

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any], float]] = {
    "llama": ("Llama", {}, 1e-12),
    "qwen3": ("Qwen3", {}, 1e-12),
    "mistral": ("Mistral", {"sliding_window": 7}, 1e-12),
    "gemma3": ("Gemma3", {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}, 1e-7),
}
"""The name of its classes, its config, and the bound: norms of Gemma 3 are computed in float32."""
INPUTS: dict[str, dict[str, Tensor]] = {
    "plain": {},
    "packed": {"position_ids": torch.cat([torch.arange(10), torch.arange(14)]).expand(2, -1)},
    "padded": {"attention_mask": torch.ones(2, 24, dtype=torch.int64).index_fill(1, torch.arange(3), 0)},
}
CASES = [
    ("llama", "gather", 3, "packed"),
    ("llama", "all-to-all", 4, "padded"),
    ("llama", "ring", 4, "packed"),
    ("llama", "2d", 4, "plain"),
    ("qwen3", "gather", 2, "plain"),
    ("qwen3", "all-to-all", 2, "packed"),
    ("qwen3", "ring", 3, "plain"),
    ("qwen3", "2d", 4, "packed"),
    ("mistral", "window", 3, "plain"),
    ("mistral", "all-to-all", 2, "packed"),
    ("mistral", "ring", 4, "padded"),
    ("mistral", "gather", 4, "plain"),
    ("gemma3", "auto", 3, "packed"),
    ("gemma3", "ring", 2, "plain"),
]


CELLS = [
    ("gemma2", "packed", "2d"),
    ("gemma2", "padded", "auto"),
    ("gemma3", "padded", "all-to-all"),
    ("gpt_oss", "packed", "ring"),
    ("qwen3", "padded", "all-to-all"),
    ("modernbert", "padded", "tp"),
    ("t5", "padded", "tp"),
]
"""Of ``benchmarks.context_matrix``."""


def loss(out: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(out.logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("cell", CELLS, ids=" ".join)
def test_a_cell_of_the_matrix_is_equal_to_one_device_and_proven(cell: tuple[str, str, str]) -> None:
    model, inputs, how = cell
    result = run(Cell(model, inputs, how, 2 if how in ("dp", "tp") else 4, 25 if "ring" not in how else 24))
    assert result.worst <= BOUND and result.verdict == "proven", result


@pytest.mark.parametrize(("name", "how", "ranks", "inputs"), CASES)
def test_a_decoder_over_a_sharded_sequence_matches_single_device(name: str, how: str, ranks: int, inputs: str) -> None:
    kind, config, bound = MODELS[name]
    torch.manual_seed(0)
    made = getattr(transformers, f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config")(**SMALL | config)
    model = getattr(transformers, f"{kind}ForCausalLM")(made).double()
    alone, ids = deepcopy(model), torch.randint(64, (2, 24))
    given = {"input_ids": ids, "use_cache": False, **INPUTS[inputs]}
    axes, mesh = ("r u", sx.Mesh(r=2, u=ranks // 2)) if how == "2d" else ("cp", sx.Mesh(cp=ranks))
    rows = {f"kwargs.{each}": f"-, {axes}" for each, value in given.items() if isinstance(value, Tensor)}
    specs = {**rows, "targets.0": f"-, {axes}", "**.self_attn": sx.Context(axes, how=how)}
    hints = sx.Hints(kwargs=given, loss=loss, targets=(ids,), specs=specs)
    pm = sx.parallelize(model, mesh, hints, virtual=True)
    expected = loss(alone(**given), ids)
    expected.backward()
    found = pm(ids, **given)
    found.backward()
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)
    for (path, mine), theirs in zip(pm.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=bound, atol=bound, msg=path)
    verdict = pm.verify()
    assert verdict, verdict.why


@pytest.mark.parametrize(
    ("kind", "device", "kernel"),
    [
        ("Llama", "cpu", r"attention_for_cpu"),
        pytest.param("Llama", "cuda", r"flash|cudnn|fmha", marks=pytest.mark.gpu),
        pytest.param("Gemma2", "cuda", r"flex_attention", marks=pytest.mark.gpu),
    ],
)
def test_an_unedited_decoder_runs_by_a_fused_kernel(kind: str, device: str, kernel: str) -> None:
    """As the profiler names it, forward and backward; nothing computes a softmax of scores."""
    sizes = {**SMALL, "hidden_size": 256, "head_dim": 64, "max_position_embeddings": 256}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).bfloat16().to(device)
    ids = torch.randint(0, 64, (2, 256), device=device)
    kwargs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    hints = sx.Hints(kwargs=kwargs, loss=lambda out: out.logits.float().square().mean())
    pm = sx.parallelize(model, sx.Mesh(dp=1), hints, virtual=True)
    pm(**kwargs).backward()
    with torch.profiler.profile() as profile:
        pm(**kwargs).backward()
    names = [event.name for event in profile.events() if re.search(kernel, event.name)]
    assert [name for name in names if re.search("backward|bwd|bprop", name)]
    assert [name for name in names if not re.search("backward|bwd|bprop", name)]
    assert not [event.name for event in profile.events() if "softmax" in event.name.lower()]
