"""The demo's model: a small Llama-like decoder over bytes, in ordinary PyTorch, and the hints of somebody who knows it.

Nothing in the model knows of ranks. The hints are Megatron's: the heads and the hidden units are sharded over ``tp``,
the batch over ``dp``, and between the blocks the tokens over ``tp`` (sequence parallelism).
"""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardfx.hints import Hints

DIM, HEADS, KV_HEADS, HIDDEN, LAYERS = 96, 4, 2, 256, 2
LENGTH, BATCH, VOCAB = 64, 8, 256

SPECS = {
    "args.0": "dp, -",
    "targets.0": "dp, -",
    "embed.weight": "tp, -",
    "layers.*.wq.weight": "tp, -",
    "layers.*.wk.weight": "tp, -",
    "layers.*.wv.weight": "tp, -",
    "layers.*.wo.weight": "-, tp",
    "layers.*.gate.weight": "tp, -",
    "layers.*.up.weight": "tp, -",
    "layers.*.down.weight": "-, tp",
    "layers.*.norm1": "dp, tp, -",
    "layers.*.norm2": "dp, tp, -",
    "norm": "dp, tp, -",
    "head.weight": "tp, -",
}


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Block(nn.Module):
    """Attention with grouped queries, and a gated feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        head = DIM // HEADS
        self.norm1, self.norm2 = nn.RMSNorm(DIM, eps=1e-6), nn.RMSNorm(DIM, eps=1e-6)
        self.wq = nn.Linear(DIM, HEADS * head, bias=False)
        self.wk = nn.Linear(DIM, KV_HEADS * head, bias=False)
        self.wv = nn.Linear(DIM, KV_HEADS * head, bias=False)
        self.wo = nn.Linear(HEADS * head, DIM, bias=False)
        self.gate = nn.Linear(DIM, HIDDEN, bias=False)
        self.up = nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        h = self.norm1(x)
        q = rotate(self.wq(h).view(batch, length, HEADS, -1).transpose(1, 2), cos, sin)
        k = rotate(self.wk(h).view(batch, length, KV_HEADS, -1).transpose(1, 2), cos, sin)
        v = self.wv(h).view(batch, length, KV_HEADS, -1).transpose(1, 2)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(a.transpose(1, 2).reshape(batch, length, -1))
        h = self.norm2(x)
        out: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return out


class Decoder(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(DIM, eps=1e-6)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        half = DIM // HEADS // 2
        angles = torch.outer(torch.arange(LENGTH), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all tokens of the global batch."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of Python's own help texts, and the same one byte on; the same at every call."""
    text = "\n".join(pydoc_data.topics.topics.values()).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(data) - LENGTH - 1, (BATCH,), generator=generator)
        rows = torch.stack([data[start : start + LENGTH + 1] for start in starts.tolist()])
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def make() -> tuple[Decoder, Hints]:
    """The model and the hints: ``shardfx plan shardfx.demo.demo_model:make --mesh dp=2,tp=2``."""
    x, y = next(batches())
    return Decoder(), Hints(args=(x,), loss=loss, targets=(y,), specs=SPECS)
