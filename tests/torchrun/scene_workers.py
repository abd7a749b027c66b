"""Ranks that read the tiles of scenes (see :mod:`.workers`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import shardfx as sx

from .workers import worker

CROP, BATCH = 12, 3
AUGMENT = ("hflip", "vflip", "rot90")


def planned(virtual: bool | None = None) -> sx.ParallelModule:
    """A model of images and masks, on tiles of a batch that is sharded unevenly."""
    torch.manual_seed(0)
    x = torch.zeros(BATCH, 3, CROP, CROP, dtype=torch.float64)
    y = torch.zeros(BATCH, CROP, CROP, dtype=torch.int64)
    specs = {"args.0": "dp, -, h, -", "targets.0": "dp, h, -"}
    hints = sx.Hints(args=(x,), targets=(y,), loss=F.cross_entropy, specs=specs)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)).double()
    return sx.parallelize(model, sx.Mesh(dp=2, h=2), hints, virtual=virtual)


def scenes(folder: str) -> list[tuple[Any, Any]]:
    """Images in files, and their masks."""
    found = []
    for i in range(4):
        path, numbers = Path(folder) / f"{i}.npy", np.random.default_rng(i)
        if dist.get_rank() == 0:
            np.save(path, numbers.standard_normal((3, 20 + i, 30)))
        dist.barrier()
        found.append((np.load(path, mmap_mode="r"), np.random.default_rng(i).integers(0, 4, (20 + i, 30))))
    return found


def losses(pm: sx.ParallelModule, data: sx.images.TileDataset, workers: int) -> list[float]:
    """Of two epochs of the loop that everyone writes."""
    sampler, found = data.sampler(seed=3), []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, data.batch_size, sampler=sampler, num_workers=workers):
            loss = pm(x, y)
            loss.backward()
            found.append(loss.item())
    return found


@worker
def the_loop_is_that_of_virtual_ranks(folder: str) -> None:
    """Losses and gradients of tiles, read by each rank, are those of whole samples on virtual ranks."""
    real, virtual = planned(), planned(virtual=True)
    given = scenes(folder)
    mine, all_of_it = (sx.images.TileDataset(given, pm, crop=(CROP, CROP), augment=AUGMENT) for pm in (real, virtual))
    assert losses(real, mine, 1) == pytest.approx(losses(virtual, all_of_it, 0), abs=1e-12)
    wanted = virtual.full_grads()
    for name, gradient in real.full_grads().items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-9, atol=1e-9)
    read: list[Any] = [None] * 4
    dist.all_gather_object(read, mine.bytes_read)
    assert sum(read) == all_of_it.bytes_read
    assert read == [2 * 2 * share * (3 + 1) * 6 * 12 * 8 for share in (2, 2, 1, 1)]  # epochs, batches, samples


@worker
def images_are_decoded_once() -> None:
    """By one rank of each group, though their reader gives all or nothing; and what fails there fails everywhere."""
    image, decoded = np.random.default_rng(0).standard_normal((3, 700, 900)), [0]

    def decode() -> Any:
        decoded[0] += 1
        return image

    mask = np.random.default_rng(1).integers(0, 4, (700, 900))
    scene = (sx.images.WholeImage(decode, image.shape), mask)
    real, virtual = planned(), planned(virtual=True)
    data = sx.images.TileDataset([scene] * 4, real, crop=(CROP, CROP), augment=AUGMENT)
    plain = sx.images.TileDataset([(image, mask)] * 4, virtual, crop=(CROP, CROP), augment=AUGMENT)
    wanted = losses(virtual, plain, 0)
    assert losses(real, data, 1) == pytest.approx(wanted, abs=1e-12)
    assert decoded == [0] and losses(real, data, 0) == pytest.approx(wanted, abs=1e-12)
    rank, share = dist.get_rank(), (2, 2, 1, 1)[dist.get_rank()]
    assert decoded == [0 if rank % 2 else 2 * 2 * share]
    masks, images = 2 * 2 * 2 * share * 6 * 12 * 8, 0 if rank % 2 else 2 * 2 * 2 * share * image.nbytes
    assert data.bytes_read == masks + images


@worker
def what_is_decoded_badly_is_an_error() -> None:
    """On all ranks of the group, at once."""

    def decode() -> Any:
        raise OSError("no image")

    pm = planned()
    scene = (sx.images.WholeImage(decode, (3, 20, 20)), np.zeros((20, 20), np.int64))
    data = sx.images.TileDataset([scene] * 3, pm, crop=(CROP, CROP))
    reads = DataLoader(data, data.batch_size, sampler=data.sampler())
    if dist.get_rank() % 2:
        with pytest.raises(sx.Error, match="could not be read") as caught:
            next(iter(reads))
        assert "OSError: no image" in str(caught.value) and "which decodes it for ranks" in str(caught.value)
    else:
        with pytest.raises(sx.Error, match=r"array 0 of scene \d cannot be read") as caught:
            next(iter(reads))
        assert "OSError: no image" in str(caught.value) and isinstance(caught.value.__cause__, OSError)


@worker
def a_scene_is_predicted_by_all(folder: str) -> None:
    """Window by window; one process writes, and all know which windows are done."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(4, 2, 3, padding=1)).double().eval()
    x = torch.zeros(1, 3, 16, 24, dtype=torch.float64)
    pm = sx.parallelize(model, sx.Mesh(h=2, w=2), sx.Hints(args=(x,), specs={"args.0": "-, -, h, w"}))
    scene = torch.randn(3, 46, 24, dtype=torch.float64)
    out, state = np.zeros((2, 23, 12)) if dist.get_rank() == 0 else None, Path(folder) / "state"
    sx.images.predict_scene(pm, scene, out, state=state, progress=False)
    if out is not None:
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(out), model(scene[None])[0], rtol=1e-9, atol=1e-9)
    missing = Path(folder) / ("state" if dist.get_rank() else "none")
    with pytest.raises(sx.Error, match="windows"):
        sx.images.predict_scene(pm, scene, out, state=missing, progress=False)


@worker
def draws_that_differ_are_an_error() -> None:
    """Crops and iterations of another seed on one rank would be another image's tiles."""
    pm = planned()
    scene = (np.zeros((3, 20, 20)), np.zeros((20, 20), np.int64))
    data = sx.images.TileDataset([scene] * 3, pm, crop=(CROP, CROP))
    with pytest.raises(sx.Error, match=r"seed") as caught:
        next(iter(data.sampler(seed=dist.get_rank() // 3)))
    assert "seed 1" in str(caught.value) and "seed 0" in str(caught.value)
    augment = ("hflip",) if dist.get_rank() == 2 else ()
    other = sx.images.TileDataset([scene], pm, crop=(CROP, CROP), augment=augment)
    with pytest.raises(sx.Error, match="hflip"):
        next(iter(other.sampler()))
    with pytest.raises(sx.Error, match="ranks share the batch"):
        data[0]
