"""The models: small ones in float64 for the correctness table, and a Llama-like decoder for times and memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from tests.zoo import Case, make

# ---- the correctness table


@dataclass(frozen=True)
class Model:
    """A row of the table: a case of :mod:`tests.zoo` on a device.

    Args:
        block: a pattern of the modules that ``recompute`` repeats.
        head: the module that gives logits by token, which the chunked loss splits; empty where there is none.
        experts: has a mixture of experts.
    """

    name: str
    case: Case
    block: str
    head: str = ""
    images: bool = False
    batch_norm: bool = False
    experts: bool = False


ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "MLP": ("mlp3", {"block": "fc2"}),
    "GPT, fused qkv": ("gpt_fused", {"block": "layers.*", "head": "head"}),
    "Llama (HF)": ("hf_llama", {"block": "**.layers.*", "head": "lm_head"}),
    "T5 (HF)": ("hf_t5", {"block": "**.block.*", "head": "lm_head"}),
    "ResNet": ("resnet", {"block": "blocks.*", "images": True, "batch_norm": True}),
    "UNet": ("unet", {"block": "down*", "images": True}),
    "Mixtral (HF)": ("moe_mixtral", {"block": "**.layers.*", "head": "lm_head", "experts": True}),
}
"""By the name of the row: the case, and what :class:`Model` says of it."""


def table_model(name: str, device: torch.device) -> Model:
    """The model of a row on a device, with its batch."""
    case_name, facts = ROWS[name]
    case = make(case_name)
    model: Any = _in_double(case.model).to(device)
    model_facts = Model(name, case, **facts)
    if model_facts.experts:  # the default's grouped product takes no float64, and reads the sizes of groups on the host
        model.set_experts_implementation("batched_mm")

    def there(x: Any) -> Any:
        return x.to(device) if isinstance(x, Tensor) else x

    args, kwargs, targets = (tree_map(there, each) for each in (case.args, dict(case.kwargs), case.targets))
    return replace(model_facts, case=replace(case, model=model, args=args, kwargs=kwargs, targets=targets))


def _in_double(model: nn.Module) -> nn.Module:
    """Norms in the model's dtype: those of transformers compute in float32, where orders of sums differ by 1e-7."""
    for parent in list(model.modules()):
        norm: Any
        for name, norm in list(parent.named_children()):
            if type(norm).__name__ in ("LlamaRMSNorm", "MixtralRMSNorm", "T5LayerNorm"):
                own = nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon, dtype=norm.weight.dtype)
                own.weight = norm.weight
                setattr(parent, name, own)
    return model


# ---- times and memory


@dataclass(frozen=True)
class Size:
    """Of the Llama-like decoder."""

    layers: int
    width: int
    hidden: int
    heads: int
    batch: int
    length: int
    vocab: int


FULL = Size(layers=16, width=2048, hidden=8192, heads=16, batch=4, length=2048, vocab=32000)
"""1.2 billion parameters, of which 131 million are embedding and head."""
TINY = Size(layers=2, width=32, hidden=64, heads=2, batch=4, length=16, vocab=64)
"""For rehearsals."""


class Norm(nn.Module):
    """A root-mean-square norm as transformers' Llama has it: in float32, op by op."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.attn_norm, self.mlp_norm = Norm(size.width), Norm(size.width)
        self.q, self.k, self.v, self.o = (nn.Linear(size.width, size.width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(size.width, size.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.attn_norm(x)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        h = self.mlp_norm(x)
        out: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Decoder(nn.Module):
    """RMS norms, rotary positions, SwiGLU, fused attention, without what transformers does beside."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocab, size.width)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = Norm(size.width), nn.Linear(size.width, size.vocab, bias=False)
        half = size.width // size.heads // 2
        angles = torch.outer(torch.arange(size.length), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, length, vocab] of tokens [batch, length]."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits: Tensor = self.head(self.norm(x))
        return logits


def decoder(size: Size, device: torch.device, dtype: torch.dtype) -> Decoder:
    """The decoder of seed 0, made on the device."""
    torch.manual_seed(0)
    with device:
        return Decoder(size).to(dtype)


def batch_of(size: Size, device: torch.device) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x, y = torch.randint(size.vocab, (2, size.batch, size.length), device=device)
    return x, y


def next_token(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
