"""A loop of ``accelerate``: accumulation, clipping, a schedule, a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shardfx as sx
from shardfx.integrations.accelerate import ParallelAccelerator

from . import on

MESHES = sx.Mesh(dp=2), sx.Mesh(tp=2)
SPECS = {"args.0": "dp, -", "targets.0": "dp, -", "0.weight": "tp, -"}
LARGEST, ACCUMULATED, BATCH, ROWS = 0.1, 2, 4, 46


def make() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, DataLoader[tuple[Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    data = TensorDataset(torch.randn(ROWS, 8).double(), torch.randn(ROWS, 4).double())
    return model, optimizer, scheduler, DataLoader(data, batch_size=BATCH)


def plain(steps: int, folder: Path) -> list[float]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    model, optimizer, scheduler, loader = accelerator.prepare(*make())
    done = resume(accelerator, folder)
    losses = []
    for _, (x, y) in zip(range(steps), accelerator.skip_first_batches(loader, done), strict=False):
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), LARGEST)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    save(accelerator, folder, done + steps)
    return losses


def ported(mesh: sx.Mesh, steps: int, folder: Path) -> list[float]:
    x, y = torch.zeros(BATCH, 8).double(), torch.zeros(BATCH, 4).double()
    hints = sx.Hints(args=(x,), loss=F.mse_loss, targets=(y,), specs=on(mesh, SPECS))
    accelerator = ParallelAccelerator(mesh=mesh, hints=hints, cpu=True, gradient_accumulation_steps=ACCUMULATED)
    model, optimizer, scheduler, loader = accelerator.prepare(*make())
    done = resume(accelerator, folder)
    losses = []
    for _, (x, y) in zip(range(steps), accelerator.skip_first_batches(loader, done), strict=False):
        with accelerator.accumulate(model):
            loss = model(x, y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), LARGEST)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    save(accelerator, folder, done + steps)
    return losses


def resume(accelerator: Accelerator, folder: Path) -> int:
    """How many steps were made before."""
    if not (folder / "done").exists():
        return 0
    accelerator.load_state(folder / "state")
    return int((folder / "done").read_text())


def save(accelerator: Accelerator, folder: Path, done: int) -> None:
    accelerator.wait_for_everyone()
    accelerator.save_state(folder / "state")
    if accelerator.is_main_process:
        (folder / "done").write_text(str(done))
    accelerator.wait_for_everyone()
