"""Reading a window of an array-like, and nothing more: numpy, a memmap, zarr, h5py, or a reader of ours."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from shardfx.ir.errors import Error

from .turn import Window


class ArrayLike(Protocol):
    """What a scene is: it has a shape, and gives windows of itself."""

    @property
    def shape(self) -> tuple[int, ...]:
        """How many rows it has of each dim."""

    def __getitem__(self, window: Any) -> Any:
        """The part of it that slices name, one for each dim."""


def lengths(window: Window) -> tuple[int, ...]:
    """The shape of what a window holds."""
    return tuple(each.stop - each.start for each in window)


def read_window(scene: ArrayLike, window: Window, name: str) -> torch.Tensor:
    """What an array-like has in a window, in memory of its own.

    Args:
        scene: anything with ``shape`` and slicing.
        window: a slice for each of its dims.
        name: of the scene, for errors.

    Raises:
        Error: it cannot be read, or gives less than it should: its file is cut short.
    """
    if 0 in lengths(window):
        return torch.empty(lengths(window))
    check_file(scene, name)
    try:
        got = scene[window]
    except Error:
        raise
    except Exception as error:
        raise unreadable(name, f"{name}, rows {bounds_text(window)}", error) from error
    if isinstance(got, torch.Tensor):
        found = got.detach().clone()
    else:
        made = np.array(got)
        found = torch.from_numpy(made.astype(made.dtype.newbyteorder("="), copy=False).reshape(made.shape))
    if tuple(found.shape) != lengths(window):
        raise Error(
            f"{name} gives another window than it was asked for",
            where=f"{name}, rows {bounds_text(window)}",
            expected=f"a piece of shape {lengths(window)}",
            got=tuple(found.shape),
            remedy="is its file cut short? It is smaller than its shape says",
        )
    return found


def unreadable(name: str, where: str, error: Exception) -> Error:
    """What is said where somebody's reader fails."""
    return Error(
        f"{name} cannot be read",
        where=where,
        expected="an array, by slices of its dims",
        got=f"{type(error).__name__}: {error}",
        remedy="is its file cut short? Write or copy it anew",
    )


def check_file(scene: object, name: str) -> None:
    """A mapped file is as long as its array: to read beyond its end would end the process.

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
            f"the file of {name} is cut short",
            where=str(scene.filename),
            expected=f"{need} bytes, as when it was opened",
            got=f"{there} bytes",
            remedy="write or copy it anew",
        )


def bounds_text(window: Window) -> str:
    """``0:3, 512:1024``."""
    return ", ".join(f"{each.start}:{each.stop}" for each in window)
