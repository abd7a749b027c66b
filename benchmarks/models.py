"""The GPT of the benchmarks, in plain PyTorch; its number of heads follows from its weights, as DTensor's TP needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    dim: int = 256
    layers: int = 4
    heads: int = 8
    length: int = 128
    batch: int = 8
    vocab: int = 1024


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head = size.dim // size.heads
        self.ln1, self.ln2 = nn.LayerNorm(size.dim), nn.LayerNorm(size.dim)
        self.q, self.k, self.v = (nn.Linear(size.dim, size.dim) for _ in range(3))
        self.proj = nn.Linear(size.dim, size.dim)
        self.fc1, self.fc2 = nn.Linear(size.dim, 4 * size.dim), nn.Linear(4 * size.dim, size.dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        h = self.ln1(x)
        q, k, v = (f(h).view(batch, length, -1, self.head).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(batch, length, -1))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(size.vocab, size.dim)
        self.pos_emb = nn.Embedding(size.length, size.dim)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.ln_f = nn.LayerNorm(size.dim)
        self.head = nn.Linear(size.dim, size.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_emb(tokens) + self.pos_emb(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.ln_f(x))


def next_token(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
