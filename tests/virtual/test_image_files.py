"""Scenes in files: windows of a GeoTIFF, a NIfTI volume, an HDF5 file and a zarr group are those of the array in it."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import nibabel
import numpy as np
import pytest
import rasterio
import torch
import zarr
from torch import nn

import shardfx as sx


def tiff(path: Path, image: Any) -> Path:
    """Write bands as a tiled GeoTIFF."""
    count, height, width = image.shape
    how = {"tiled": True, "blockxsize": 16, "blockysize": 16, "transform": rasterio.Affine(10, 0, 5, 0, -10, 7)}
    with rasterio.open(
        path, "w", "GTiff", count=count, height=height, width=width, dtype=image.dtype, crs="EPSG:32633", **how
    ) as file:
        file.write(image)
    return path


def nifti(path: Path, volume: Any) -> Path:
    """Write an array (X, Y, Z) or (X, Y, Z, C)."""
    nibabel.Nifti1Image(volume, np.eye(4)).to_filename(path)
    return path


def numbered(*shape: int) -> Any:
    return np.arange(np.prod(shape)).reshape(shape)


def test_windows_of_a_geotiff(tmp_path: Path) -> None:
    image = numbered(3, 45, 50).astype(np.uint16)
    scene = sx.images.GeoTiff(tiff(tmp_path / "image.tif", image))
    assert scene.shape == (3, 45, 50)
    window = (slice(1, 3), slice(7, 33), slice(20, 50))
    np.testing.assert_array_equal(scene[window], image[window])
    band = sx.images.GeoTiff(tmp_path / "image.tif", channel=2)
    assert band.shape == (45, 50)
    np.testing.assert_array_equal(band[window[1:]], image[2][window[1:]])
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(scene))[window], image[window])


def test_windows_of_a_nifti_volume(tmp_path: Path) -> None:
    name = "scan.nii.gz"
    volume = numbered(6, 7, 8).astype(np.int16)
    scene = sx.images.Nifti(nifti(tmp_path / name, volume))
    assert scene.shape == (1, 8, 7, 6)
    window = (slice(0, 1), slice(2, 7), slice(1, 4), slice(3, 6))
    np.testing.assert_array_equal(scene[window], volume.T[None][window])
    label = sx.images.Nifti(tmp_path / name, channel=0)
    assert label.shape == (8, 7, 6)
    np.testing.assert_array_equal(label[window[1:]], volume.T[window[1:]])
    several = sx.images.Nifti(nifti(tmp_path / f"four-{name}", numbered(6, 7, 8, 2).astype(np.float32)))
    assert several.shape == (2, 8, 7, 6)
    window = (slice(1, 2), *window[1:])
    np.testing.assert_array_equal(several[window], numbered(6, 7, 8, 2).T[window])


def hdf5(path: Path, image: Any) -> Any:
    with h5py.File(path, "w") as file:
        file["image"] = image
    return h5py.File(path)["image"]


def zarred(path: Path, image: Any) -> Any:
    made = zarr.open(str(path), mode="w", shape=image.shape, chunks=(1, 8, 8), dtype=image.dtype)
    made[:] = image
    return zarr.open(str(path), mode="r")


FILES: dict[str, Callable[[Path, Any], Any]] = {
    "GeoTIFF": lambda path, image: sx.images.GeoTiff(tiff(path, image)),
    "HDF5": hdf5,
    "zarr": zarred,
}


@pytest.mark.parametrize("kind", FILES)
def test_tiles_of_a_file(kind: str, tmp_path: Path) -> None:
    image = numbered(3, 30, 33).astype(np.float32)
    x = torch.zeros(1, 3, 20, 20)
    hints = sx.Hints(args=(x,), specs={"args.0": "-, -, h, w"})
    pm = sx.parallelize(nn.Conv2d(3, 1, 3, padding=1), sx.Mesh(h=2, w=2), hints, virtual=True)
    scene = FILES[kind](tmp_path / "file", image)
    for rank in range(4):
        data = sx.images.TileDataset([(scene,)], pm, names=("args.0",), crop=(20, 20), rank=rank)
        (tile,) = data[0]
        np.testing.assert_array_equal(tile.numpy(), image[:, 5:25, 6:26][pm.tile("args.0", rank)[1:]])
        assert data.bytes_read == image.nbytes * 400 // (990 * 4)


def test_truncated_file_is_an_error(tmp_path: Path) -> None:
    path = tiff(tmp_path / "image.tif", np.random.default_rng(0).random((1, 256, 256)))
    whole = sx.images.GeoTiff(path)
    os.truncate(path, path.stat().st_size // 3)
    with pytest.raises(sx.Error, match="the file cannot be read") as caught:
        whole[slice(0, 1), slice(200, 256), slice(0, 256)]
    assert "truncated" in str(caught.value) and "image.tif" in str(caught.value)
    path = nifti(tmp_path / "scan.nii", numbered(20, 20, 20).astype(np.float32))
    os.truncate(path, path.stat().st_size // 3)
    with pytest.raises(sx.Error, match="the file cannot be read"):
        sx.images.Nifti(path)[slice(0, 1), slice(15, 20), slice(0, 20), slice(0, 20)]


def test_missing_package_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nibabel", None)
    with pytest.raises(sx.Error, match="by nibabel, which is not installed") as caught:
        sx.images.Nifti("file")  # type: ignore[arg-type]
    assert "pip install shardfx[images]" in str(caught.value)


def test_missing_file_or_one_that_is_no_image_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(sx.Error, match="there is no such file"):
        sx.images.GeoTiff(tmp_path / "image.tif")
    (tmp_path / "image.tif").write_text("no image")
    with pytest.raises(sx.Error, match="the file cannot be read"):
        sx.images.GeoTiff(tmp_path / "image.tif")
