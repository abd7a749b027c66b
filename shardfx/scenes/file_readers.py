"""Files of images that give windows of themselves: GeoTIFF by rasterio, NIfTI by nibabel."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from shardfx.ir.errors import Error


def imported(package: str, reader: str) -> Any:
    """A package that not everybody has.

    Raises:
        Error: it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise Error(
            f"{reader} reads files by {package}, which is not installed",
            where=f"shardfx.{reader}(...)",
            expected=f"the package {package}",
            got=str(error),
            remedy="pip install shardfx[images]",
        ) from error


class File:
    """A file that is opened where it is read: once in each process, for handles do not live through a fork."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._handles: dict[int, Any] = {}
        if not self.path.is_file():
            raise Error("there is no such file", where=f"shardfx.{type(self).__name__}(...)", got=str(path))

    def _open(self) -> Any:
        raise NotImplementedError

    @property
    def _handle(self) -> Any:
        if os.getpid() not in self._handles:
            try:
                self._handles[os.getpid()] = self._open()
            except Exception as error:
                raise self._broken(error) from error
        return self._handles[os.getpid()]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": {}}

    def _broken(self, error: Exception) -> Error:
        return Error(
            "the file cannot be read",
            where=str(self.path),
            expected=f"a whole file, as {type(self).__name__} reads it",
            got=f"{type(error).__name__}: {error}",
            remedy="is it cut short? Write or copy it anew",
        )


class GeoTiff(File):
    """A GeoTIFF, or whatever else rasterio opens, as an array (C, H, W) that reads windows of itself::

        scene = (sx.GeoTiff("image.tif"), sx.GeoTiff("mask.tif", channel=0))

    Args:
        path: of the file.
        channel: one band alone, counted from 0: then it is (H, W).

    Raises:
        Error: rasterio is not installed (``pip install shardfx[images]``); the file cannot be read.
    """

    def __init__(self, path: str | Path, channel: int | None = None) -> None:
        imported("rasterio", "GeoTiff")
        super().__init__(path)
        file, self.channel = self._handle, channel
        self.shape = (*(() if channel is not None else (file.count,)), file.height, file.width)

    def _open(self) -> Any:
        return imported("rasterio", "GeoTiff").open(self.path)

    def __getitem__(self, window: tuple[slice, ...]) -> Any:
        rows, columns = ((each.start, each.stop) for each in window[-2:])
        bands: Any = None if self.channel is None else self.channel + 1
        if self.channel is None:
            bands = list(range(window[0].start + 1, window[0].stop + 1))
        try:
            return self._handle.read(bands, window=(rows, columns))
        except Exception as error:
            raise self._broken(error) from error


class Nifti(File):
    """A NIfTI volume, or whatever else nibabel opens, as an array (C, D, H, W) that reads windows of itself: D, H, W
    are its third, second and first axes, C the fourth one, or one. ::

        scene = (sx.Nifti("scan.nii"), sx.Nifti("label.nii", channel=0))

    A packed file (``.nii.gz``) is unpacked up to the window each time.

    Args:
        path: of the file.
        channel: one volume alone: then it is (D, H, W).

    Raises:
        Error: nibabel is not installed (``pip install shardfx[images]``); the file cannot be read.
    """

    def __init__(self, path: str | Path, channel: int | None = None) -> None:
        imported("nibabel", "Nifti")
        super().__init__(path)
        self.channel, sizes = channel, tuple(self._handle.shape)
        space = (*sizes[:3], *(1,) * (3 - len(sizes)))[::-1]
        self.shape = space if channel is not None else (sizes[3] if len(sizes) > 3 else 1, *space)

    def _open(self) -> Any:
        return imported("nibabel", "Nifti").load(self.path)

    def __getitem__(self, window: tuple[slice, ...]) -> Any:
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
