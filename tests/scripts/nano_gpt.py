"""A loop in nanoGPT's manner: a model that gives logits and loss, random batches, decay groups, a warm-up."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx

from . import on, save, saved
from .text import ROOT, VOCAB

MESHES = sx.Mesh(dp=2), sx.Mesh(tp=2)
SPECS = {"args.*": "dp, -", "block.qkv.weight": "tp, -", "block.out.weight": "-, tp", "embedding.weight": "tp, -"}
LENGTH, WIDTH, HEADS, ROWS, ACCUMULATED = 12, 16, 4, 4, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (each.view(b, t, HEADS, -1).transpose(1, 2) for each in self.qkv(self.norm(x)).split(WIDTH, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(b, t, WIDTH))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.block, self.norm = Block(), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(idx) + self.places(torch.arange(idx.shape[1], device=idx.device))
        logits = self.head(self.norm(self.block(x)))
        return logits, F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        decayed = [p for p in self.parameters() if p.dim() >= 2]
        others = [p for p in self.parameters() if p.dim() < 2]
        return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=1e-2, eps=1e-4)


def get_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Of the whole batch, the same on all ranks."""
    data = torch.tensor(list((ROOT / "LICENSE").read_bytes())) % VOCAB
    starts = torch.randint(len(data) - LENGTH - 1, (ROWS,), generator=generator).tolist()
    return torch.stack([data[i : i + LENGTH] for i in starts]), torch.stack([data[i + 1 :][:LENGTH] for i in starts])


def get_lr(step: int) -> float:
    return 1e-2 * min(1.0, (step + 1) / 2) * (0.55 + 0.45 * math.cos(step / 8))


def begin(folder: Path) -> tuple[GPT, torch.optim.Optimizer, torch.Generator, int]:
    """From scratch, or from the checkpoint; the same for both."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = GPT().double()
    optimizer = model.configure_optimizers()
    checkpoint = saved(folder)
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        generator.set_state(checkpoint["generator"])
    return model, optimizer, generator, checkpoint.get("step", 0)


def plain(steps: int, folder: Path) -> list[float]:
    model, optimizer, generator, done = begin(folder)
    losses = []
    for step in range(done, done + steps):
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = get_lr(step)
        for _ in range(ACCUMULATED):
            x, y = get_batch(generator)
            _, loss = model(x, y)
            (loss / ACCUMULATED).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    state: dict[str, Any] = {"step": done + steps, "generator": generator.get_state()}
    save({**state, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder)
    return losses


def ported(mesh: sx.Mesh, steps: int, folder: Path) -> list[float]:
    model, optimizer, generator, done = begin(folder)
    args = get_batch(torch.Generator())
    hints = sx.Hints(args=args, loss=lambda out: out[1], specs=on(mesh, SPECS))
    pm = sx.parallelize(model, mesh, hints, optimizer=optimizer)
    losses = []
    for step in range(done, done + steps):
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = get_lr(step)
        for _ in range(ACCUMULATED):
            x, y = get_batch(generator)
            loss = pm(x, y)
            (loss / ACCUMULATED).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(pm.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    state: dict[str, Any] = {"step": done + steps, "generator": generator.get_state()}
    save({**state, "model": pm.full_state_dict(), "optimizer": pm.full_optimizer_state_dict(optimizer)}, folder)
    return losses
