"""Data sets of which each rank reads its own tiles: these make up the crop, however it is turned."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import shardfx as sx
from shardfx.images.tile_dataset import scales

MESH = sx.Mesh(dp=2, h=2, w=2)
SPECS = {"args.0": "dp, -, h, w", "targets.0": "dp, h, w"}


def cross_entropy(out: Tensor, mask: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out, mask)


def planned(crop: tuple[int, ...] = (12, 12), mesh: sx.Mesh = MESH, batch: int = 3) -> sx.ParallelModule:
    """A model of images of three channels and masks, on tiles."""
    torch.manual_seed(0)
    x = torch.zeros(batch, 3, *crop, dtype=torch.float64)
    y = torch.zeros(batch, *crop, dtype=torch.int64)
    specs = {name: ", ".join(a if a in mesh.names else "-" for a in spec.split(", ")) for name, spec in SPECS.items()}
    hints = sx.Hints(args=(x,), targets=(y,), loss=cross_entropy, specs=specs)
    return sx.parallelize(nn.Conv2d(3, 4, 3, padding=1).double(), mesh, hints, virtual=True)


def scene(*sizes: int, seed: int = 0) -> tuple[Any, Any]:
    """An image whose pixels are all different, and a mask that says where each lies."""
    number = np.arange(sizes[0] * sizes[1]).reshape(sizes)
    return np.stack([number, number + 0.25, number + 0.5]).astype(np.float64) + 10_000 * seed, number % 4


def tiled(name: str, pm: sx.ParallelModule, tiles: Sequence[Tensor]) -> Tensor:
    """Tiles of one sample, by rank, as one."""
    value = pm.planned.input(name).value
    found = torch.full(value.shape[1:], -1, dtype=value.type.dtype)
    for rank, tile in enumerate(tiles):
        found[pm.tile(name, rank)[1:]] = tile
    return found


@pytest.fixture(scope="module")
def pm() -> sx.ParallelModule:
    return planned()


@pytest.mark.parametrize("augment", [("rot90",), ("hflip", "vflip", "rot90")])
def test_tiles_of_all_ranks_make_up_the_crop(pm: sx.ParallelModule, augment: tuple[str, ...]) -> None:
    scenes = [scene(31, 40), scene(12, 13, seed=1), scene(17, 12, seed=2)]
    whole = sx.images.TileDataset(scenes, pm, crop=(12, 12), augment=augment)
    parts = [sx.images.TileDataset(scenes, pm, crop=(12, 12), augment=augment, rank=rank) for rank in range(8)]
    seen = set()
    for epoch in range(3):
        sampler = whole.sampler(seed=5)
        sampler.set_epoch(epoch)
        for draw in sampler:
            x, y = whole[draw]
            seen.add(draw.orientation)
            tiles = [part[draw] for part in parts]
            assert torch.equal(tiled("args.0", pm, [t[0] for t in tiles]), x)
            assert torch.equal(tiled("targets.0", pm, [t[1] for t in tiles]), y)
            # the mask is turned as the image is, and all of it comes from the scene that was drawn
            place = x[0].long() - 10_000 * draw.scene
            assert torch.equal(place % 4, y) and torch.equal(x[2] - x[0], torch.full_like(x[0], 0.5))
            assert place.unique().numel() == 144
    allowed = {("rot90",): 4}.get(augment, 8)
    assert len(seen) <= allowed and (len(seen) > 1) == (allowed > 1)


def test_iterations_are_those_of_torch(pm: sx.ParallelModule) -> None:
    image, mask = scene(12, 12)
    data = sx.images.TileDataset([(image, mask)] * 60, pm, augment=("rot90",))
    turned = {data[draw][0].numpy().tobytes() for draw in data.sampler()}
    assert turned == {np.ascontiguousarray(np.rot90(image, k, (1, 2))).tobytes() for k in range(4)}
    data = sx.images.TileDataset([(image, mask)] * 60, pm, augment=("hflip", "vflip"))
    turned = {data[draw][0].numpy().tobytes() for draw in data.sampler()}
    ways: list[Any] = [(), (1,), (2,), (1, 2)]
    assert turned == {np.ascontiguousarray(np.flip(image, way)).tobytes() for way in ways}


def test_the_loop_of_a_dataloader_is_that_of_one_device(pm: sx.ParallelModule) -> None:
    data = sx.images.TileDataset([scene(20, 30, seed=i) for i in range(5)], pm, crop=(12, 12), augment=("rot90",))
    sampler = data.sampler(seed=1)
    loader = DataLoader(data, data.batch_size, sampler=sampler, num_workers=1)
    assert data.batch_size == 3 and len(sampler) == 6 and len(loader) == 2
    alone = nn.Conv2d(3, 4, 3, padding=1).double()
    alone.load_state_dict(pm.full_state_dict())
    losses = []
    for x, y in loader:
        loss = pm(x, y)
        torch.testing.assert_close(loss, cross_entropy(alone(x), y), rtol=1e-9, atol=1e-9)
        losses.append(loss.item())
    assert losses == [pm(x, y).item() for x, y in DataLoader(data, 3, sampler=sampler)]
    sampler.set_epoch(1)
    assert losses != [pm(x, y).item() for x, y in loader]


@pytest.mark.long
def test_a_rank_reads_its_tile_and_no_more(tmp_path: Path) -> None:
    class Watched:
        """An array that notes what is asked of it."""

        def __init__(self, array: Any) -> None:
            self.array, self.shape, self.asked = array, array.shape, [0]

        def __getitem__(self, window: Any) -> Any:
            self.asked[0] += self.array[window].nbytes
            return self.array[window]

    pm = planned((16, 16), sx.Mesh(h=2, w=2), batch=1)
    file = np.memmap(tmp_path / "image", np.float32, "w+", shape=(3, 40, 50))
    mask = np.zeros((40, 50), np.uint8)
    for rank in range(4):
        image = Watched(file)
        data = sx.images.TileDataset([(image, mask)] * 6, pm, crop=(16, 16), augment=("rot90", "hflip"), rank=rank)
        for x, y in DataLoader(data, 1, sampler=data.sampler()):
            assert x.shape == (1, 3, 8, 8) and x.dtype is torch.float64 and y.dtype is torch.int64
        assert data.bytes_read == 6 * (3 * 4 + 1) * 8 * 8 and image.asked[0] == 6 * 3 * 4 * 8 * 8
    whole = sx.images.TileDataset([(file, mask)] * 6, pm, crop=(16, 16))
    for _ in DataLoader(whole, 2, sampler=whole.sampler(), num_workers=1):
        pass
    assert whole.bytes_read == 4 * data.bytes_read


def test_a_mask_at_a_quarter_is_cropped_at_the_same_place() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 5, padding=2), nn.MaxPool2d(4))
    mesh = sx.Mesh(h=2, w=2)
    x, y = torch.zeros(1, 3, 16, 16, dtype=torch.float64), torch.zeros(1, 4, 4, dtype=torch.int64)
    hints = sx.Hints(args=(x,), targets=(y,), loss=cross_entropy, specs={"args.0": "-, -, h, w"})
    pm = sx.parallelize(model.double(), mesh, hints, virtual=True)
    image, place = np.zeros((3, 40, 52)), np.arange(130).reshape(10, 13)
    image[:] = np.repeat(np.repeat(place, 4, 0), 4, 1)
    how: dict[str, Any] = {"crop": (16, 16), "scaled": ("targets.0",)}
    data = sx.images.TileDataset([(image, place)] * 8, pm, augment=("rot90", "vflip"), **how)
    for image, mask in (data[draw] for draw in data.sampler()):
        assert torch.equal(image[0, ::4, ::4].long(), mask)
    with pytest.raises(sx.Error, match=r"scene 0 does not fit targets\.0"):
        sx.images.TileDataset([(np.zeros((3, 40, 52)), np.zeros((10, 12)))], pm, **how)
    with pytest.raises(sx.Error, match=r"is targets\.0 an image of another scale?") as caught:
        sx.images.TileDataset([(image, place)], pm, crop=(16, 16))
    assert "labels=('targets.0',)" in str(caught.value)
    fixed = sx.images.TileDataset(
        [(image, place[:4, :4])], pm, crop=(16, 16), augment=("rot90",), labels=("targets.0",)
    )
    assert all(torch.equal(fixed[draw][1], torch.from_numpy(place[:4, :4])) for draw in fixed.sampler())
    with pytest.raises(sx.Error, match=r"args\.0 is of no scale"):
        scales((3, 16, 12), (16, 16), "args.0", True, True)


@pytest.mark.long
def test_labels_and_volumes() -> None:
    class Volume(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv3d(1, 2, 3, padding=1), nn.Linear(2, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.conv(x).mean((2, 3, 4)))

    x, y = torch.zeros(2, 1, 6, 8, 8, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    mesh = sx.Mesh(h=2, w=2)
    hints = sx.Hints(args=(x,), targets=(y,), loss=cross_entropy, specs={"args.0": "-, -, h, w, -"})
    pm = sx.parallelize(Volume().double(), mesh, hints, virtual=True)
    scan = torch.arange(7 * 9 * 11).reshape(1, 7, 9, 11).double()
    data = sx.images.TileDataset(
        [(scan, 3), (scan, np.int32(4))], pm, crop=(6, 8, 8), augment=("dflip", "hflip", "rot90")
    )
    for volumes, labels in DataLoader(data, 2, sampler=data.sampler(shuffle=False)):
        assert torch.equal(volumes[0], scan[:, 0:6, 0:8, 1:9]) and labels.tolist() == [3, 4]
        pm(volumes, labels)
    parts = [
        sx.images.TileDataset([(scan, 3)] * 9, pm, crop=(6, 8, 8), augment=("dflip", "rot90"), rank=r) for r in range(4)
    ]
    whole = sx.images.TileDataset([(scan, 3)] * 9, pm, crop=(6, 8, 8), augment=("dflip", "rot90"))
    for draw in whole.sampler():
        assert torch.equal(tiled("args.0", pm, [part[draw][0] for part in parts]), whole[draw][0])


def test_the_last_batch_is_filled_or_left_out(pm: sx.ParallelModule) -> None:
    data = sx.images.TileDataset([scene(12, 12, seed=i) for i in range(4)], pm)
    assert [draw.scene for draw in data.sampler(shuffle=False)] == [0, 1, 2, 3, 0, 1]
    assert [draw.scene for draw in data.sampler(shuffle=False, drop_last=True)] == [0, 1, 2]
    assert sorted({draw.scene for draw in data.sampler()}) == [0, 1, 2, 3]
    few = sx.images.TileDataset([scene(12, 12)], pm)
    assert [draw.scene for draw in few.sampler()] == [0, 0, 0]
    with pytest.raises(sx.Error, match="fewer samples than one batch"):
        few.sampler(drop_last=True)


def test_an_image_that_is_decoded_whole(pm: sx.ParallelModule) -> None:
    image, mask = scene(20, 20)
    decoded = sx.images.WholeImage(lambda: image.astype(">f4"), (3, 20, 20))
    data = sx.images.TileDataset([(decoded, mask)], pm, crop=(12, 12))
    assert torch.equal(data[0][0], torch.from_numpy(image[:, 4:16, 4:16]))
    assert data.bytes_read == 3 * 20 * 20 * 4 + 12 * 12 * 8
    wrong = sx.images.TileDataset([(sx.images.WholeImage(lambda: image[:2], (3, 20, 20)), mask)], pm, crop=(12, 12))
    with pytest.raises(sx.Error, match="decoded to another shape"):
        wrong[0]


# ---- bad input ---------------------------------------------------------------------------------------------


WRONG: dict[str, tuple[list[Any], dict[str, Any]]] = {
    r"scene 1 does not fit args\.0": ([scene(12, 12), scene(12, 14)], {}),
    "scene 1 is smaller than a crop": ([scene(12, 12), scene(11, 40)], {"crop": (12, 12)}),
    r"scene 0 does not fit targets\.0": ([(scene(20, 20)[0], scene(20, 21)[1])], {"crop": (12, 12)}),
    "scene 0 has other arrays": ([scene(12, 12)[:1]], {}),
    "another size than the model was planned for": ([scene(12, 12)], {"crop": (8, 8)}),
    r"there is no input 'targets\.1'": ([scene(12, 12)], {"names": ("args.0", "targets.1")}),
    "no augmentation 'blur'": ([scene(12, 12)], {"augment": ("blur",)}),
    "a crop does not allow 'dflip'": ([scene(12, 12)], {"augment": ("dflip",)}),
}


@pytest.mark.parametrize("what", WRONG)
def test_scenes_and_options_that_do_not_fit(what: str, pm: sx.ParallelModule) -> None:
    scenes, options = WRONG[what]
    with pytest.raises(sx.Error, match=what):
        sx.images.TileDataset(scenes, pm, **options)


def test_crops_of_two_sizes_are_not_turned_and_ranks_share_a_batch(pm: sx.ParallelModule) -> None:
    oblong = planned((12, 10), sx.Mesh(h=2))
    with pytest.raises(sx.Error, match="a crop does not allow 'rot90'"):
        sx.images.TileDataset([scene(12, 12)], oblong, crop=(12, 10), augment=("rot90",))
    part = sx.images.TileDataset([scene(12, 12)], pm, rank=5)
    with pytest.raises(sx.Error, match="ranks share the batch"):
        part[0]
    with pytest.raises(IndexError):
        sx.images.TileDataset([scene(12, 12)], pm)[1]


@pytest.mark.long
def test_tiles_and_shares_that_are_empty() -> None:
    tall = planned((3, 12), sx.Mesh(h=4), batch=1)
    image, mask = scene(5, 12)
    parts = [sx.images.TileDataset([(image, mask)], tall, crop=(3, 12), rank=rank) for rank in range(4)]
    assert [part[0][0].shape[1] for part in parts] == [1, 1, 1, 0]
    assert torch.equal(tiled("args.0", tall, [part[0][0] for part in parts]), torch.from_numpy(image[:, 1:4]))
    few = planned((12, 12), sx.Mesh(dp=2), batch=1)
    with pytest.raises(sx.Error, match="rank 1 has no sample of a batch"):
        sx.images.TileDataset([scene(12, 12)], few, rank=1)


def test_a_file_sharded_short(pm: sx.ParallelModule, tmp_path: Path) -> None:
    mask = scene(900, 900)[1]
    np.zeros((3, 900, 900)).tofile(tmp_path / "image")
    image = np.memmap(tmp_path / "image", np.float64, "r", shape=(3, 900, 900))
    data = sx.images.TileDataset([(image, mask)], pm, crop=(12, 12))
    assert not data[0][0].any()
    os.truncate(tmp_path / "image", 8 * 900 * 900)
    with pytest.raises(sx.Error, match="the file of array 0 of scene 0 is truncated"):
        data[0]

    class Short:
        """What a reader of a short file may give."""

        shape = (3, 20, 20)

        def __getitem__(self, window: Any) -> Any:
            return np.zeros(self.shape)[window][:, :5]

    def missing() -> Any:
        raise FileNotFoundError("no such image")

    for image, what in (
        (Short(), "another window than it was asked for"),
        (sx.images.WholeImage(missing, (3, 20, 20)), "array 0 of scene 0 cannot be read"),
    ):
        with pytest.raises(sx.Error, match=what):
            sx.images.TileDataset([(image, scene(20, 20)[1])], pm, crop=(12, 12))[0]
