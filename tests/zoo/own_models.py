"""Models that are written here, or are a few layers."""

from __future__ import annotations

import torch

from .cases import (
    BATCH,
    Case,
    case,
    classify,
    labels,
    next_token,
    tokens,
)


@case
def mlp3() -> Case:
    """Three Linears with biases, and ReLU."""
    from tests.models import MLP3

    x, y = torch.randn(BATCH, 32), torch.randint(0, 16, (BATCH,))
    specs = {"fc1.weight": "tp, -", "fc1.bias": "tp", "fc2.weight": "-, tp"}
    return Case("mlp3", MLP3(), (x,), {}, classify, (y,), specs)


@case
def dropout_mlp() -> Case:
    """The same with dropout on."""
    from tests.models import MLP3

    x, y = torch.randn(BATCH, 32), torch.randint(0, 16, (BATCH,))
    specs = {"fc1.weight": "tp, -", "fc1.bias": "tp", "fc2.weight": "-, tp"}
    return Case("dropout_mlp", MLP3(dropout=0.25), (x,), {}, classify, (y,), specs)


_GPT_SPECS = {
    "tok_emb.weight": "tp, -",
    "layers.*.proj.weight": "-, tp",
    "layers.*.fc1.weight": "tp, -",
    "layers.*.fc1.bias": "tp",
    "layers.*.fc2.weight": "-, tp",
    "head.weight": "tp, -",
}
_GPT_SEQUENCE = {"layers.*.ln1": "-, tp, -", "layers.*.ln2": "-, tp, -", "ln_f": "-, tp, -"}


@case
def gpt_fused() -> Case:
    """A GPT whose q, k and v come from one Linear: its sharding does not fall between q, k and v."""
    from tests.models import GPT

    specs = {**_GPT_SPECS, "layers.*.qkv.weight": "tp, -", "layers.*.qkv.bias": "tp"}
    return Case("gpt_fused", GPT(fused=True), (tokens(),), {}, next_token, (labels(),), specs, _GPT_SEQUENCE)


@case
def gpt_separate() -> Case:
    """A GPT with three Linears for q, k and v."""
    from tests.models import GPT

    specs = dict(_GPT_SPECS)
    for name in "qkv":
        specs |= {f"layers.*.{name}.weight": "tp, -", f"layers.*.{name}.bias": "tp"}
    return Case("gpt_separate", GPT(fused=False), (tokens(),), {}, next_token, (labels(),), specs, _GPT_SEQUENCE)


@case
def llama() -> Case:
    """RMS norm, rotary positions, grouped queries, SwiGLU."""
    from tests.models import Llama

    specs = {"tok_emb.weight": "tp, -", "head.weight": "tp, -"}
    specs |= {f"layers.*.{name}.weight": "tp, -" for name in ("wq", "wk", "wv", "w1", "w3")}
    specs |= {f"layers.*.{name}.weight": "-, tp" for name in ("wo", "w2")}
    sequence = {"layers.*.attn_norm": "-, tp, -", "layers.*.mlp_norm": "-, tp, -", "norm": "-, tp, -"}
    return Case("llama", Llama(), (tokens(),), {}, next_token, (labels(),), specs, sequence)


@case
def resnet() -> Case:
    """Residual blocks with batch norm in training mode: its statistics are those of the whole batch."""
    from tests.models import ResNet

    x, y = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 16, (BATCH,))
    specs = {
        "blocks.*.conv1.weight": "tp, -, -, -",
        "blocks.*.bn1.weight": "tp",
        "blocks.*.bn1.bias": "tp",
        "blocks.*.conv2.weight": "-, tp, -, -",
    }
    return Case("resnet", ResNet(), (x,), {}, classify, (y,), specs)


@case
def unet() -> Case:
    """Down, up and across; one label a pixel."""
    from tests.models import UNet

    x, y = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 4, (BATCH, 32, 32))
    specs = {
        "**.conv1.weight": "tp, -, -, -",
        "**.conv1.bias": "tp",
        "**.norm1.weight": "tp",
        "**.norm1.bias": "tp",
        "**.conv2.weight": "-, tp, -, -",
    }
    return Case("unet", UNet(), (x,), {}, classify, (y,), specs)
