"""A loop in timm's manner: a residual network with batch norms and drop-path, mixup, label smoothing, an average."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardfx as sx

from . import on, save, saved

MESHES = sx.Mesh(dp=2), sx.Mesh(tp=2)
SPECS = {"args.0": "dp, -, -, -", "targets.0": "dp, -", "blocks.*.up.weight": "tp, -, -, -"}
ROWS, CLASSES = 4, 5


class DropPath(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        kept = x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(1 - self.rate)
        return x * kept / (1 - self.rate)


class Block(nn.Module):
    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.up, self.first = nn.Conv2d(width, 2 * width, 3, padding=1, bias=False), nn.BatchNorm2d(2 * width)
        self.down, self.second = nn.Conv2d(2 * width, width, 1, bias=False), nn.BatchNorm2d(width)
        self.drop_path = DropPath(rate)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.drop_path(self.second(self.down(F.relu(self.first(self.up(x)))))))


class Net(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, 8, 3, 2, 1), nn.Sequential(Block(8, rate), Block(8, rate))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def mixup(x: Tensor, y: Tensor, random: np.random.RandomState) -> tuple[Tensor, Tensor]:
    """Each image with that from the other end of the batch, and so the targets."""
    share = random.beta(0.4, 0.4)
    soft = F.one_hot(y, CLASSES) * 0.9 + 0.1 / CLASSES
    return x * share + x.flip(0) * (1 - share), soft * share + soft.flip(0) * (1 - share)


def soft_target_cross_entropy(out: Tensor, target: Tensor) -> Tensor:
    return -(target * out.log_softmax(-1)).sum(-1).mean()


def batches(done: int, steps: int) -> list[tuple[Tensor, Tensor]]:
    made, random = torch.Generator().manual_seed(1), np.random.RandomState(1)
    every = []
    for _ in range(done + steps):
        x = torch.randn(ROWS, 3, 8, 8, generator=made).double()
        every.append(mixup(x, torch.randint(CLASSES, (ROWS,), generator=made), random))
    return every[done:]


def begin(folder: Path, rate: float) -> tuple[Net, torch.optim.Optimizer, dict[str, Any]]:
    """From scratch, or from the checkpoint; the same for both."""
    torch.manual_seed(0)
    model = Net(rate).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    checkpoint = saved(folder)
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    return model, optimizer, checkpoint


def plain(steps: int, folder: Path, rate: float = 0.0) -> list[float]:
    model, optimizer, checkpoint = begin(folder, rate)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    if checkpoint:
        average.module.load_state_dict(checkpoint["average"])
        average.n_averaged.copy_(checkpoint["n_averaged"])
    done, losses = checkpoint.get("step", 0), []
    for x, y in batches(done, steps):
        loss = soft_target_cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        losses += [loss.item(), evaluate(average, x)]
    state = {"model": model.state_dict(), "average": average.module.state_dict(), "optimizer": optimizer.state_dict()}
    save({**state, "n_averaged": average.n_averaged, "step": done + steps}, folder)
    return losses


def ported(mesh: sx.Mesh, steps: int, folder: Path, rate: float = 0.0) -> list[float]:
    model, optimizer, checkpoint = begin(folder, rate)
    ((x, y),) = batches(0, 1)
    hints = sx.Hints(args=(x,), loss=soft_target_cross_entropy, targets=(y,), specs=on(mesh, SPECS))
    pm = sx.parallelize(model, mesh, hints, optimizer=optimizer)
    average = AveragedModel(pm, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    if checkpoint:
        average.module.load_full_state_dict(checkpoint["average"])
        average.n_averaged.copy_(checkpoint["n_averaged"])
    done, losses = checkpoint.get("step", 0), []
    for x, y in batches(done, steps):
        loss = pm(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(pm)
        losses += [loss.item(), evaluate(average, x)]
    state = {"model": pm.full_state_dict(), "average": average.module.full_state_dict()}
    state |= {"optimizer": pm.full_optimizer_state_dict(optimizer)}
    save({**state, "n_averaged": average.n_averaged, "step": done + steps}, folder)
    return losses


def evaluate(average: AveragedModel, x: Tensor) -> float:
    average.eval()
    with torch.no_grad():
        return float(average(x).square().mean())
