"""Windows of array-likes (numpy, a memmap, zarr, h5py) and of image files: GeoTIFF by rasterio, NIfTI by nibabel."""

from __future__ import annotations

import importlib
import mmap
import os
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from shardfx.ir.errors import Error

Window = tuple[slice, ...]
"""A slice for each dim of an array."""


class ArrayLike(Protocol):
    """A scene: an array that gives windows of itself by slicing."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""

    def __getitem__(self, window: Any) -> Any: ...


def read_window(scene: ArrayLike, window: Window, name: str) -> torch.Tensor:
    """A copy of a window of an array-like.

    Args:
        scene: anything with ``shape`` and slicing.
        window: a slice for each of its dims.
        name: of the scene, for errors.

    Raises:
        Error: it cannot be read, or gives less than it should: its file is truncated.
    """
    lengths = tuple(each.stop - each.start for each in window)
    if 0 in lengths:
        return torch.empty(lengths)
    _check_mapped_file(scene, name)
    where = f"{name}, rows {', '.join(f'{each.start}:{each.stop}' for each in window)}"
    try:
        got = scene[window]
    except Error:
        raise
    except Exception as error:
        raise unreadable(name, where, error) from error
    if isinstance(got, torch.Tensor):
        found = got.detach().clone()
    else:
        made = np.array(got)
        found = torch.from_numpy(made.astype(made.dtype.newbyteorder("="), copy=False).reshape(made.shape))
    if tuple(found.shape) != lengths:
        raise Error(
            f"{name} gives another window than it was asked for",
            where=where,
            expected=f"an array of shape {lengths}",
            got=tuple(found.shape),
            remedy="is its file truncated? It is smaller than its shape says",
        )
    return found


def unreadable(name: str, where: str, error: Exception) -> Error:
    """The error where a user's reader fails."""
    return Error(
        f"{name} cannot be read",
        where=where,
        expected="an array, by slices of its dims",
        got=f"{type(error).__name__}: {error}",
        remedy="is its file truncated? Write or copy it anew",
    )


def _check_mapped_file(scene: object, name: str) -> None:
    """A mapped file must be as long as its array: to read beyond its end would end the process.

    Raises:
        Error: it is shorter.
    """
    base: Any = scene
    while isinstance(base, np.ndarray):
        base = base.base
    if not isinstance(scene, np.memmap) or not isinstance(base, mmap.mmap) or scene.filename is None:
        return
    need = scene.offset - scene.offset % mmap.ALLOCATIONGRANULARITY + len(base)
    there = Path(scene.filename).stat().st_size
    if there < need:
        raise Error(
            f"the file of {name} is truncated",
            where=str(scene.filename),
            expected=f"{need} bytes, as when it was opened",
            got=f"{there} bytes",
            remedy="write or copy it anew",
        )


class ImageFile:
    """A file that is opened lazily, once in each process, for handles do not survive a fork."""

    package = opener = ""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._handles: dict[int, Any] = {}
        self._imported()
        if not self.path.is_file():
            raise Error("there is no such file", where=f"shardfx.{type(self).__name__}(...)", got=str(path))

    def _imported(self) -> Any:
        """The package that reads it.

        Raises:
            Error: it is not installed.
        """
        reader = type(self).__name__
        try:
            return importlib.import_module(self.package)
        except ImportError as error:
            raise Error(
                f"{reader} reads files by {self.package}, which is not installed",
                where=f"shardfx.{reader}(...)",
                expected=f"the package {self.package}",
                got=str(error),
                remedy="pip install shardfx[images]",
            ) from error

    @property
    def _handle(self) -> Any:
        if os.getpid() not in self._handles:
            try:
                self._handles[os.getpid()] = getattr(self._imported(), self.opener)(self.path)
            except Exception as error:
                raise self._broken(error) from error
        return self._handles[os.getpid()]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": {}}

    def _broken(self, error: Exception) -> Error:
        return Error(
            "the file cannot be read",
            where=str(self.path),
            expected=f"a complete file, as {type(self).__name__} reads it",
            got=f"{type(error).__name__}: {error}",
            remedy="is it truncated? Write or copy it anew",
        )


class GeoTiff(ImageFile):
    """A GeoTIFF, or any other file that rasterio opens, as an array (C, H, W) that reads windows of itself::

        scene = (sx.images.GeoTiff("image.tif"), sx.images.GeoTiff("mask.tif", channel=0))

    Args:
        path: of the file.
        channel: one band alone, counted from 0: then it is (H, W).

    Raises:
        Error: rasterio is not installed (``pip install shardfx[images]``); the file cannot be read.
    """

    package, opener = "rasterio", "open"

    def __init__(self, path: str | Path, channel: int | None = None) -> None:
        super().__init__(path)
        file, self.channel = self._handle, channel
        self.shape = (*(() if channel is not None else (file.count,)), file.height, file.width)

    def __getitem__(self, window: Window) -> Any:
        rows, columns = ((each.start, each.stop) for each in window[-2:])
        bands: Any = None if self.channel is None else self.channel + 1
        if self.channel is None:
            bands = list(range(window[0].start + 1, window[0].stop + 1))
        try:
            return self._handle.read(bands, window=(rows, columns))
        except Exception as error:
            raise self._broken(error) from error


class Nifti(ImageFile):
    """A NIfTI volume, or any other file that nibabel opens, as an array (C, D, H, W) that reads windows of itself:
    D, H, W are its third, second and first axes, C the fourth one, or one. ::

        scene = (sx.images.Nifti("scan.nii"), sx.images.Nifti("label.nii", channel=0))

    A compressed file (``.nii.gz``) is decompressed up to the window each time.

    Args:
        path: of the file.
        channel: one volume alone: then it is (D, H, W).

    Raises:
        Error: nibabel is not installed (``pip install shardfx[images]``); the file cannot be read.
    """

    package, opener = "nibabel", "load"

    def __init__(self, path: str | Path, channel: int | None = None) -> None:
        super().__init__(path)
        self.channel, sizes = channel, tuple(self._handle.shape)
        space = (*sizes[:3], *(1,) * (3 - len(sizes)))[::-1]
        self.shape = space if channel is not None else (sizes[3] if len(sizes) > 3 else 1, *space)

    def __getitem__(self, window: Window) -> Any:
        volume = self._handle.dataobj
        channels = slice(self.channel, self.channel + 1) if self.channel is not None else window[0]
        index = (*window[:-4:-1], *(() if len(volume.shape) < 4 else (channels,)))
        try:
            found = volume[index[: len(volume.shape)]]
        except Exception as error:
            raise self._broken(error) from error
        found = found.reshape(*found.shape[:3], *(1,) * (3 - found.ndim), *found.shape[3:])
        found = found.reshape(*found.shape[:3], -1).transpose(3, 2, 1, 0)
        return found if self.channel is None else found[0]
