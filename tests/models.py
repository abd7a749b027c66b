"""Models as their users write them: no line here knows of shardfx."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, DIM, HEADS, KV_HEADS, HIDDEN, LENGTH = 80, 48, 8, 4, 96, 16


class MLP3(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(32, 64)
        self.fc2 = nn.Linear(64, 48)
        self.fc3 = nn.Linear(48, 16)
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(F.relu(self.fc1(x)))
        x = self.drop(F.relu(self.fc2(x)))
        return self.fc3(x)


class GPTBlock(nn.Module):
    """Pre-norm attention and MLP. ``fused``: one Linear for q, k and v, split in three."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.ln1 = nn.LayerNorm(DIM)
        if fused:
            self.qkv = nn.Linear(DIM, 3 * DIM)
        else:
            self.q = nn.Linear(DIM, DIM)
            self.k = nn.Linear(DIM, DIM)
            self.v = nn.Linear(DIM, DIM)
        self.proj = nn.Linear(DIM, DIM)
        self.ln2 = nn.LayerNorm(DIM)
        self.fc1 = nn.Linear(DIM, HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        h = self.ln1(x)
        qkv = self.qkv(h).split(DIM, dim=-1) if self.fused else (self.q(h), self.k(h), self.v(h))
        q, k, v = (t.view(batch, length, HEADS, -1).transpose(1, 2) for t in qkv)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(batch, length, DIM))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self, fused: bool, layers: int = 2) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(VOCAB, DIM)
        self.pos_emb = nn.Embedding(LENGTH, DIM)
        self.layers = nn.ModuleList(GPTBlock(fused) for _ in range(layers))
        self.ln_f = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_emb(tokens) + self.pos_emb(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.ln_f(x))


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class LlamaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        head = DIM // HEADS
        self.attn_norm = RMSNorm(DIM)
        self.wq = nn.Linear(DIM, HEADS * head, bias=False)
        self.wk = nn.Linear(DIM, KV_HEADS * head, bias=False)
        self.wv = nn.Linear(DIM, KV_HEADS * head, bias=False)
        self.wo = nn.Linear(HEADS * head, DIM, bias=False)
        self.mlp_norm = RMSNorm(DIM)
        self.w1 = nn.Linear(DIM, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, DIM, bias=False)
        self.w3 = nn.Linear(DIM, HIDDEN, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        h = self.attn_norm(x)
        q = rotate(self.wq(h).view(batch, length, HEADS, -1).transpose(1, 2), cos, sin)
        k = rotate(self.wk(h).view(batch, length, KV_HEADS, -1).transpose(1, 2), cos, sin)
        v = self.wv(h).view(batch, length, KV_HEADS, -1).transpose(1, 2)
        k = k.repeat_interleave(HEADS // KV_HEADS, dim=1)
        v = v.repeat_interleave(HEADS // KV_HEADS, dim=1)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(a.transpose(1, 2).reshape(batch, length, -1))
        h = self.mlp_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Llama(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(LlamaBlock() for _ in range(layers))
        self.norm = RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        half = DIM // HEADS // 2
        angles = torch.outer(torch.arange(LENGTH), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_emb(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


class ResBlock(nn.Module):
    def __init__(self, cin: int, cout: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        self.down = nn.Conv2d(cin, cout, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(h)) + self.down(x))


class ResNet(nn.Module):
    def __init__(self, classes: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(ResBlock(16, 16, 1), ResBlock(16, 32, 2))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.bn(self.stem(x))))
        return self.fc(self.pool(x).flatten(1))


class DoubleConv(nn.Module):
    def __init__(self, cin: int, cout: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, padding=1)
        self.norm1 = nn.GroupNorm(4, cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, padding=1)
        self.norm2 = nn.GroupNorm(4, cout)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class UNet(nn.Module):
    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.down1 = DoubleConv(3, 8)
        self.down2 = DoubleConv(8, 16)
        self.pool = nn.MaxPool2d(2)
        self.bottom = DoubleConv(16, 32)
        self.up2 = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.dec2 = DoubleConv(32, 16)
        self.up1 = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.dec1 = DoubleConv(16, 8)
        self.out = nn.Conv2d(8, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(self.pool(a))
        x = self.up2(self.bottom(self.pool(b)))
        x = self.up1(self.dec2(torch.cat((x, b), dim=1)))
        return self.out(self.dec1(torch.cat((x, a), dim=1)))


class Language(nn.Module):
    """Logits of the next token from each token alone."""

    def __init__(self, words: int = 40, width: int = 8, padding_idx: int | None = None) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(words, width, padding_idx), nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.embed(x))))


def next_tokens(out: Tensor, y: Tensor) -> Tensor:
    """The mean loss of the tokens that count."""
    return F.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=-100)
