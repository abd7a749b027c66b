"""A loop in timm's manner: a vision transformer with drop-path, mixup, cutmix, decay by layer, an average by hand."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx

from . import on, save, saved

MESHES = sx.Mesh(dp=2), sx.Mesh(tp=2)
SPECS = {"args.0": "dp, -, -, -", "targets.0": "dp, -", "blocks.*.attn.proj.weight": "-, tp"}
SPECS |= {"blocks.*.attn.qkv.weight": "tp, -", "blocks.*.mlp.fc1.weight": "tp, -", "blocks.*.mlp.fc2.weight": "-, tp"}
ROWS, CLASSES, WIDTH, HEADS, DEPTH, IMAGE, PATCH = 4, 5, 16, 4, 2, 8, 4


class DropPath(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        kept = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1 - self.rate)
        return x * kept.div_(1 - self.rate)


class LayerScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(0.1 * torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.norm1, self.attn, self.ls1 = nn.LayerNorm(WIDTH), Attention(), LayerScale()
        self.norm2, self.mlp, self.ls2 = nn.LayerNorm(WIDTH), Mlp(), LayerScale()
        self.drop_path1, self.drop_path2 = DropPath(rate), DropPath(rate)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class VisionTransformer(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.cls_token = nn.Parameter(1e-6 * torch.randn(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, (IMAGE // PATCH) ** 2 + 1, WIDTH))
        self.blocks = nn.Sequential(*(Block(rate * i / (DEPTH - 1)) for i in range(DEPTH)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def no_weight_decay(self) -> set[str]:
        return {"pos_embed", "cls_token"}

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """By layer, the first ones with less of the rate; decay for matrices alone."""
    groups: dict[tuple[int, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        layer = int(name.split(".")[1]) + 1 if name.startswith("blocks.") else 0 if "norm" not in name else DEPTH + 1
        decays = parameter.ndim > 1 and name not in model.no_weight_decay()
        lr = 2e-3 * 0.75 ** (DEPTH + 1 - layer)
        made = groups.setdefault((layer, decays), {"params": [], "weight_decay": 0.05 * decays, "lr": lr})
        made["params"].append(parameter)
    return list(groups.values())


def mixed(x: Tensor, y: Tensor, random: np.random.RandomState) -> tuple[Tensor, Tensor]:
    """Mixup or cutmix with the other end of the batch, in place as timm has it; the targets likewise."""
    share = random.beta(0.8, 0.8)
    if random.rand() < 0.5:
        side, (top, left) = int(IMAGE * math.sqrt(1 - share)), random.randint(0, IMAGE, 2)
        box = slice(top, top + side), slice(left, left + side)
        x[:, :, box[0], box[1]] = x.flip(0)[:, :, box[0], box[1]]
        share = 1 - x[0, 0, box[0], box[1]].numel() / IMAGE**2
    else:
        x.mul_(share).add_(x.flip(0).mul_(1 - share))
    soft = F.one_hot(y, CLASSES) * 0.9 + 0.1 / CLASSES
    return x, soft * share + soft.flip(0) * (1 - share)


def soft_target_cross_entropy(out: Tensor, target: Tensor) -> Tensor:
    return torch.sum(-target * F.log_softmax(out, -1), -1).mean()


def batches(done: int, steps: int) -> list[tuple[Tensor, Tensor]]:
    made, random = torch.Generator().manual_seed(1), np.random.RandomState(1)
    every = []
    for _ in range(done + steps):
        x = torch.randn(ROWS, 3, IMAGE, IMAGE, generator=made).double()
        every.append(mixed(x, torch.randint(CLASSES, (ROWS,), generator=made), random))
    return every[done:]


def begin(folder: Path, rate: float) -> tuple[VisionTransformer, torch.optim.Optimizer, Any, dict[str, Any]]:
    """From scratch, or from the checkpoint; the same for both."""
    torch.manual_seed(0)
    model = VisionTransformer(rate).double()
    optimizer = torch.optim.AdamW(param_groups(model), eps=1e-4)
    checkpoint = saved(folder)
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    last = checkpoint.get("step", 0) - 1
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3), last)
    return model, optimizer, warm_up, checkpoint


class ModelEma:
    """As timm's: a copy of the model, whose state is moved towards the model's."""

    def __init__(self, model: nn.Module) -> None:
        self.module = copy.deepcopy(model).eval()

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for kept, new in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            kept.copy_(0.9 * kept + 0.1 * new)


def plain(steps: int, folder: Path, rate: float = 0.0) -> list[float]:
    model, optimizer, warm_up, checkpoint = begin(folder, rate)
    average = ModelEma(model)
    if checkpoint:
        average.module.load_state_dict(checkpoint["average"])
    done, losses = checkpoint.get("step", 0), []
    for x, y in batches(done, steps):
        out = model(x)
        loss = soft_target_cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        warm_up.step()
        average.update(model)
        right = (out.argmax(-1) == y.argmax(-1)).double().mean()
        losses += [loss.item(), right.item(), evaluate(average.module, x)]
    state = {"model": model.state_dict(), "average": average.module.state_dict(), "optimizer": optimizer.state_dict()}
    save({**state, "step": done + steps}, folder)
    return losses


def ported(mesh: sx.Mesh, steps: int, folder: Path, rate: float = 0.0) -> list[float]:
    model, optimizer, warm_up, checkpoint = begin(folder, rate)
    ((x, y),) = batches(0, 1)
    hints = sx.Hints(args=(x,), loss=soft_target_cross_entropy, targets=(y,), specs=on(mesh, SPECS))
    pm = sx.parallelize(model, mesh, hints, optimizer=optimizer)
    average = ModelEma(pm)
    if checkpoint:
        average.module.load_full_state_dict(checkpoint["average"])
    done, losses = checkpoint.get("step", 0), []
    for x, y in batches(done, steps):
        loss, out = pm(x, y, with_results=True)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(pm.parameters(), 0.5)
        optimizer.step()
        warm_up.step()
        average.update(pm)
        right = (out.argmax(-1) == y.argmax(-1)).double().mean()
        losses += [loss.item(), right.item(), evaluate(average.module, x)]
    state = {"model": pm.full_state_dict(), "average": average.module.full_state_dict()}
    state |= {"optimizer": pm.full_optimizer_state_dict(optimizer)}
    save({**state, "step": done + steps}, folder)
    return losses


def evaluate(average: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        return float(average(x).square().mean())
